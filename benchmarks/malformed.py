"""Malformed input for every command, drawn from a seed: no traceback, no hang, no message that is too long to read.

    python benchmarks/malformed.py --seed 0 --count 1000 --real 200

Half of the cases of each command have odd arguments. The other half have a crafted file or folder: a run, a checkpoint,
an export, a text, a GLUE task, a sweep, a folder of results, with one or two things in it that should not be so. A case
runs in a folder of its own, in this process; with `--real`, so many of them also as a command with an odd environment.
Prints every failure, then how many cases each command had and how they ended; exit status 1 if there is any.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import typer
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skipless.cli import app, run
from skipless.storage.manifest import FileEntry, Manifest

SECONDS = 60
"""A case that takes longer hangs."""

LONGEST = 2000
"""Bytes of a line on standard error."""

STATUSES = (0, 2, 3, 4)
"""How a command may end that nobody interrupts."""

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
    "train.gains_every": 0,
    "train.sample_every": 1,
}
MASKED = {"task": "masked", "data.tokenizer": "wordpiece", "data.vocab_size": 200, "train.sample_every": 0}

EXPERIMENT = "fig4"
"""Of few runs."""

PUBLISHED = Path(__file__).parents[1] / "docs" / "results" / "runs"


def settings(*changes: dict[str, Any]) -> list[str]:
    """Options that set keys."""
    together = {key: value for change in changes for key, value in change.items()}
    return [word for key, value in together.items() for word in ("--set", f"{key}={json.dumps(value)}")]


# ------------------------------------------------------------------------------------ what is there to be damaged


def make_kit(folder: Path) -> None:
    """A causal run, a masked one, an export, texts, GLUE, a sweep, results, timings, and published runs."""
    rng = random.Random(0)
    words = [first + last for first in ("alpha", "beta", "gamma", "delta") for last in ("", "_sum", "_max", "_of")]
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
    for task, rows in {
        "CoLA": "x\t1\t\talpha beta\nx\t0\t*\tgamma of\n",
        "SST-2": "sentence\tlabel\nalpha\t1\nbeta\t0\n",
    }.items():
        (folder / "glue" / task).mkdir(parents=True)
        for name in ("train", "dev"):
            (folder / "glue" / task / f"{name}.tsv").write_text(rows)
        (folder / "glue" / task / "test.tsv").write_text("index\tsentence\n0\talpha beta\n")
    (folder / "config.yaml").write_text("train: {lr: 1e-3}\nmodel: {n_layer: 1}\n")
    (folder / "model.yaml").write_text("block: sas\nn_layer: 1\nd_model: 16\nn_head: 2\n")
    (folder / "rates.json").write_text(json.dumps({"study": {"sas-p": {"train.lr": 1e-3}}}))
    (folder / "prompt.txt").write_text("def alpha")
    (folder / "results").mkdir()
    (folder / "results" / "notes.yaml").write_text(f"{EXPERIMENT}: {{answer: yes it does, note: a note}}\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "own.yaml").write_text(OWN_TASK)
    (folder / "tasks" / "items.jsonl").write_text('{"text": "alpha"}\n{"text": "beta"}\n')
    finetuned = ["--glue-dir", "glue", "--tasks", "cola", "--seeds", "1", "--set", "epochs=1", *CPU]
    with contextlib.chdir(folder), quiet():
        for arguments in (
            [*COMMANDS["train"][0], "--name", "causal"],
            [*COMMANDS["train"][0], "--name", "masked", *settings(MASKED)],
            ["export", "runs/causal", "export", "--to", "safetensors"],
            ["finetune", "runs/masked", *finetuned],
            COMMANDS["sweep"][0],
        ):
            assert run(arguments) == 0, arguments
    make_published(folder / "published")


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
    """The runs of an experiment as they are published, and the times of a token."""
    from skipless.experiments.catalogue import EXPERIMENTS
    from skipless.experiments.run_index import RunIndex
    from skipless.experiments.scale import Scale

    folder.mkdir()
    index = RunIndex(PUBLISHED)
    for _, _, cfg in EXPERIMENTS[EXPERIMENT].runs(Scale("laptop"), 1):
        found = index.find(cfg)
        if found.exists:
            shutil.copytree(found.folder, folder / found.name)
    seconds = {"decoder": {"pre-ln": [1e-4, 2e-4], "sas-p": [1e-4, 1e-4]}}
    (folder / "timings.json").write_text(json.dumps({"seconds": seconds, "machine": {}, "versions": {}, "threads": 1}))


@contextlib.contextmanager
def quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """What is printed meanwhile, instead of printing it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


# --------------------------------------------------------------------------------------------- how files are damaged

DEEP = 100_000

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -0.0, 1e308, 10**12, 2**63, 10**30, "", "x", "x" * 5000, "\0", "\ud800", "ä"),
    *(
        [],
        {},
        [[]],
        [1],
        {"a": 1},
        [None],
        float("nan"),
        float("inf"),
        "~nouser/x",
        "../../..",
        "files:/",
        "sas:",
        "auto",
    ),
]


def damage(rng: random.Random, path: Path) -> None:
    """Something that can happen to a file."""
    kinds: list[Callable[[random.Random, Path], None]] = [damage_bytes, damage_bytes, replace_file]
    if path.is_dir() and not path.is_symlink():
        replace_file(rng, path)
        return
    if path.suffix in (".json", ".jsonl"):
        kinds += [damage_json] * 4
    elif path.name.endswith(".jsonl.gz"):
        kinds += [damage_gzip] * 4
    elif path.suffix == ".log":
        kinds += [damage_json] * 2
    elif path.suffix == ".yaml":
        kinds += [damage_yaml] * 4
    elif path.suffix == ".tsv":
        kinds += [damage_tsv] * 6
    elif path.suffix == ".safetensors":
        kinds += [damage_tensors] * 5
    rng.choice(kinds)(rng, path)


def damage_bytes(rng: random.Random, path: Path) -> None:
    """Truncated, torn, flipped, mixed with bytes that are not text, or something else altogether."""
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    flipped = bytearray(data or b"x")
    flipped[min(at, len(flipped) - 1)] ^= 1 << rng.randrange(8)
    bits = bytes(rng.randrange(256) for _ in range(200))
    path.write_bytes(
        rng.choice(
            [
                b"",
                data[:at],
                bytes(flipped),
                data[:at] + b"\xff\xfe\xc3" + data[at:],
                data[:at] + b"\0" * 20 + data[at:],
                b"\xef\xbb\xbf" + data,
                data + b"\nGr\xfc\xdfe\n",
                data + data,
                bits,
                b"\0" * 100,
                b"\n" * 50,
                b"[" * DEEP,
                b'{"a":' * DEEP,
                b"x" * 1_000_000,
                data.replace(b"\n", b"\r\n"),
                "\n".join(rng.sample(lines := data.decode("latin-1").splitlines(), len(lines))).encode("latin-1"),
            ]
        )
    )


def replace_file(rng: random.Random, path: Path) -> None:
    """Gone, or a folder, a pipe, a device, a link to nowhere, to itself, or to another kind of file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind = rng.randrange(8)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind in (3, 4, 5, 6):
        path.symlink_to(["/dev/zero", path.name, "nowhere", "/dev/null"][kind - 3])
    elif kind == 7:
        path.write_bytes(b"")


def damage_json(rng: random.Random, path: Path) -> None:
    """A value of another type, a key too many or too few, in one of its lines if it has several."""
    text = path.read_text(encoding="utf-8")
    whole = path.suffix == ".json"
    lines = [text] if whole else text.splitlines()
    if not lines:
        path.write_text("{}\n")
        return
    at = rng.randrange(len(lines))
    lines[at] = changed_json(rng, lines[at])
    path.write_text("\n".join(lines) + ("" if whole or rng.random() < 0.2 else "\n"))


def changed_json(rng: random.Random, text: str) -> str:
    """JSON with a part that is not as it was."""
    try:
        content = json.loads(text)
    except ValueError:
        return text[: rng.randrange(len(text) + 1)]
    places = list(_places(content))
    if rng.random() < 0.1 or not places:
        return json.dumps(rng.choice(ODD_VALUES))
    holder, key = rng.choice(places)
    how = rng.randrange(4)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder["unknown"] = rng.choice(ODD_VALUES)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(content)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(pairs):
        yield content, key
        yield from _places(value)


def damage_gzip(rng: random.Random, path: Path) -> None:
    """A line of a compressed file."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = changed_json(rng, lines[at])
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


def damage_yaml(rng: random.Random, path: Path) -> None:
    """Aliases, tags, depth, dates that are not, other types."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    text = path.read_text(encoding="utf-8")
    key = rng.choice([line.partition(":")[0] for line in text.splitlines() if ":" in line] or ["x"])
    odd = json.dumps(rng.choice(ODD_VALUES))
    path.write_text(
        rng.choice(
            [
                bomb,
                "a: &a {b: *a}",
                f"{key}: !!python/object/apply:os.system ['true']",
                f"{key}: 2001-99-99",
                f"{key}: {{" * 2000,
                "- 1\n- 2\n",
                "5",
                f"{text}{key}: {odd}\n",
                f"{key}: {odd}\n",
                f"1: {odd}\n",
                f"{text}unknown: {odd}\n",
                f"? [a]\n: {odd}",
                "--- {}\n--- {}",
                f"{key}: {'9' * 5000}",
            ]
        )
    )


def damage_tsv(rng: random.Random, path: Path) -> None:
    """Ragged rows, answers that are none, other columns."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(lines))
    fields = lines[at].split("\t")
    part = rng.randrange(len(fields))
    values = ["", "2", "-1", "nan", "\0", "x" * 100_000, "\u2028", "\ufeff", "one two " * 500, "\x0c", "1.0"]
    changes = [
        lambda: fields.pop(part),
        lambda: fields.insert(part, rng.choice(values)),
        lambda: fields.__setitem__(part, rng.choice(values)),
        lambda: fields.clear(),
        lambda: lines.clear(),
        lambda: fields.reverse(),
    ]
    rng.choice(changes)()
    if lines:
        lines[at] = "\t".join(fields)
    path.write_text("\n".join(lines) + "\n")


def damage_tensors(rng: random.Random, path: Path) -> None:
    """Weights of other shapes, types and names, not finite, or with a header that lies."""
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    how = rng.randrange(9)
    if how == 0:
        del tensors[name]
    elif how == 1:
        tensors["model.unknown"] = value
    elif how in (2, 3):
        tensors[name] = np.full_like(value, [np.nan, np.inf][how - 2] if value.dtype.kind == "f" else 0)
    elif how == 4:
        tensors[name] = np.concatenate([value.reshape(-1)] * 2)
    elif how == 5:
        tensors[name] = value.astype(np.int64)
    elif how == 6:
        tensors[name] = np.zeros((0, 3), np.float32)
    elif how == 7:
        tensors = {}
    save_file(tensors, path)
    if how == 8:
        header = rng.choice(
            [b"{}", b"[]", b'{"a":' * 1000, b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": [0, 9]}}']
        )
        path.write_bytes(rng.choice([len(header), 2**62, 2**31]).to_bytes(8, "little") + header + b"\0" * 16)


def reseal(checkpoint: Path) -> None:
    """Make a manifest that agrees with whatever the files of a checkpoint hold now."""
    with contextlib.suppress(Exception):
        about = dict(Manifest.read(checkpoint).about)
        names = [path.name for path in checkpoint.iterdir() if path.name != "manifest.json" and path.is_file()]
        Manifest(about, {name: FileEntry.of(checkpoint / name) for name in names}).write(checkpoint)


def odd_tokenizer(rng: random.Random, path: Path) -> None:
    """A tokeniser of another kind."""
    from tokenizers import Tokenizer, models

    vocab = {"[UNK]": 0, "alpha": rng.choice([1, 7, 10**6])}
    kinds = [
        models.WordLevel(vocab, unk_token="[UNK]"),
        models.Unigram([("[UNK]", 0.0), ("a", -1.0)], unk_id=0),
        models.BPE(),
        models.WordPiece(vocab, unk_token="[UNK]"),
    ]
    Tokenizer(rng.choice(kinds)).save(str(path))


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """A command line in a folder, and what was done to that folder."""

    command: str
    number: int
    arguments: list[str]
    done: list[str] = field(default_factory=list)
    stdin: bytes = b"def alpha"

    def __str__(self) -> str:
        words = [word if len(word) <= 120 else f"{word[:60]}… ({len(word)})" for word in self.arguments]
        return f"{self.command} {self.number}: {words!r} {'; '.join(self.done)}"


SOURCE = ["--source", "files:text/*.py"]
CACHE = ["--cache-dir", "cache"]
CPU = ["--device", "cpu"]
SWEPT = {"data.source": "files:text/*.py", "train.device": "cpu"}

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "train": (
        ["train", "--recipe", "smoke", "--name", "new", "--track", "none", *SOURCE, *CACHE, *CPU, *settings(TINY)],
        ["config.yaml", "text", "text.jsonl", "text.jsonl.gz", "text.jsonl.zst", "runs/causal", "cache"],
    ),
    "generate": (["generate", "runs/causal", "--max-new-tokens", "2", *CPU], ["runs/causal", "export", "prompt.txt"]),
    "evaluate": (
        ["evaluate", "runs/causal", "--limit", "2", *CPU, *CACHE],
        ["runs/causal", "cache", "text", "tasks", "text.jsonl"],
    ),
    "finetune": (
        ["finetune", "runs/masked", "--glue-dir", "glue", "--tasks", "cola", "--seeds", "1", "--set", "epochs=1", *CPU],
        ["runs/masked", "glue", "glue"],
    ),
    "inspect": (["inspect", "sas", "-L", "1", "-d", "16", "-H", "2", "--seq-len", "8"], ["model.yaml"]),
    "bench": (
        [
            "bench",
            "train",
            "-L",
            "1",
            "-d",
            "16",
            "-H",
            "2",
            "--seq-len",
            "8",
            "--rounds",
            "1",
            "--vocab-size",
            "50",
            *CPU,
        ],
        ["published"],
    ),
    "data build": (
        ["data", "build", *SOURCE, *CACHE, "--recipe", "smoke", *settings(TINY)],
        ["text", "cache", "config.yaml"],
    ),
    "data show": (
        ["data", "show", *SOURCE, *CACHE, "--recipe", "smoke", *settings(TINY)],
        ["text", "cache", "text.jsonl"],
    ),
    "sweep": (
        ["sweep", "--over", "train.lr=1e-3", "--recipe", "smoke", "--output", "sweep", *CACHE, *settings(TINY, SWEPT)],
        ["sweep", "runs", "sweep", "cache"],
    ),
    "reproduce": (
        ["reproduce", EXPERIMENT, "--minutes", "0", "--runs", "published", "--output", "results", *CACHE],
        ["published", "results/notes.yaml", "rates.json", "text.jsonl"],
    ),
    "report": (["report", "runs/causal"], ["runs/causal", "runs/masked", "published"]),
    "export": (["export", "runs/causal", "out", "--to", "safetensors"], ["runs/causal", "export"]),
}
"""A command line that works, and what of the kit it reads."""

ODD_TEXTS = [
    *(
        "",
        " ",
        "-",
        "--",
        "\0",
        "\udcff",
        "ä",
        "x" * 10_000,
        "nan",
        "-inf",
        "1e999",
        "9" * 5000,
        "~nouser/x",
        "~",
        "{",
        "*a",
    ),
    *(
        "[" * 600,
        "a=b",
        "=",
        "!!int x",
        "2001-99-99",
        "/dev/zero",
        "/dev/null",
        "/",
        "..",
        "loop",
        "pipe",
        "text",
        "none",
    ),
    *(
        "cpu:x",
        "meta",
        "sas:",
        "sas:beta_ff=nan",
        "hf:",
        "files:",
        "jsonl:#",
        "files:pipe",
        "jsonl:loop",
        "corpus:books",
    ),
    *(
        "code=files:nothing/*",
        "last",
        "all",
        "0",
        "-1",
        "1.5",
        str(-(2**63)),
        "true",
        "null",
        "\n",
        "\u202e",
        "%s",
        "export",
    ),
]

HUGE = [str(2**31), str(2**63), str(10**30), "1" + "0" * 400]

AMOUNTS = {"steps", "tokens", "minutes", "max_new_tokens", "num_samples", "rounds", "seeds", "jobs", "rows", "trials"}
"""How much is to be done: a large one is long work, not a mistake."""

NOT_SET = {"help", "version"}


def make_case(command: str, number: int, seed: int, kit: Path, folder: Path) -> Case:
    """The case of a number: every other one has a crafted folder."""
    rng = random.Random(f"{seed} {command} {number}")
    arguments, parts = COMMANDS[command]
    case = Case(command, number, list(arguments))
    for part in dict.fromkeys(
        [*parts, "runs", "text", "cache", "published", *(["glue"] if command == "finetune" else [])]
    ):
        if (kit / part).is_dir():
            shutil.copytree(kit / part, folder / part, dirs_exist_ok=True, symlinks=True)
        elif (kit / part).exists():
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kit / part, folder / part)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    if number % 2:
        odd_arguments(rng, case)
    else:
        for _ in range(rng.choice([1, 1, 2])):
            craft(rng, case, folder / rng.choice(parts))
        point_at_crafted(rng, case)
    return case


def odd_arguments(rng: random.Random, case: Case) -> None:
    """One or two options with a value that they should not have, a missing or an unknown one, odd standard input."""
    group = typer.main.get_command(app)
    for word in case.command.split():
        group = group.commands[word]  # pyrefly: ignore
    for _ in range(rng.choice([1, 1, 2])):
        param = rng.choice([one for one in group.params if one.name not in NOT_SET])
        values = ODD_TEXTS + (HUGE * 4 if param.name not in AMOUNTS else [])
        value = rng.choice(values)
        how = rng.random()
        if how < 0.05:
            case.arguments.append(f"--unknown{value[:20]}")
        elif how < 0.1:
            case.arguments.pop(rng.randrange(1, len(case.arguments)))
        elif param.param_type_name == "argument":
            case.arguments[len(case.command.split())] = value
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
        path = rng.choice(inside or [path])
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


def point_at_crafted(rng: random.Random, case: Case) -> None:
    """Options by which the command reads what was damaged."""
    more = {
        "train": [
            ["--config", "config.yaml"],
            ["--source", "jsonl:text.jsonl"],
            ["--source", "jsonl:text.jsonl.gz"],
            ["--source", "jsonl:text.jsonl.zst"],
            ["--name", "causal", "--resume"],
            ["--name", "causal", "--resume", "--accept-changes"],
            ["--set", "data.tokenizer=runs/causal/tokenizer.json"],
            [],
        ],
        "generate": [
            ["--prompt-file", "prompt.txt"],
            ["--checkpoint", "best"],
            ["--prompt", "def "],
            ["EXPORT"],
            ["EXPORT"],
        ],
        "evaluate": [
            [],
            ["--checkpoint", "1"],
            ["--source", "files:text/*.py"],
            ["--source", "jsonl:text.jsonl"],
            ["--tasks", "own", "--task-path", "tasks"],
        ],
        "finetune": [[], ["--tasks", "sst2"], ["--tasks", "cola,sst2", "--rows", "1"], ["--from-scratch"], ["--fresh"]],
        "inspect": [["--config", "model.yaml"]],
        "bench": [["--plot", "published/x.png"], ["--plot", "loop/x.png"], ["--plot", "pipe"]],
        "data build": [[], ["--config", "config.yaml"], ["--rebuild"]],
        "data show": [[], ["--source", "jsonl:text.jsonl"], ["--json"]],
        "sweep": [[], ["--prune"], ["--json"]],
        "reproduce": [
            [],
            ["--rates", "rates.json"],
            ["--corpus", "code=jsonl:text.jsonl"],
            ["--archive", "published"],
            ["--json"],
        ],
        "report": [
            [],
            ["runs/masked", "--samples"],
            ["--page", "page.html"],
            ["--plot", "plot.png", "--json"],
            ["PUBLISHED"],
            ["PUBLISHED", "--page", "page.html"],
        ],
        "export": [[], ["--checkpoint", "best"], ["EXPORT"], ["EXPORT"], ["OVER"]],
    }[case.command]
    words = rng.choice(more)
    for mark in words[:1]:
        if mark == "EXPORT":
            case.arguments[1], words = "export", words[1:]
        elif mark == "PUBLISHED":
            case.arguments[1:], words = [EXPERIMENT, "--runs", "published"], words[1:]
        elif mark == "OVER":
            case.arguments[2], words = "export", ["--overwrite"]
    case.arguments += words


# ------------------------------------------------------------------------------------------------------------ judging


class Hang(BaseException):
    """A case took too long."""


def in_process(case: Case) -> tuple[int | str, str]:
    """How a case ended, and what it said on standard error."""

    def stop(_signal: int, _frame: Any) -> None:
        raise Hang

    before, stdin, handler = dict(os.environ), sys.stdin, signal.signal(signal.SIGALRM, stop)
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8")
    with quiet() as (_, err):
        signal.alarm(SECONDS)
        try:
            status: int | str = run(list(case.arguments))
        except Hang:
            status = f"hangs\n{traceback.format_exc(limit=-4)}"
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            status = traceback.format_exc(limit=-6)
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    sys.stdin = stdin
    os.environ.clear()
    os.environ.update(before)
    return status, err.getvalue()


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX"},
    {"COLUMNS": "1"},
    {"HOME": "/nowhere"},
]


def as_command(case: Case, folder: Path, rng: random.Random) -> tuple[int | str, str]:
    """The same by the command itself: another locale, closed standard input, or little memory."""
    words = [os.fsencode(word) for word in case.arguments if "\0" not in word]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, **rng.choice(ENVIRONMENTS)}
    closed, short = rng.random() < 0.2, rng.random() < 0.1

    def prepare() -> None:
        if closed:
            os.close(0)
        if short:
            resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))

    started = [sys.executable, "-m", "skipless", *words]
    try:
        done = subprocess.run(
            started,
            cwd=folder,
            env=environment,
            input=case.stdin,
            capture_output=True,
            timeout=3 * SECONDS,
            preexec_fn=prepare,
        )
    except subprocess.TimeoutExpired:
        return "hangs", ""
    return done.returncode, done.stderr.decode(errors="replace")


def problem(status: int | str, said: str) -> str | None:
    """What is wrong with how a case ended."""
    if isinstance(status, str):
        return status
    if "Traceback (most recent call last)" in said:
        return said[-3000:]
    if status not in STATUSES:
        return f"exit status {status}: {said[-500:]}"
    longest = max((len(line.encode(errors="replace")) for line in said.splitlines()), default=0)
    if longest > LONGEST:
        return f"a line of {longest} bytes: {max(said.splitlines(), key=len)[:300]}"
    if status in (2, 3) and not any(line.strip() for line in said.splitlines()):
        return f"exit status {status} without a word"
    return None


def run_cases(
    seed: int, count: int, real: int, scratch: Path, *, jobs: int = 2, only: str | None = None, verbose: bool = False
) -> tuple[dict[str, Counter[str]], list[str]]:
    """How the cases of each command ended, and those that failed."""
    kit = scratch / "kit"
    make_kit(kit)
    ended: dict[str, Counter[str]] = {command: Counter() for command in COMMANDS}
    failures: list[str] = []
    names = [name for name in COMMANDS if only in (None, name)]
    plan = [(names[n % len(names)], n // len(names)) for n in range(count)]

    def judge(case: Case, status: int | str, said: str, way: str) -> None:
        why = problem(status, said)
        ended[case.command][str(status) if isinstance(status, int) else "failed"] += 1
        if why is not None:
            failures.append(f"seed {seed}, {way}, {case}\n{why}")
            print(f"{failures[-1]}\n", flush=True)
        if verbose:
            print(f"{case}\n    {status if isinstance(status, int) else 'FAILED'} {said.strip()[-300:]}", flush=True)

    for command, number in plan:
        with tempfile.TemporaryDirectory(dir=scratch) as place, contextlib.chdir(place):
            case = make_case(command, number, seed, kit, Path(place))
            judge(case, *in_process(case), "in this process")

    def again(position: int) -> None:
        command, number = plan[position]
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            case = make_case(command, number, seed, kit, Path(place))
            judge(case, *as_command(case, Path(place), random.Random(f"{seed} {position}")), "as a command")

    chosen = random.Random(seed).sample(range(count), min(real, count))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(again, chosen))
    return ended, failures


def main() -> int:
    """Run the cases of a seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--real", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        ended, failures = run_cases(
            given.seed,
            given.count,
            given.real,
            Path(scratch),
            jobs=given.jobs,
            only=given.only,
            verbose=given.verbose,
        )
    for command, counts in ended.items():
        shown = ", ".join(f"{count} × {status}" for status, count in sorted(counts.items()))
        print(f"{command:12} {sum(counts.values()):4} cases; exit status: {shown}")
    print(f"\nseed {given.seed}: {given.count} cases, {len(failures)} failures, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
