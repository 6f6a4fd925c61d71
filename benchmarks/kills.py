"""SIGKILL at random instants, over every command that writes: nothing may be lost, and the end is the same to the bit.

    python benchmarks/kills.py --kills 300 --seed 0      # an hour on two cores that have nothing else to do
    python benchmarks/kills.py --kills 20 --only train   # one of the commands below, in `SHARES`

Each command is started, killed and started again until it has finished, then begun anew in another folder, until all
kills are spent. About half of the kills wait until something is being staged, and so fall inside a save. After every
kill, the steps that valid checkpoints had reached and the results that were finished must still be there. At the end of
every round, all that the command has made is held against an undisturbed reference, bit for bit (only the seconds that
were measured differ), and nothing staged may be left. Prints a table by command; exit status 1 if anything was lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from skipless.storage.checkpoints import Checkpoints  # noqa: E402
from skipless.storage.files import STAGING_PREFIX  # noqa: E402
from skipless.storage.manifest import Damaged, Manifest  # noqa: E402
from skipless.terminal.tables import show_table  # noqa: E402
from tests.helpers.glue_files import small_glue  # noqa: E402
from tests.helpers.labelled_files import three_classes  # noqa: E402
from tests.helpers.processes import Child, ForkServer  # noqa: E402
from tests.helpers.tiny_runs import (  # noqa: E402
    CAUSAL,
    MASKED,
    SECONDS,
    assert_same_run,
    tiny,
    write_config,
    write_text,
)
from tests.helpers.torchrun import Launched  # noqa: E402

SHARES = {
    "train": 25,
    "finetune": 14,
    "sweep": 12,
    "export": 15,
    "data": 10,
    "report": 2,
    "predict": 2,
    "new-part": 2,
    "compare": 6,
    "reproduce": 6,
    "torchrun": 6,
}
"""Of a hundred kills. The last three take the longest, for their processes cannot be forked from a warm one."""

PATIENCE = 900.0
"""Seconds after which a process that should have ended counts as hung."""


class Lost(Exception):
    """Something that was there before a kill is not there any more, or not as it was."""


@dataclass
class Tally:
    """What came of the kills of one command."""

    kills: int = 0
    in_saves: int = 0
    """Kills that left something staged."""
    rounds: int = 0
    lost: list[str] = field(default_factory=list)


@dataclass
class Place:
    """What the commands of a round share, and where they write."""

    shared: Path
    folder: Path
    server: ForkServer

    @property
    def cache(self) -> list[str]:
        """The option for prepared data."""
        return ["--cache-dir", str(self.shared / "cache")]

    @property
    def source(self) -> str:
        """The text."""
        return f"files:{self.shared}/modules/*.py"


# ----------------------------------------------------------------------------- what was reached, and what is the same


def staged(folder: Path) -> list[str]:
    """What is being written below a folder, or was left half-written."""
    found = []
    for _, folders, files in os.walk(folder):
        found += [name for name in (*folders, *files) if name.startswith(STAGING_PREFIX)]
    return found


def reached(folder: Path) -> dict[str, int]:
    """The newest step with a valid checkpoint, of each folder of checkpoints below a folder."""
    places = {path.parent for path in folder.rglob("step-*") if not path.parent.name.startswith(STAGING_PREFIX)}
    newest = {place: Checkpoints(place).latest_valid()[0] for place in places}
    return {str(place): found.step for place, found in newest.items() if found is not None}


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their names; none if it is not there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def require(condition: bool, what: str) -> None:
    """Raise Lost."""
    if not condition:
        raise Lost(what)


def same_runs(runs: Path, reference: Path) -> None:
    """Two folders have the same runs, bit for bit."""
    names = sorted(path.parent.name for path in reference.glob("*/config.json"))
    require(bool(names), f"{reference} has no runs")
    require(names == sorted(path.parent.name for path in runs.glob("*/config.json")), f"{runs} has other runs")
    for name in names:
        assert_same_run(runs / name, reference / name)


# -------------------------------------------------------------------------------------------------------- commands


class Command:
    """A command that writes: how it is started, what must hold after a kill, and what at its end."""

    target: str | None = None
    """What the fork server calls in the place of the command."""

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""

    def begin(self, place: Place) -> None:
        """Fill the folder of a round before its first start."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        raise NotImplementedError

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """Raise Lost where something is worse than before the kill; what was reached now."""
        now = reached(place.folder)
        for name, step in before.items():
            require(now.get(name, -1) >= step, f"{name}: step {step} was saved, and {now.get(name)} is there")
        return now

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        raise NotImplementedError


class Train(Command):
    """`skipless train`, in several forms."""

    CHANGES = {"train.steps": 24, "train.sample_every": 12, "train.health_every": 15, "train.log_every": 5}
    FORMS = (
        {"train.save_every": 3},
        {**MASKED, "train.save_every": 1},
        {"train.batch_size": 6, "train.micro_batch": 2, "model.dropout": 0.1, "train.save_every": 2},
        {"train.optimizer": "muon", "train.save_every": 3},
        {"train.schedule": "wsd", "train.ema": 0.9, "train.activation_checkpointing": True, "train.save_every": 2},
    )

    def __init__(self, form: int) -> None:
        self.form = form

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        cfg = tiny(place.source, self.CHANGES, self.FORMS[self.form])
        file = place.shared / f"train-{self.form}.yaml"
        if not file.exists():
            write_config(file, cfg)
        where = ["--runs", str(place.folder), *place.cache, "--track", "none"]
        return ["train", "--config", str(file), "--name", "run", *where, "--resume"]

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        assert_same_run(place.folder / "run", reference / "run")


class Finetune(Command):
    """`skipless finetune` with a checkpoint after every step."""

    target = "tests.helpers.frequent_saves:finetune"

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        small_glue(shared / "glue")
        self.encoder = shared / "encoder" / "run"
        shape = {"model.max_seq_len": 32, "data.seq_len": 32, "model.block": "sas-p", "train.eval_every": 0}
        if self.encoder.exists():
            return
        cfg = tiny(f"files:{shared}/modules/*.py", MASKED, shape, {"train.steps": 6})
        file = write_config(shared / "encoder.yaml", cfg)
        words = ["train", "--config", str(file), "--name", "run", "--runs", str(self.encoder.parent)]
        finish(server.start([*words, "--cache-dir", str(shared / "cache"), "--track", "none"]))

    def begin(self, place: Place) -> None:
        """Fill the folder of a round before its first start."""
        shutil.copytree(self.encoder, place.folder / "run")

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        settings = ["--set", "epochs=2", "--set", "batch_size=8", "--set", "lr=3e-3"]
        where = ["finetune", str(place.folder / "run"), "--glue-dir", str(place.shared / "glue")]
        return [*where, "--tasks", "cola,stsb", "--seeds", "2", *settings]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """The checkpoints of a fit are removed when it is finished; then its result must be there."""
        now = reached(place.folder)
        done = {f"{task}-seed-{seed}" for task, seeds in self._results(place).items() for seed in seeds}
        now |= dict.fromkeys(done, 1)
        for name, step in before.items():
            fit = Path(name).name
            require(fit in done or now.get(name, -1) >= step, f"{fit}: step {step} was saved and is gone")
        return now

    def _results(self, place: Place) -> dict[str, dict[str, object]]:
        path = place.folder / "run" / "glue.json"
        return json.loads(path.read_text())["fits"] if path.exists() else {}

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        require(self._outcome(place.folder / "run") == self._outcome(reference / "run"), "glue.json has other results")

    def _outcome(self, run: Path) -> tuple[dict[str, object], dict[str, bytes]]:
        results = json.loads((run / "glue.json").read_text())
        for fits in results["fits"].values():
            for fit in fits.values():
                del fit["seconds"]
        return results, {name: text for name, text in files_of(run / "glue").items() if name.endswith(".tsv")}


class FinetuneOwn(Finetune):
    """`skipless finetune` on rows of one's own, with a checkpoint after every step."""

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        super().prepare(shared, server)
        self.parts = three_classes(shared / "rows")

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        rows = [
            word
            for name, path in zip(("train", "valid", "test"), self.parts, strict=True)
            for word in (f"--{name}", str(path))
        ]
        columns = ["--text", "body", "--label", "mood", "--name", "mood", "--runs", str(place.folder)]
        settings = ["--set", "epochs=2", "--set", "batch_size=8", "--set", "lr=3e-3"]
        return ["finetune", str(place.folder / "run"), *rows, *columns, *settings]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """The classifier's checkpoints stay, so none that was there may be missing."""
        return Command.after_kill(self, place, before)

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        found, expected = (self._files(folder / "mood") for folder in (place.folder, reference))
        require(found == expected, "the classifier's folder has other files")

    def _files(self, folder: Path) -> dict[str, bytes]:
        kept = ("model.safetensors", "optimizer0.safetensors", "test.jsonl", "tokenizer.json", "metrics.jsonl")
        files = {name: data for name, data in files_of(folder).items() if Path(name).name in kept}
        return {name: SECONDS.sub(b"", data) for name, data in files.items()}


SMALL = {key: value for key, value in CAUSAL.items() if key not in ("train.lr", "train.steps", "train.save_every")}


def small(place: Place, **train: int) -> list[str]:
    """Options that make each run of an experiment a matter of a second."""
    values = {**SMALL, "data.source": place.source, **{f"train.{key}": value for key, value in train.items()}}
    words = ([f"{key}={'null' if value is None else value}"] for key, value in values.items())
    return [word for (setting,) in words for word in ("--set", setting)] + place.cache


class Sweep(Command):
    """`skipless sweep` over four points."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        over = ["--over", "train.lr=1e-3,3e-3", "--block", "pre-ln", "--block", "sas"]
        folders = ["--output", str(place.folder / "sweep"), "--runs", str(place.folder / "runs")]
        return ["sweep", *over, *folders, *small(place, steps=16, save_every=2), "--json"]

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        same_runs(place.folder / "runs", reference / "runs")
        best = [(folder / "sweep" / "best.json").read_bytes() for folder in (place.folder, reference)]
        require(best[0] == best[1], "best.json differs")


class Export(Command):
    """`skipless export` over an export of another checkpoint, which is there until the new one is."""

    def __init__(self, to: str) -> None:
        self.to = to

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        self.run = shared / "exported" / "run"
        if not self.run.exists():
            cfg = tiny(f"files:{shared}/modules/*.py", {"train.steps": 8, "train.save_every": 4})
            file = write_config(shared / "exported.yaml", cfg)
            words = ["train", "--config", str(file), "--name", "run", "--runs", str(self.run.parent)]
            finish(server.start([*words, "--cache-dir", str(shared / "cache"), "--track", "none"]))
        self.old = shared / f"old-{self.to}"
        finish(server.start(["export", str(self.run), str(self.old), "--to", self.to, "--checkpoint", "4"]))
        self.new = shared / f"new-{self.to}"
        finish(server.start(["export", str(self.run), str(self.new), "--to", self.to]))

    def begin(self, place: Place) -> None:
        """Fill the folder of a round before its first start."""
        shutil.copytree(self.old, place.folder / "out")

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        return ["export", str(self.run), str(place.folder / "out"), "--to", self.to, "--overwrite"]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """What is there is the old export or the new; between two renames the old one has another name for a moment."""
        found = files_of(place.folder / "out") or files_of(place.folder / ".old-out")
        require(found in (files_of(self.old), files_of(self.new)), "neither the old export nor the new is there")
        return {}

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        require(files_of(place.folder / "out") == files_of(self.new), "the export differs")
        require(not (place.folder / ".old-out").exists(), "the old export was left behind")


class Data(Command):
    """`skipless data build`."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        sizes = ["--set", f"data.tokenizer={self.tokenizer}", "--set", "data.vocab_size=300"]
        where = ["--source", place.source, "--seq-len", "16", "--cache-dir", str(place.folder)]
        return ["data", "build", *where, *sizes, "--set", "data.valid_fraction=0.2"]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """A corpus is whole or not there."""
        for folder in self._corpora(place.folder):
            try:
                Manifest.read(folder).verify(folder)
            except Damaged as damage:
                raise Lost(f"{folder.name}: {damage}") from damage
        return {}

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        (found,), (expected,) = self._corpora(place.folder), self._corpora(reference)
        require(found.name == expected.name and files_of(found) == files_of(expected), "the corpus differs")

    @staticmethod
    def _corpora(folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(STAGING_PREFIX)]


class Files(Command):
    """A command of which a process that nobody kills makes the files once: each is as those are, or as before."""

    name = ""

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        self.expected = shared / f"expected-{self.name}"
        undisturbed = Place(shared, self.expected, server)
        self.expected.mkdir()
        self.begin(undisturbed)
        self.old = files_of(self.expected)
        finish(server.start(self.arguments(undisturbed)))

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """Every file is the old one or the new one."""
        new = files_of(self.expected)
        for name, content in files_of(place.folder).items():
            if not Path(name).name.startswith(STAGING_PREFIX):
                require(content in (new.get(name), self.old.get(name)), f"{name} is neither the old one nor the new")
        return {}

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        require(files_of(place.folder) == files_of(self.expected), f"{self.name} has made other files")


class NewPart(Files):
    """`skipless new-part`."""

    name = "new-part"

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        return ["new-part", "mine", "--output", str(place.folder)]


class Report(Files):
    """`skipless report` of two runs: a page, a plot, and the files of every plot."""

    name = "report"

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        for block in ("pre-ln", "sas-p"):
            cfg = tiny(f"files:{shared}/modules/*.py", {"train.steps": 6, "model.block": block})
            file = write_config(shared / f"{block}.yaml", cfg)
            words = ["train", "--config", str(file), "--name", block, "--runs", str(shared / "runs"), "--track", "none"]
            finish(server.start([*words, "--cache-dir", str(shared / "cache")]))
        super().prepare(shared, server)

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        runs = [str(place.shared / "runs" / block) for block in ("pre-ln", "sas-p")]
        files = ["--page", str(place.folder / "page.html"), "--files", "--plot", str(place.folder / "losses.png")]
        return ["report", *runs, *files]


class Predict(Files):
    """`skipless predict` into a file that is there already."""

    name = "predict"

    def prepare(self, shared: Path, server: ForkServer) -> None:
        """Make what all rounds need."""
        tuning = FinetuneOwn()
        tuning.prepare(shared, server)
        place = Place(shared, shared / "classifiers", server)
        tuning.begin(place)
        finish(server.start(tuning.arguments(place)))
        self.asked = [str(place.folder / "mood"), "--input", str(tuning.parts[0]), "--text", "body"]
        super().prepare(shared, server)

    def begin(self, place: Place) -> None:
        """Fill the folder of a round before its first start."""
        (place.folder / "answers.jsonl").write_text("an old answer\n")

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        return ["predict", *self.asked, "--output", str(place.folder / "answers.jsonl"), "--batch-size", "1"]


class Compare(Command):
    """`skipless compare`: now the command itself is killed, now one of its workers."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        folders = ["--runs", str(place.folder / "runs"), "--output", str(place.folder / "comparison")]
        words = ["compare", "pre-ln", "sas-p", "--rounds", "0", *folders, *small(place, steps=30, save_every=2)]
        return [*words, "--archive", str(place.folder / "archive"), "--json"]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """What is there of the page is whole."""
        for path in (place.folder / "comparison").glob("*.html"):
            require(path.read_text().rstrip().endswith("</html>"), "the page was torn")
        return super().after_kill(place, before)

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference; what is said of time differs."""
        same_runs(place.folder / "runs", reference / "runs")
        found, expected = (self._said(folder / "comparison") for folder in (place.folder, reference))
        require(found == expected, f"another verdict: {found}, and not {expected}")
        names = [sorted(files_of(folder / "comparison")) for folder in (place.folder, reference)]
        require(names[0] == names[1], "the page has other files")

    def _said(self, folder: Path) -> object:
        content = json.loads((folder / "comparison.json").read_text())
        verdicts = [one for one in content["finding"]["verdicts"] if one["claim"].endswith("per step")]
        return verdicts, content["rates"], content["failed"], content["left"]


class Reproduce(Command):
    """`skipless reproduce`: now the command itself is killed, now one of its workers."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        folders = ["--runs", str(place.folder / "runs"), "--output", str(place.folder / "results")]
        kept = ["--archive", str(place.folder / "archive")]
        return ["reproduce", "fig4", *small(place, steps=30, save_every=2), *folders, *kept, "--json"]

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        same_runs(place.folder / "runs", reference / "runs")
        archived = [sorted(path.name for path in (one / "archive").iterdir()) for one in (place.folder, reference)]
        require(archived[0] == archived[1], "other runs are archived")


# ---------------------------------------------------------------------------------------------------------- killing


def finish(child: Child) -> None:
    """Wait for the end of a command that nobody kills."""
    status = child.wait(PATIENCE)
    require(status == 0, f"it ended with {status}:\n{child.out[-2000:]}{child.err[-2000:]}")


def victim_of(child: Child, rng: random.Random) -> int:
    """The process itself, or as often one that it has started, if there is one."""
    try:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    except OSError:
        children = []
    workers = [int(pid) for pid in children if b"skipless.experiments.worker" in _command_line(pid)]
    return rng.choice([child.pid, *workers[:1]])


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_once(child: Child, folder: Path, rng: random.Random, seconds: float) -> bool:
    """Kill at a random instant, every other time the next at which something is staged; false if it ended before."""
    end = time.monotonic() + rng.uniform(0, seconds)
    while child.poll() is None and time.monotonic() < end:
        time.sleep(min(0.005, max(0.0, end - time.monotonic())))
    if rng.random() < 0.5:
        already = set(staged(folder))
        while child.poll() is None and not set(staged(folder)) - already:
            time.sleep(0.0005)
        time.sleep(rng.choice([0, rng.uniform(0, 0.02)]))
    if child.poll() is not None:
        return False
    try:
        os.kill(victim_of(child, rng), signal.SIGKILL)
    except ProcessLookupError:  # a worker that has just ended
        return False
    return child.wait(PATIENCE) != 0


def rounds(command: Command, shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
    """Kill a command again and again; yields what came of each round."""
    command.prepare(shared, server)
    reference = Path(tempfile.mkdtemp(dir=shared, prefix="reference-"))
    undisturbed = Place(shared, reference, server)
    command.begin(undisturbed)
    start = time.monotonic()
    finish(server.start(command.arguments(undisturbed), command.target))
    seconds = time.monotonic() - start
    left = kills
    while left > 0:
        place = Place(shared, Path(tempfile.mkdtemp(dir=shared, prefix="round-")), server)
        tally = Tally(rounds=1)
        try:
            command.begin(place)
            one_round(command, place, reference, tally, rng, seconds, left)
        except (Lost, AssertionError) as failure:
            tally.lost.append(f"{type(command).__name__} in {place.folder}: {failure}")
        else:
            shutil.rmtree(place.folder)
        left -= max(tally.kills, 1)
        yield tally


def one_round(
    command: Command, place: Place, reference: Path, tally: Tally, rng: random.Random, seconds: float, limit: int
) -> None:
    """Start, kill and start again until the command has finished; at most so many kills, and then it is left alone."""
    before: dict[str, int] = {}
    while True:
        child = server_start(place, command)
        killed = tally.kills < limit and kill_once(child, place.folder, rng, seconds)
        if not killed:
            finish(child)
            if tally.kills:  # a round without a kill shows nothing
                break
            shutil.rmtree(place.folder)
            place.folder.mkdir()
            command.begin(place)
            continue
        tally.kills += 1
        tally.in_saves += bool(staged(place.folder))
        before = command.after_kill(place, before)
    command.compare(place, reference)
    left = staged(place.folder)
    require(not left, f"left behind: {left}")


def server_start(place: Place, command: Command) -> Child:
    """Start the command of a round."""
    return place.server.start(command.arguments(place), command.target)


def kill_ranks(shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
    """SIGKILL one of two ranks of `torchrun -m skipless train`, which restarts both, again and again."""
    parallel = [{"kind": "ddp"}, {"kind": "fsdp", "checkpoint": "sharded"}]
    for number, one in enumerate(parallel):
        share = kills // 2 + (kills % 2 if number == 0 else 0)
        if not share:
            continue
        steps = 10 * share + 20
        changes = {"train.steps": steps, "train.save_every": 2, "train.eval_every": 20, "model.dropout": 0.1}
        cfg = tiny(f"files:{shared}/modules/*.py", changes).merge({"parallel": one})
        file = write_config(shared / f"ranks-{number}.yaml", cfg)
        words = ["train", "--config", str(file), "--runs", str(shared / f"ranks-{number}"), "--track", "none"]
        words += ["--cache-dir", str(shared / "cache"), "--name"]
        reference = Launched(shared / f"ranks-{number}-reference", 2, [*words, "reference"])
        require(reference.wait(PATIENCE) == 0, reference.text[-2000:])
        launched = Launched(shared / f"ranks-{number}-killed", 2, [*words, "killed"], "--max-restarts", str(share))
        tally = Tally(rounds=1)
        try:
            kill_each(launched, shared / f"ranks-{number}" / "killed", rng, share, tally)
            require(launched.wait(PATIENCE) == 0, launched.text[-2000:])
            assert_same_run(shared / f"ranks-{number}" / "killed", shared / f"ranks-{number}" / "reference")
        except (Lost, AssertionError) as failure:
            tally.lost.append(f"torchrun, {one['kind']}: {failure}")
        finally:
            launched.close()
        yield tally


def kill_each(launched: Launched, folder: Path, rng: random.Random, kills: int, tally: Tally) -> None:
    """Kill a rank a few steps after each restart; what was saved before must still be there."""
    before = -1
    for _ in range(kills):
        target, saving = before + rng.randrange(1, 6), rng.random() < 0.5
        launched.wait_until(lambda target=target: max(reached(folder).values(), default=-1) >= target, PATIENCE)
        if saving:
            launched.wait_until(lambda: bool(staged(folder)), PATIENCE)
        else:
            time.sleep(rng.uniform(0, 0.5))
        rank = rng.randrange(2)
        pid = launched.send(rank, signal.SIGKILL)
        require(pid is not None, "there was no rank to kill")
        tally.kills += 1
        tally.in_saves += bool(staged(folder))
        launched.wait_until(lambda pid=pid, rank=rank: launched.ranks().get(rank, pid) != pid, PATIENCE)
        now = max(reached(folder).values(), default=-1)
        require(now >= before, f"step {before} was saved, and {now} is there")
        before = now


# ------------------------------------------------------------------------------------------------------------- main

Killing = Callable[[Path, ForkServer, random.Random, int], Iterator[Tally]]


def over(*commands: Command) -> Killing:
    """The kills of several forms of one command, in equal shares."""

    def kill(shared: Path, server: ForkServer, rng: random.Random, kills: int) -> Iterator[Tally]:
        for number, command in enumerate(commands):
            yield from rounds(command, shared, server, rng, kills // len(commands) + (number < kills % len(commands)))

    return kill


COMMANDS: dict[str, Killing] = {
    "train": over(*(Train(form) for form in range(len(Train.FORMS)))),
    "finetune": over(Finetune(), FinetuneOwn()),
    "sweep": over(Sweep()),
    "export": over(Export("safetensors"), Export("hf"), Export("onnx")),
    "data": over(Data("bpe"), Data("wordpiece")),
    "report": over(Report()),
    "predict": over(Predict()),
    "new-part": over(NewPart()),
    "compare": over(Compare()),
    "reproduce": over(Reproduce()),
    "torchrun": kill_ranks,
}


def shares(kills: int, names: list[str]) -> dict[str, int]:
    """How many kills each command gets, by the largest remainder; at least one if there are enough."""
    total = sum(SHARES[name] for name in names)
    exact = {name: kills * SHARES[name] / total for name in names}
    given = {name: max(1, int(share)) for name, share in exact.items()}
    for name in sorted(names, key=lambda name: int(exact[name]) - exact[name]):
        if sum(given.values()) < kills:
            given[name] += 1
    return given


def kill_command(name: str, kills: int, seed: int, folder: Path) -> Tally:
    """All kills of one command, told as they go."""
    shared, total = folder / name, Tally()
    shared.mkdir()
    logs = folder / f"{name}-logs"
    logs.mkdir()
    write_text(shared / "modules")
    server = ForkServer(logs)
    try:
        for tally in COMMANDS[name](shared, server, random.Random(f"{name} {seed}"), kills):
            total.kills += tally.kills
            total.in_saves += tally.in_saves
            total.rounds += tally.rounds
            total.lost += tally.lost
            print(f"{name}: {total.kills} of {kills} kills, {len(total.lost)} lost", file=sys.stderr, flush=True)
    except (Lost, AssertionError) as failure:
        total.lost.append(f"{name}: {failure}")
    finally:
        server.close()
    return total


def main() -> int:
    """Kill, and tell what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, action="append", help="a command; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="commands that are killed at a time")
    given = parser.parse_args()
    names = given.only or list(COMMANDS)
    folder = Path(tempfile.mkdtemp(prefix="skipless-kills-"))
    kills = shares(given.kills, names)
    with ThreadPoolExecutor(given.jobs) as pool:
        order = sorted(names, key=lambda name: SHARES[name])  # the slowest begin first
        work = {name: pool.submit(kill_command, name, kills[name], given.seed, folder) for name in order}
        tallies = {name: work[name].result() for name in names}
    show_table(
        f"SIGKILL at random instants, seed {given.seed}",
        ["command", "kills", "left something staged", "runs to the end, bit for bit", "lost"],
        [list(map(str, (n, t.kills, t.in_saves, t.rounds - len(t.lost), len(t.lost)))) for n, t in tallies.items()],
    )
    lost = [one for tally in tallies.values() for one in tally.lost]
    total = sum(tally.kills for tally in tallies.values())
    print(json.dumps({"kills": total, "seed": given.seed, "lost": len(lost)}))
    for one in lost:
        print(one, file=sys.stderr)
    if not lost:
        shutil.rmtree(folder)
    return 1 if lost or total < given.kills else 0


if __name__ == "__main__":
    sys.exit(main())
