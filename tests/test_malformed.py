"""A slice of the generator of malformed input, and the inputs that it and others have found."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.cli import run
from skipless.config.overrides import load_yaml
from skipless.config.reading import Unreadable, read_bytes, read_json
from skipless.data.glue import TASKS, read_tsv
from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError
from skipless.experiments.sweep import Sweep
from skipless.experiments.sweep_axes import parse_axis
from skipless.experiments.timings import Timings
from skipless.runs import Run
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.manifest import Damaged, FileEntry, Manifest
from skipless.tasks.glue_results import read_results

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "malformed.py"


@pytest.fixture(scope="module")
def malformed():
    spec = importlib.util.spec_from_file_location("malformed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["malformed"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["malformed"]


def test_a_slice_of_the_generator(malformed, tmp_path):
    ended, failures = malformed.run_cases(4, 60, 0, tmp_path)
    assert failures == []
    assert all(sum(counts.values()) == 5 for counts in ended.values())
    assert sum(counts["2"] for counts in ended.values()) > 10


def test_the_generator_finds_what_is_wrong(malformed):
    said = "Traceback (most recent call last)\n  …\nKeyError: 'x'"
    assert "KeyError" in malformed.problem(1, said)
    assert "exit status 1" in malformed.problem(1, "skipless: no")
    assert "a line of" in malformed.problem(2, "x" * 3000)
    assert "without a word" in malformed.problem(2, "")
    assert malformed.problem(2, "skipless: no such run") is None


def test_the_same_seed_makes_the_same_cases(malformed, tmp_path):
    malformed.make_kit(tmp_path / "kit")
    cases = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        cases.append([])
        for number in range(4):
            folder = tmp_path / place / str(number)
            folder.mkdir()
            cases[-1].append(str(malformed.make_case("report", number, 7, tmp_path / "kit", folder)))
    assert cases[0] == cases[1]


# ------------------------------------------------------------------------------------------------ every reader


def _tsv(path):
    return read_tsv(path, TASKS["cola"])


def _manifest(path):
    return Manifest.read(path.parent)


def _timings(path):
    return Timings.read(path.parent)


def _config(path):
    return Run(path.parent).config()


def _metrics(path):
    return list(Run(path.parent).metrics())


def _samples(path):
    return list(Run(path.parent).samples())


def _checkpoint(path):
    """A checkpoint whose manifest agrees with its state, whatever that is."""
    Manifest({"format": 1, "step": 5, "score": None}, {"state.json": FileEntry.of(path)}).write(path.parent)
    return Checkpoints.load(path.parent)


def _journal(path):
    """Of a sweep: Optuna replays it."""
    return Sweep(path.parent, path.parent / "runs", "smoke", ["sas"], [parse_axis("train.lr=1e-3")]).results()


READERS = {
    "config.yaml": load_yaml,
    "config.json": _config,
    "manifest.json": _manifest,
    "state.json": _checkpoint,
    "metrics.jsonl": _metrics,
    "samples.jsonl": _samples,
    "tokenizer.json": Tokenizer.load,
    "train.tsv": _tsv,
    "glue.json": read_results,
    "timings.json": _timings,
    "journal.log": _journal,
    "any.json": read_json,
}
"""File → what reads it."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["config", "model", "train", "files", "sha256", "step", "seconds", "tasks", "seeds", "model_type"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())

LINES = st.lists(
    st.one_of(JSON, st.binary(max_size=30), st.text(max_size=30).map(lambda text: text.encode(errors="replace")))
)

FOUND = [
    b"",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": NaN, "seconds": {"decoder": {"sas": []}}}',
    b'{"seconds": {"decoder": {"sas": ["x"]}}}',
    b'{"seconds": {"decoder": {"sas": [0]}}}',
    b'{"seconds": []}',
    b'{"config": null}',
    b'{"config": {"model": {"n_head": 1000000000000000000000000000000}}}',
    b'{"a": "\\ud800"}',
    b'{"tasks": {"cola": {"seeds": {"x": {}}}}, "data": {}, "fits": {}, "failures": {}, "mean": null, "sd": null}',
    b'{"tasks": {"cola": {"seeds": {"0": {}}}}, "data": {}, "fits": {}, "failures": {}, "mean": null, "sd": null}',
    b'{"files": {"../x": {"size": -1}}}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe",
    b"a: &a {b: *a}",
    b"\x00",
    b"x\t1\t\t" + b"y" * 1_000_000,
]
"""Inputs that have made a reader fail with something else than its own errors, and their like."""


def _said(folder: Path, name: str, content: bytes) -> str:
    """What a reader says of a content, in an error of its own."""
    (folder / name).write_bytes(content)
    try:
        READERS[name](folder / name)
    except (UserError, Damaged) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::skipless.storage.json_files.SkippedRow")
@pytest.mark.parametrize("content", FOUND, ids=range(len(FOUND)))
@pytest.mark.parametrize("name", READERS)
def test_inputs_that_were_found(tmp_path, name, content):
    assert len(_said(tmp_path, name, content).encode(errors="replace")) < 2000


@pytest.mark.filterwarnings("ignore::skipless.storage.json_files.SkippedRow")
@pytest.mark.parametrize("name", READERS)
def test_any_input(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("any")

    @settings(max_examples=40, database=None)
    @given(st.one_of(JSON, st.binary(max_size=60), LINES.map(b"\n".join)))
    def read(content):
        assert len(_said(folder, name, content).encode(errors="replace")) < 2000

    read()


# ------------------------------------------------------------------------------------- arguments, input, folders


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "runs/x\0y", "--prompt", "a"],
        ["train", "--source", "files:\0"],
        ["train", "--source", "files:~nobody-of-that-name/x"],
        ["inspect", "sas", "-L", "9" * 400],
        ["inspect", "sas", "-d", str(10**30)],
        ["inspect", "sas", "--batch-size", str(10**30)],
        ["bench", "train", "--seq-len", str(10**30), "--rounds", "1"],
        ["bench", "decode", "-d", str(2**63), "--rounds", "1"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30].encode("ascii", "backslashreplace").decode().replace("\0", "0"),
)
def test_odd_arguments_are_bad_input(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) in (2, 3)
    said = capsys.readouterr().err
    assert said.startswith("skipless: ")
    assert len(said.encode(errors="replace")) < 2000


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--corpus", "code=files:nothing-here/*.py"], "nothing-here"),
        (["--corpus", "code=jsonl:nothing.jsonl"], "nothing.jsonl"),
        (["--output", "file/results"], "file/results"),
        (["--output", "/proc/nothing"], "/proc/nothing"),
        (["--runs", "file"], "file"),
        (["--archive", "file"], "file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_reproduce_checks_its_folders_and_corpora_first(options, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("skipless.experiments.pool.Pool.run", lambda *_: pytest.fail("something was started"))
    (tmp_path / "file").touch()
    assert run(["reproduce", "fig4", *options]) == 2
    assert hint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_without_a_writer_is_empty_and_one_with_a_writer_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "pipe") == b""
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_bytes(Path(f"/dev/fd/{reading}")) == b"text"
    os.close(reading)
    with pytest.raises(Unreadable, match="device"):
        read_bytes(Path("/dev/zero"))


def test_out_of_memory_is_said_in_a_line(monkeypatch, capsys):
    def fail(*_, **__):
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr(sys.modules["skipless.cli.app"], "app", fail)
    assert run(["inspect"]) == 3
    assert capsys.readouterr().err.startswith("skipless: out of memory")


def test_a_bug_is_still_seen(monkeypatch):
    def fail(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr(sys.modules["skipless.cli.app"], "app", fail)
    with pytest.raises(KeyError):
        run(["inspect"])
