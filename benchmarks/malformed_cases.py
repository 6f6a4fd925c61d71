"""Command lines, what they read, and how a case is made of one, for `malformed.py`."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from safetensors import SafetensorError

from benchmarks.malformed_damage import damage, odd_tokenizer, reseal
from skipless.cli import app, run
from tests.helpers.plugins import no_plugins

TINY = {
    "model.n_layer": 1,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.max_seq_len": 16,
    "data.vocab_size": 260,
    "data.seq_len": 16,
    "data.valid_fraction": 0.2,
    "data.max_bytes": None,
    "train.steps": 2,
    "train.batch_size": 2,
    "train.eval_every": 1,
    "train.eval_rows": 2,
    "train.save_every": 1,
    "train.log_every": 1,
    "train.gains_every": 1,
    "train.health_every": 1,
    "train.sample_every": 1,
}
MASKED = {"task": "masked", "data.tokenizer": "wordpiece", "data.vocab_size": 200, "train.sample_every": 0}

EXPERIMENT, LOW_BITS = "fig4", "bits"
"""Of few runs each."""

PUBLISHED = Path(__file__).parents[1] / "docs" / "results" / "runs"


def settings(*changes: dict[str, Any]) -> list[str]:
    """Options that set keys."""
    together = {key: value for change in changes for key, value in change.items()}
    return [word for key, value in together.items() for word in ("--set", f"{key}={json.dumps(value)}")]


# ------------------------------------------------------------------------------------------------------ command lines


@dataclass(frozen=True)
class Line:
    """A command line that works, what of the kit is damaged for it, and the lines by which it is then read."""

    words: list[str]
    reads: list[str]
    crafted: list[list[str]]


def line(words: str, more: list[str], reads: str, *crafted: str) -> Line:
    """A command line; what reads the damage is the same line with more words, or for `: words` another one."""
    base = [*words.split(), *more]
    lines = [[*one[1:].split(), *more] if one.startswith(":") else [*base, *one.split()] for one in crafted]
    return Line(base, reads.split(), lines or [base])


CACHE = ["--cache-dir", "cache"]
CPU = ["--device", "cpu"]
SMOKE = [*CACHE, "--recipe", "smoke", *settings(TINY)]
FILES = "--source files:text/*.py"
SWEPT = settings(TINY, {"data.source": "files:text/*.py", "train.device": "cpu"})
SHAPE = "-L 1 -d 16 -H 2 --seq-len 8"
OWN = "--set epochs=1 --set batch_size=8"

LINES = {
    "train": line(
        f"train --name new --track none {FILES}",
        [*CPU, *SMOKE],
        "config.yaml text text.jsonl text.jsonl.gz text.jsonl.zst runs/causal runs/causal cache",
        "",
        "--config config.yaml",
        ": train --name new --track none --source jsonl:text.jsonl",
        ": train --name new --track none --source jsonl:text.jsonl.gz",
        ": train --name new --track none --source jsonl:text.jsonl.zst",
        ": train --name new --track none --source jsonl:text.jsonl=0.5 --source files:text/*.py=0.5",
        "--name causal --resume",
        "--name causal --resume --accept-changes",
        "--set data.tokenizer=runs/causal/tokenizer.json",
    ),
    "train --branch": line(
        "train --name branch --branch runs/stable@2 --decay 2 --track none",
        [*CPU, *CACHE],
        "runs/stable runs/stable cache text",
    ),
    "generate": line(
        "generate runs/causal --max-new-tokens 2",
        CPU,
        "runs/causal export graph prompt.txt",
        "--prompt-file prompt.txt",
        "--checkpoint best",
        "--prompt def",
        ": generate export --max-new-tokens 2",
        ": generate graph --max-new-tokens 2",
        ": generate graph --max-new-tokens 2 --num-samples 2",
    ),
    "evaluate": line(
        "evaluate runs/causal --limit 2",
        [*CPU, *CACHE],
        "runs/causal cache text tasks text.jsonl graph",
        "",
        "--checkpoint 1",
        "--source files:text/*.py",
        "--source jsonl:text.jsonl",
        "--tasks own --task-path tasks",
        ": evaluate graph --limit 2",
        ": evaluate graph --limit 2 --source files:text/*.py",
    ),
    "finetune --glue-dir": line(
        "finetune runs/masked --glue-dir glue --seeds 1 --set epochs=1",
        CPU,
        "runs/masked glue glue",
        "--tasks cola",
        "--tasks sst2",
        "--tasks cola,sst2 --rows 1",
        "--tasks cola --from-scratch",
        "--tasks cola --fresh",
    ),
    "finetune --train": line(
        f"finetune runs/masked --train rows/train.tsv --valid rows/valid.tsv {OWN}",
        CPU,
        "rows rows runs/masked runs/mood runs/causal",
        "--name new",
        "--name mood",
        "--name mood --fresh",
        "--name new --test rows/test.tsv --label grade",
        f": finetune runs/masked --name new --train rows/train.csv --valid rows/valid.csv {OWN}",
        f": finetune runs/causal --name new --train rows/train.jsonl --valid rows/valid.jsonl --head-only {OWN}",
    ),
    "predict": line(
        "predict runs/mood --input rows/test.tsv",
        CPU,
        "runs/mood runs/mood classifier rows",
        "",
        "--checkpoint best --json",
        "--output answers.jsonl",
        "--text grade",
        ": predict classifier --input rows/test.csv",
        ": predict runs/mood --input rows/test.jsonl",
        ": predict classifier",
    ),
    "inspect": line(
        f"inspect sas {SHAPE}", [], "model.yaml runs/causal", "--config model.yaml", ": inspect runs/causal"
    ),
    "inspect --attention": line(
        "inspect runs/causal --attention alpha_sum",
        [],
        "runs/causal runs/causal export runs/masked",
        "",
        "--checkpoint best --json",
        "--plot inside.png",
        ": inspect export --attention alpha",
        ": inspect runs/masked --attention alpha",
        ": report runs/causal --page page.html --attention alpha",
    ),
    "bench": line(
        f"bench train {SHAPE} --rounds 1 --vocab-size 50",
        CPU,
        "published runs/causal graph graph",
        "--plot published/x.png",
        "--plot loop/x.png",
        "--plot pipe",
        f": bench decode runs/causal graph {SHAPE} --max-new-tokens 2 --rounds 1",
    ),
    "data build": line(
        f"data build {FILES}",
        SMOKE,
        "text cache config.yaml text.jsonl",
        "",
        "--config config.yaml",
        ": data build --source jsonl:text.jsonl",
    ),
    "data show": line(
        f"data show {FILES}", SMOKE, "text cache text.jsonl", "", "--json", ": data show --source jsonl:text.jsonl"
    ),
    "sweep": line(
        "sweep --over train.lr=1e-3 --recipe smoke --output sweep --runs runs",
        [*CACHE, *SWEPT],
        "sweep runs sweep cache",
        "",
        "--prune",
        "--json",
    ),
    "reproduce": line(
        f"reproduce {EXPERIMENT} --minutes 0 --runs published --output results",
        CACHE,
        "published results/notes.yaml rates.json text.jsonl",
        "",
        "--rates rates.json",
        "--corpus code=jsonl:text.jsonl",
        "--archive published",
        "--json",
        f": reproduce {LOW_BITS} --minutes 0 --runs published --output results",
    ),
    "compare": line(
        "compare pre-ln sas-p --rounds 1 --runs compared --output comparison",
        [*CACHE, *SWEPT],
        "compared compared comparison/token-time.json comparison rates.json",
        "",
        "--json",
        "--rates rates.json",
        "--archive compared",
        "--minutes 0 --rounds 0",
    ),
    "demo": line("demo --runs shown", [*CACHE, *SWEPT], "shown shown cache text", "", "--json"),
    "family": line(
        "family pre-ln --recipe smoke --seeds 1 --checkpoints 1 --to safetensors --runs related --output family",
        [*CACHE, *SWEPT],
        "related related family cache",
        "",
        "--json",
        "--minutes 0",
        "--to hf",
    ),
    "report": line(
        "report runs/causal",
        [],
        "runs/causal runs/masked published",
        "",
        "runs/masked --samples",
        "--page page.html",
        "--plot plot.png --json",
        f": report {EXPERIMENT} --runs published",
        f": report {EXPERIMENT} --runs published --page page.html",
    ),
    "export": line(
        "export runs/causal out --to safetensors",
        [],
        "runs/causal export runs/mood",
        "",
        "--checkpoint best",
        ": export export out --to safetensors",
        ": export export out --to hf",
        ": export runs/causal export --to safetensors --overwrite",
        ": export runs/mood out --to hf",
    ),
    "export --to onnx": line(
        "export runs/causal out --to onnx",
        [],
        "runs/causal graph export runs/mood",
        "",
        "--bits 4",
        "--bits 8 --cache x --cache-bits 8",
        ": export export out --to onnx",
        ": export runs/causal graph --to onnx --overwrite",
        ": export graph out --to onnx",
        ": export runs/mood out --to onnx",
    ),
    "new-part": line(
        "new-part mine --output parts",
        [],
        "parts parts/own.py",
        "",
        "--part mixing",
        ": new-part own --output parts",
        ": new-part own --output parts/own.py",
        ": new-part mine --output parts/more/and/more",
    ),
    "--plugin": line(
        f"inspect pre-ln-own {SHAPE} --plugin parts/own.py",
        [],
        "parts/own.py parts/own.py parts/own.py runs/plugged",
        "",
        ": inspect runs/plugged --plugin parts/own.py",
        ": generate runs/plugged --prompt def --max-new-tokens 2 --plugin parts/own.py",
        ": generate runs/plugged --prompt def --max-new-tokens 2",
        ": export runs/plugged out --to hf --plugin parts/own.py",
        f": train --name new --block pre-ln-own --plugin parts/own.py {FILES} {' '.join(SMOKE)}",
    ),
}
"""What is tried, by the name it has in the table at the end."""


def words_of_command(words: list[str]) -> tuple[Any, int]:
    """The command of a line, and how many words name it."""
    command: Any = typer.main.get_command(app)
    for number, word in enumerate(words):
        if not hasattr(command, "commands"):
            return command, number
        command = command.commands[word]
    return command, len(words)


# ------------------------------------------------------------------------------------ what is there to be damaged


def make_kit(folder: Path) -> None:
    """Runs, exports, a classifier, texts, labelled rows, a sweep, results, a comparison, a plugin, published runs."""
    rng = random.Random(0)
    words = [first + last for first in ("alpha", "beta", "gamma", "delta") for last in ("", "_sum", "_max", "_of")]
    make_texts(folder, rng, words)
    make_rows(folder, rng, words)
    (folder / "config.yaml").write_text("train: {lr: 1e-3}\nmodel: {n_layer: 1}\n")
    (folder / "model.yaml").write_text("block: sas\nn_layer: 1\nd_model: 16\nn_head: 2\n")
    (folder / "rates.json").write_text(json.dumps({"study": {"sas-p": {"train.lr": 1e-3}}}))
    (folder / "prompt.txt").write_text("def alpha")
    (folder / "results").mkdir()
    (folder / "results" / "notes.yaml").write_text(f"{EXPERIMENT}: {{answer: yes it does, note: a note}}\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "own.yaml").write_text(OWN_TASK)
    (folder / "tasks" / "items.jsonl").write_text('{"text": "alpha"}\n{"text": "beta"}\n')
    stable = {"train.schedule": "wsd", "train.decay": 1, "train.steps": 4, "train.save_every": 2}
    with contextlib.chdir(folder), quiet(), no_plugins():
        for arguments in (
            [*LINES["train"].words, "--name", "causal"],
            [*LINES["train"].words, "--name", "masked", *settings(MASKED)],
            [*LINES["train"].words, "--name", "stable", *settings(stable), "--set", "train.keep_last=4"],
            ["export", "runs/causal", "export", "--to", "safetensors"],
            ["export", "runs/causal", "graph", "--to", "onnx"],
            [*LINES["finetune --glue-dir"].words, "--tasks", "cola"],
            [*LINES["finetune --train"].words, "--name", "mood"],
            ["export", "runs/mood", "classifier", "--to", "safetensors"],
            LINES["sweep"].words,
            LINES["compare"].words,
            LINES["demo"].words,
            LINES["family"].words,
            ["new-part", "own", "--output", "parts"],
            [*LINES["train"].words, "--name", "plugged", "--block", "pre-ln-own", "--plugin", "parts/own.py"],
        ):
            assert run(arguments) == 0, arguments
    make_published(folder / "published")


def make_texts(folder: Path, rng: random.Random, words: list[str]) -> None:
    """The same text as files and as JSON lines."""
    texts = [
        "".join(f"def {rng.choice(words)}():\n    return {rng.choice(words)}\n" for _ in range(60)) for _ in range(8)
    ]
    (folder / "text").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.py").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines)
    (folder / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with contextlib.suppress(ImportError):
        import zstandard

        (folder / "text.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))


def make_rows(folder: Path, rng: random.Random, words: list[str]) -> None:
    """Labelled rows: GLUE's, and of one's own in every format."""
    for task, rows in {
        "CoLA": "x\t1\t\talpha beta\nx\t0\t*\tgamma of\n",
        "SST-2": "sentence\tlabel\nalpha\t1\nbeta\t0\n",
    }.items():
        (folder / "glue" / task).mkdir(parents=True)
        for name in ("train", "dev"):
            (folder / "glue" / task / f"{name}.tsv").write_text(rows)
        (folder / "glue" / task / "test.tsv").write_text("index\tsentence\n0\talpha beta\n")
    (folder / "rows").mkdir()
    for name in ("train", "valid", "test"):
        drawn = [
            {"text": rng.choice(words), "label": ("bad", "good")[n % 2], "grade": f"{rng.random():.3f}"}
            for n in range(8)
        ]
        for ending, between in ((".tsv", "\t"), (".csv", ",")):
            lines = [between.join(row) for row in ([*drawn[0]], *(row.values() for row in drawn))]
            (folder / "rows" / f"{name}{ending}").write_text("\n".join([*lines, ""]))
        (folder / "rows" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))


OWN_TASK = """task: own
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


def make_published(folder: Path) -> None:
    """The runs of two experiments as they are published, with figures at low bits, and the times of a token."""
    from skipless.experiments.catalogue import EXPERIMENTS
    from skipless.experiments.run_index import RunIndex
    from skipless.experiments.scale import Scale

    folder.mkdir()
    index = RunIndex(PUBLISHED)
    rounded = {"loss": {"32": 3.0, "w8": 3.1, "w4": 3.2, "w8a8": 3.3, "w4a8": 3.4}, "kurtosis": {"neuron_kurtosis": 3}}
    for name in (EXPERIMENT, LOW_BITS):
        for _, _, cfg in EXPERIMENTS[name].runs(Scale("laptop"), 1):
            found = index.find(cfg)
            if found.exists:
                shutil.copytree(found.folder, folder / found.name, dirs_exist_ok=True)
                (folder / found.name / "bits.json").write_text(json.dumps(rounded))
    seconds = {"decoder": {"pre-ln": [1e-4, 2e-4], "sas-p": [1e-4, 1e-4]}}
    (folder / "timings.json").write_text(json.dumps({"seconds": seconds, "machine": {}, "versions": {}, "threads": 1}))


@contextlib.contextmanager
def quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """What is printed meanwhile, instead of printing it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """A command line in a folder, and what was done to that folder."""

    name: str
    number: int
    arguments: list[str]
    done: list[str] = field(default_factory=list)
    stdin: bytes = b"def alpha"

    def __str__(self) -> str:
        words = [word if len(word) <= 120 else f"{word[:60]}… ({len(word)})" for word in self.arguments]
        return f"{self.name} {self.number}: {words!r} {'; '.join(self.done)}"


# fmt: off
ODD_TEXTS = [
    "", " ", "-", "--", "\0", "\udcff", "ä", "x" * 10_000, "nan", "-inf", "1e999", "9" * 5000, "~nouser/x", "~", "{",
    "[" * 600, "a=b", "=", "!!int x", "2001-99-99", "/dev/zero", "/dev/null", "/", "..", "loop", "pipe", "text", "none",
    "cpu:x", "meta", "sas:", "sas:beta_ff=nan", "hf:", "files:", "jsonl:#", "files:pipe", "jsonl:loop", "corpus:books",
    "code=files:nothing/*", "last", "all", "0", "-1", "1.5", str(-(2**63)), "true", "null", "\n", "\u202e", "%s",
    "runs/mood", "graph", "rows/train.tsv", "parts/own.py", "os", "a b", "'", "$(x)", "classifier", "x.png", "rows",
    "*a", "export",
]
# fmt: on

HUGE = [str(2**31), str(2**63), str(10**30), "1" + "0" * 400]

AMOUNTS = {
    "steps",
    "decay",
    "tokens",
    "minutes",
    "max_new_tokens",
    "num_samples",
    "rounds",
    "seeds",
    "jobs",
    "rows",
    "trials",
}
"""How much is to be done: a large one is long work, not a mistake."""

NOT_SET = {"help", "version"}


def make_case(name: str, number: int, seed: int, kit: Path, folder: Path) -> Case:
    """The case of a number: every other one has a crafted folder."""
    rng = random.Random(f"{seed} {name} {number}")
    made = LINES[name]
    crafted = rng.choice(made.crafted)
    case = Case(name, number, list(made.words if number % 2 else crafted))
    for part in sorted(kit.iterdir()):
        copy = shutil.copytree if part.is_dir() else shutil.copy
        copy(part, folder / part.name)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    if number % 2:
        odd_arguments(rng, case)
    else:
        read = [part for part in made.reads if is_read(part, case.arguments)] or made.reads
        for _ in range(rng.choice([1, 1, 2])):
            craft(rng, case, folder / rng.choice(read))
    return case


def is_read(part: str, words: list[str]) -> bool:
    """Whether a command line names a part of the kit: a file, a run, or the folder that it lies in."""
    names = {Path(part).name, Path(part).parent.name} - {"", "runs"} or {part}
    return any(name in word for name in names for word in words)


def odd_arguments(rng: random.Random, case: Case) -> None:
    """One or two options with a value that they should not have, a missing or an unknown one, odd standard input."""
    command, named = words_of_command(case.arguments)
    for _ in range(rng.choice([1, 1, 2])):
        param = rng.choice([one for one in command.params if one.name not in NOT_SET])
        values = ODD_TEXTS + (HUGE * 4 if param.name not in AMOUNTS else [])
        value = rng.choice(values)
        how = rng.random()
        if how < 0.05:
            case.arguments.append(f"--unknown{value[:20]}")
        elif how < 0.1:
            case.arguments.pop(rng.randrange(1, len(case.arguments)))
        elif param.param_type_name == "argument":
            case.arguments[named : named + 1] = [value]
        elif getattr(param, "is_flag", False):
            case.arguments.append(param.opts[0])
        else:
            joined = rng.random() < 0.5 and param.opts[0].startswith("--")
            case.arguments += [f"{param.opts[0]}={value}"] if joined else [param.opts[0], value]
    case.stdin = rng.choice([b"", b"\xff\xfe", b"def ", b"\0", "ä".encode("latin-1"), b"x" * 100_000])


def craft(rng: random.Random, case: Case, path: Path) -> None:
    """Damage a file, or one in a folder, or the folder."""
    if not path.exists() or path.is_symlink():
        return
    name = path.name
    if path.is_dir():
        inside = sorted(one for one in path.rglob("*") if one.is_file() or rng.random() < 0.1)
        named = [one for one in inside if any(one.name in word for word in case.arguments)]
        path = rng.choice(named or inside or [path])
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return  # it was replaced before
    case.done.append(f"damaged {name}: {path.name}")
    if path.name == "tokenizer.json" and rng.random() < 0.3:
        odd_tokenizer(rng, path)
        return
    # damaged before, so that it has no parts, or has them 100,000 deep
    with contextlib.suppress(ValueError, IndexError, RecursionError, SafetensorError):
        damage(rng, path)
    if path.parent.name.startswith("step-") and path.name != "manifest.json" and rng.random() < 0.8:
        reseal(path.parent)
