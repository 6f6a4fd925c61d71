"""Trainings that take a second: a little text, a little model, and how two runs are held against each other."""

import json
import random
import re
from pathlib import Path

from skipless.config.run import RunConfig
from skipless.recipes.laptop import smoke
from skipless.runs import Run
from skipless.storage.checkpoints import Checkpoints
from skipless.training.observer import Observer

NAMES = [first + last for first in ("alpha", "beta", "gamma", "delta") for last in ("", "_sum", "_max", "_of")]
SECONDS = re.compile(rb'"seconds": [0-9.e-]+')

CAUSAL = {
    "model.n_layer": 2,
    "model.d_model": 32,
    "model.n_head": 2,
    "model.max_seq_len": 16,
    "data.vocab_size": 300,
    "data.seq_len": 16,
    "data.valid_fraction": 0.2,
    "data.max_bytes": None,
    "train.steps": 12,
    "train.batch_size": 4,
    "train.lr": 3e-3,
    "train.eval_every": 4,
    "train.eval_rows": 8,
    "train.save_every": 4,
    "train.log_every": 3,
    "train.gains_every": 6,
    "train.sample_every": 0,
}
MASKED = {"task": "masked", "data.tokenizer": "wordpiece", "data.vocab_size": 200}


def write_text(folder: Path, files: int = 40, functions: int = 60, seed: int = 0) -> str:
    """Python-like text of some 150 kB, and the source that reads it."""
    rng = random.Random(seed)
    folder.mkdir()
    for number in range(files):
        parts = (rng.sample(NAMES, 3) for _ in range(functions))
        text = "".join(f"def {f}({x}, {y}):\n    return {x} {rng.choice('+-*/')} {y}\n\n" for f, x, y in parts)
        (folder / f"module{number:02}.py").write_text(text)
    return f"files:{folder}/*.py"


def tiny(source: str, *changes: dict, **train) -> RunConfig:
    """The causal configuration with changes by dotted name, and those of `train` by their own."""
    together = {**CAUSAL, "data.source": source}
    for change in changes:
        together |= change
    return smoke().override(together | {f"train.{key}": value for key, value in train.items()})


def write_config(path: Path, cfg: RunConfig) -> Path:
    """A file for `--config`: JSON is YAML."""
    path.write_text(cfg.model_dump_json(indent=1))
    return path


class Recorder(Observer):
    """Remembers what it was told, and calls `on_log` and `on_begin`."""

    def __init__(self, on_log=lambda record: None, on_begin=lambda trainer: None):
        self.messages, self.stages, self.records = [], [], []
        self.on_log, self.on_begin = on_log, on_begin

    def message(self, text):
        self.messages.append(text)

    def data(self, stage, done, total):
        if stage not in self.stages:
            self.stages.append(stage)

    def begin(self, trainer):
        self.trainer = trainer
        self.on_begin(trainer)

    def log(self, record):
        self.records.append(record)
        self.on_log(record)


class Stop(Exception):
    """Raised by an observer to leave a run unfinished."""


def stop_at(step: int) -> Recorder:
    """An observer that ends the training, without a save, at its first line of metrics from `step` on."""

    def look(record):
        if record["step"] >= step:
            raise Stop

    return Recorder(on_log=look)


# ---------------------------------------------------------------- two runs held against each other


def assert_same_run(folder: Path, reference: Path) -> None:
    """The same to the last bit but for the time that was spent."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        found, expected = (_lines_without_seconds(path / name) for path in (folder, reference))
        assert len(found) == len(expected), name
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other, f"{name}, line {number + 1}"
    assert_same_checkpoint(newest(folder), newest(reference))


def assert_same_checkpoint(folder: Path, reference: Path) -> None:
    assert folder.name == reference.name
    assert Checkpoints.verify(folder) is None
    tensors = sorted(path.name for path in reference.glob("*.safetensors"))
    assert tensors == sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(tensors) >= 2
    for name in tensors:
        assert (folder / name).read_bytes() == (reference / name).read_bytes(), name
    assert _state(folder) == _state(reference)


def _lines_without_seconds(path: Path) -> list[bytes]:
    return [SECONDS.sub(b"", line) for line in path.read_bytes().splitlines(keepends=True)]


def _state(checkpoint: Path) -> dict:
    """Without the time, which is also in the lines that the positions count; those are checked against the files."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["state"]["seconds"]
    run = checkpoint.parent.parent
    sizes = {name: (run / f"{name}.jsonl").stat().st_size for name in state["journals"]}
    assert state.pop("journals") == sizes
    return state


def newest(folder: Path) -> Path:
    return Run(folder).checkpoints().all()[-1]


def steps_kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in Run(folder).checkpoints().all()]


def state_of(checkpoint: Path) -> dict:
    return Checkpoints.load(checkpoint).state["state"]


def records(folder: Path) -> list[dict]:
    return list(Run(folder).metrics())


def checkpoint_names(folder: Path) -> list[str]:
    """What is among the checkpoints, seen without reading them."""
    try:
        return [entry.name for entry in (folder / "checkpoints").iterdir()]
    except FileNotFoundError:
        return []


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; -1 if there is none."""
    steps = (name.removeprefix("step-") for name in checkpoint_names(folder) if name.startswith("step-"))
    return max(map(int, steps), default=-1)
