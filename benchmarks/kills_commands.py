"""The commands that `kills.py` kills: how each is started, what must hold after a kill, and what at its end."""

import json
import os
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from skipless.storage.atomic_files import STAGING_PREFIX
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.manifest import Damaged, Manifest
from tests.helpers.glue_files import small_glue
from tests.helpers.labelled_files import three_classes
from tests.helpers.processes import Child, ForkServer
from tests.helpers.tiny_runs import CAUSAL, MASKED, SECONDS, assert_same_run, tiny, write_config

PATIENCE = 900.0
"""Seconds after which a process that should have ended counts as hung."""


class Lost(Exception):
    """Something that was there before a kill is not there any more, or not as it was."""


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


def finish(child: Child) -> None:
    """Wait for the end of a command that nobody kills."""
    status = child.wait(PATIENCE)
    require(status == 0, f"it ended with {status}:\n{child.out[-2000:]}{child.err[-2000:]}")


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


class Demo(Command):
    """`skipless demo`."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        return ["demo", "--runs", str(place.folder), *small(place, steps=12, save_every=2), "--json"]

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        same_runs(place.folder, reference)
        require((place.folder / "demo.html").read_text().rstrip().endswith("</html>"), "there is no page")


class Family(Command):
    """`skipless family`: now the command itself is killed, now one of its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}
        """Exported models by their path, and their hashes."""

    def arguments(self, place: Place) -> list[str]:
        """Of the command line."""
        folders = ["--runs", str(place.folder / "runs"), "--output", str(place.folder / "family")]
        words = ["family", "--seeds", "1", "--checkpoints", "4", "--to", "safetensors", *folders]
        return [*words, *small(place, steps=12), "--json"]

    def after_kill(self, place: Place, before: dict[str, int]) -> dict[str, int]:
        """A model that is there is whole, and stays as it is."""
        models = (place.folder / "family").rglob("model.safetensors")
        for path in (path for path in models if STAGING_PREFIX not in str(path)):
            require((path.parent / "README.md").exists(), f"{path.parent} has no card")
            found = sha256(path.read_bytes()).hexdigest()
            require(self.seen.setdefault(str(path), found) == found, f"{path} is another model than before the kill")
        gone = [path for path in self.seen if path.startswith(f"{place.folder}/") and not Path(path).exists()]
        require(not gone, f"exported models are gone: {gone}")
        return super().after_kill(place, before)

    def compare(self, place: Place, reference: Path) -> None:
        """Raise where the end is not that of the reference."""
        same_runs(place.folder / "runs", reference / "runs")
        found, expected = (files_of(folder / "family") for folder in (place.folder, reference))
        for files in (found, expected):
            files.pop(".lock")
        require(found == expected, "the family has other files")


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
