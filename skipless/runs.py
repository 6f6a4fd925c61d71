"""A run is a folder; everything that reports reads it and nothing else.

runs/<name>/
    config.json          the configuration, the versions, the data and the machine
    metrics.jsonl        one object a line: step, tokens, seconds, and what was measured
    samples.jsonl        text sampled on the way
    tokenizer.json
    checkpoints/step-<n>/
    tensorboard/
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from skipless.checkpoint import Checkpoint, Checkpoints
from skipless.config import ModelConfig, RunConfig, explain
from skipless.data import Tokenizer
from skipless.errors import UserError, did_you_mean
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.parallel import Channel

MODELS: dict[str, type[CausalLM] | type[MaskedLM]] = {"causal": CausalLM, "masked": MaskedLM}


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def config_file(self) -> Path:
        """What the run is."""
        return self.folder / "config.json"

    @property
    def metrics_file(self) -> Path:
        """What was measured."""
        return self.folder / "metrics.jsonl"

    @property
    def archived_metrics_file(self) -> Path:
        """The same, compressed, in the archive of published runs."""
        return self.folder / "metrics.jsonl.gz"

    @property
    def samples_file(self) -> Path:
        """What it wrote."""
        return self.folder / "samples.jsonl"

    @property
    def tokenizer_file(self) -> Path:
        """How its text becomes tokens."""
        return self.folder / "tokenizer.json"

    def checkpoints(self, keep_last: int = 2, crew: Channel | None = None) -> Checkpoints:
        """Its checkpoints; a crew saves them together."""
        return Checkpoints(self.folder / "checkpoints", keep_last=keep_last, crew=crew)

    @property
    def exists(self) -> bool:
        """Whether a training has begun here."""
        return self.config_file.exists()

    def info(self) -> dict[str, Any]:
        """The content of config.json."""
        try:
            content = json.loads(self.config_file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{str(self.folder)!r} is not a run: {error.strerror}: {self.config_file.name}") from None
        except ValueError:
            raise UserError(f"{str(self.config_file)!r} is not JSON") from None
        if not isinstance(content, dict):
            raise UserError(f"{str(self.config_file)!r} does not hold a configuration")
        return content

    def config(self) -> RunConfig:
        """The configuration it runs with."""
        try:
            return RunConfig.model_validate(self.info().get("config"))
        except ValidationError as error:
            raise UserError(f"{str(self.config_file)!r}: {explain(error)}") from None

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Its measurements; a last line that is still being written is left out."""
        live = self.metrics_file.exists() or not self.archived_metrics_file.exists()
        return _lines(self.metrics_file if live else self.archived_metrics_file)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Its samples."""
        return _lines(self.samples_file)

    def tokenizer(self) -> Tokenizer:
        """Its tokeniser."""
        return Tokenizer.load(self.tokenizer_file)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def find_run(path: Path | str) -> Run:
    """The run at a path, or by its name below `runs/`."""
    given = Path(path)
    for folder in (given, Path("runs") / given):
        if (folder / "config.json").exists():
            return Run(folder)
    known = sorted(folder.parent.name for folder in Path("runs").glob("*/config.json"))
    listed = f"; runs here: {', '.join(known[:8])}{did_you_mean(given.name, known)}" if known else ""
    raise UserError(f"there is no run at {str(path)!r}{listed}")


def load(path: Path | str, *, which: str = "last") -> CausalLM | MaskedLM | SequenceClassifier:
    """The model of a run, of one of its checkpoints, or of an export, in eval mode, with its tokeniser as `.tokenizer`.

    An export is a folder of `skipless export`, or one that `save_pretrained` wrote.
    """
    given = Path(path)
    if is_export(given):
        return _load_export(given)
    if (given / "manifest.json").exists():
        run, checkpoint = Run(given.absolute().parent.parent), Checkpoints.load(given)
    else:
        run = find_run(given)
        checkpoint = choose_checkpoint(run, which)
    return load_checkpoint(run, checkpoint)


def load_checkpoint(run: Run, checkpoint: Checkpoint) -> CausalLM | MaskedLM:
    """The model of a run as a checkpoint has it."""
    cfg = run.config()
    model = MODELS[cfg.task](cfg.model)
    model.load_state_dict(checkpoint.tensors("model"))
    model.tokenizer = run.tokenizer()
    return model.eval()


def choose_checkpoint(run: Run, which: str) -> Checkpoint:
    """A run's `last` or `best` checkpoint."""
    checkpoints = run.checkpoints()
    if which == "best":
        valid = [Checkpoints.load(path) for path in checkpoints.all() if Checkpoints.verify(path) is None]
        scored = [checkpoint for checkpoint in valid if checkpoint.score is not None]
        if scored:
            return min(scored, key=lambda checkpoint: (checkpoint.score, checkpoint.step))
    checkpoint, damaged = checkpoints.latest_valid()
    if checkpoint is None:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged) or "it has none yet"
        raise UserError(f"run {run.name!r} has no valid checkpoint ({reasons})")
    return checkpoint


# ---------------------------------------------------------------------------- exports

MODEL_TYPE = "skipless"
"""`model_type` of an export's config.json."""

ARCHITECTURES: dict[str, type[CausalLM] | type[MaskedLM] | type[SequenceClassifier]] = {
    "SkiplessForCausalLM": CausalLM,
    "SkiplessForMaskedLM": MaskedLM,
    "SkiplessForSequenceClassification": SequenceClassifier,
}


def is_export(folder: Path) -> bool:
    """Whether a folder holds an exported model."""
    return _export_info(folder).get("model_type") == MODEL_TYPE


def _export_info(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _load_export(folder: Path) -> CausalLM | MaskedLM | SequenceClassifier:
    info = _export_info(folder)
    (name,) = info.get("architectures") or [""]
    if name not in ARCHITECTURES:
        raise UserError(f"{str(folder)!r} holds {name or 'no model'!r}; known: {', '.join(ARCHITECTURES)}")
    try:
        cfg = ModelConfig.model_validate({key: info[key] for key in ModelConfig.model_fields if key in info})
    except ValidationError as error:
        raise UserError(f"{str(folder / 'config.json')!r}: {explain(error)}") from None
    kind = ARCHITECTURES[name]
    labels = len(info.get("id2label", ())) or 2  # transformers does not write down two
    model = kind(cfg, labels) if issubclass(kind, SequenceClassifier) else kind(cfg)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{str(folder)!r} has no .safetensors file; an export to onnx is for ONNX Runtime")
    try:
        tensors = {key.removeprefix("model."): value for file in files for key, value in load_file(file).items()}
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:  # damaged, or not of this configuration
        raise UserError(f"the weights in {str(folder)!r} cannot be loaded: {error}") from None
    model.tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    return model.eval()
