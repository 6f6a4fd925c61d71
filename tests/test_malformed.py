"""A slice of the generator of malformed input, and the inputs that it and others have found."""

import gzip
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks import malformed
from benchmarks.malformed_cases import LINES, make_kit
from skipless.cli import app, run
from skipless.config.explain import explain
from skipless.config.model import ModelConfig
from skipless.config.overrides import load_yaml
from skipless.config.reading import Unreadable, read_bytes, read_json
from skipless.data.glue import TASKS, read_tsv
from skipless.data.labelled import encode
from skipless.data.own_task import read_own_task
from skipless.data.tokenizer import Tokenizer
from skipless.data.tokenizer import train as train_tokenizer
from skipless.errors import UserError
from skipless.experiments.messages import Result
from skipless.experiments.outcome import Finding
from skipless.experiments.report.results import read_notes, with_note
from skipless.experiments.run_index import completion
from skipless.experiments.scale import Scale
from skipless.experiments.sweep import Sweep
from skipless.experiments.sweep_axes import parse_axis
from skipless.experiments.timings import Timings
from skipless.recipes import load_rates
from skipless.runs import Run, classifier_config, load
from skipless.storage.atomic_files import write_bytes
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.journal import Journal
from skipless.storage.lock import FolderLock, is_locked
from skipless.storage.manifest import Damaged, FileEntry, Manifest
from skipless.tasks.glue_results import read_results
from skipless.tasks.low_bits import read_figures

WORDS = train_tokenizer("bpe", lambda: iter(["text and label"] * 9), vocab_size=260)
SIDE_BY_SIDE = Finding("x", "x", "", "", (), "", (), (), ())


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, forked_workers):
    """A folder with the kit that cases are made of."""
    folder = tmp_path_factory.mktemp("malformed")
    make_kit(folder / "kit")
    return folder


def test_a_slice_of_the_generator(scratch):
    ended, failures = malformed.run_cases(4, 2 * len(LINES), 0, scratch)
    assert failures == []
    assert all(sum(counts.values()) == 2 for counts in ended.values())
    assert sum(counts["2"] for counts in ended.values()) > 20


def test_every_command_has_its_lines():
    tried = {line.words[0] for line in LINES.values()}
    assert tried == {command.name or command.callback.__name__ for command in app.registered_commands} | {"data"}
    assert {line.words[1] for line in LINES.values() if line.words[0] == "data"} == {"build", "show"}


def test_the_generator_finds_what_is_wrong():
    said = "Traceback (most recent call last)\n  …\nKeyError: 'x'"
    assert "KeyError" in malformed.problem(1, said)
    assert "exit status 1" in malformed.problem(1, "skipless: no")
    assert "a line of" in malformed.problem(2, "x" * 3000)
    assert "without a word" in malformed.problem(2, "")
    assert malformed.problem(2, "skipless: no such run") is None


def test_the_same_seed_makes_the_same_cases(scratch, tmp_path):
    cases = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        cases.append([])
        for number in range(4):
            folder = tmp_path / place / str(number)
            folder.mkdir()
            cases[-1].append(str(malformed.make_case("report", number, 7, scratch / "kit", folder)))
    assert cases[0] == cases[1]


# ------------------------------------------------------------------------------------------------ every reader


def _tsv(path):
    return read_tsv(path, TASKS["cola"])


def _manifest(path):
    return Manifest.read(path.parent)


def _timings(path):
    found = Timings.read(path.parent)
    return [found.ratios(size, "sas", "pre-ln") for size in found.seconds]


def _times(path):
    """Beside the page of a comparison."""
    return Timings.of_content(read_json(path), path)


def _classifier(path):
    return classifier_config(path.parent)


def _archived(path):
    """The compressed metrics of a published run, whatever was compressed."""
    content = path.read_bytes()
    whole = list(Run(path.parent).metrics())
    path.write_bytes(gzip.compress(content))
    return whole, list(Run(path.parent).metrics())


def _notes(path):
    return [with_note(SIDE_BY_SIDE, note) for note in read_notes(path.parent).values()]


def _rates(path):
    try:
        return Scale("laptop", load_rates(path)).decoder("sas-p")
    except ValidationError as error:  # as the command line says it
        raise UserError(explain(error)) from None


def _rows(path):
    """Labelled rows, and their tokens."""
    data = read_own_task("own", str(path), str(path), None, texts=["text"], label="label")
    return encode(WORDS, data.train.texts, 8)


def _export(path):
    """Of a graph; there is nothing beside its configuration."""
    return load(path.parent) if path.exists() else None


def _graph(path):
    """A graph beside a configuration that is as it should be."""
    about = {"model_type": "skipless", "architectures": ["SkiplessForCausalLM"], "onnx": {"cache": "kv"}}
    (path.parent / "config.json").write_text(json.dumps({**ModelConfig().model_dump(mode="json"), **about}))
    return load(path.parent)


def _result(path):
    return Result.find(path)


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
    "token-time.json": _times,
    "classifier.json": _classifier,
    "metrics.jsonl.gz": _archived,
    "bits.json": read_figures,
    "notes.yaml": _notes,
    "rates.json": _rates,
    "rows.tsv": _rows,
    "rows.csv": _rows,
    "rows.jsonl": _rows,
    "export/config.json": _export,
    "graph/model.onnx": _graph,
    "result.json": _result,
}
"""File → what reads it."""

KEYS = [
    *("config", "model", "train", "files", "sha256", "step", "seconds", "tasks", "seeds", "model_type", "classifier"),
    *("labels", "loss", "kurtosis", "text", "label", "study", "sas-p", "onnx", "status"),
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())

ROWS = st.lists(
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
    b'{"seconds": {"decoder": {"sas": [1.0], "pre-ln": [1.0, 2.0]}}}',
    b'{"loss": {"32": 0}, "kurtosis": {}}',
    b'{"classifier": {"labels": ["a"]}}',
    b'{"classifier": {"model": {"d_model": 1000000000000}, "labels": ["a", "\\ud800"]}}',
    b'{"model_type": "skipless", "architectures": ["SkiplessForCausalLM"], "onnx": {}}',
    b'{"model_type": "skipless", "architectures": [{}], "id2label": {"0": 1}}',
    b'{"study": {"sas-p": {"train.lr": "x"}}}',
    b'{"study": {"sas-p": 5}}',
    b'{"study": [1]}',
    b'{"text": "a", "label": "--5"}\n{"text": "b", "label": "1"}\n',
    b'{"text": "a", "label": "' + b"9" * 5000 + b'"}\n{"text": "b", "label": 1}\n',
    b'{"text": "\\ud800", "label": "a"}\n{"text": "b", "label": "b"}\n',
    b"text\tlabel\na\t--5\nb\t1\n",
    b'text,label\n"a,b\n',
    b"text,label\na,1e999\nb,nan\n",
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
    (folder / name).parent.mkdir(exist_ok=True)
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
    @given(st.one_of(JSON, st.binary(max_size=60), ROWS.map(b"\n".join)))
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


# ------------------------------------------------------------------------------------------------ pipes


@pytest.fixture
def alarm():
    """A test that waits for a pipe fails instead."""

    def stop(*_):
        raise AssertionError("it waits for a pipe that nobody writes to")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.json", "tokenizer.json", ".lock", ".saved"])
def test_a_pipe_in_the_folder_of_a_run_is_not_waited_for(scratch, tmp_path, name, alarm):
    """By those who ask how far it is, who read it, who write to it, or who look whether somebody else does."""
    run = Run(Path(shutil.copytree(scratch / "kit" / "runs" / "causal", tmp_path / "run")))
    (run.folder / name).unlink()
    os.mkfifo(run.folder / name)
    for ask in (
        lambda: completion(run),
        lambda: list(run.metrics()),
        lambda: Journal(run.metrics_file).close(),
        lambda: Journal(run.samples_file).close(),
        lambda: is_locked(run.folder),
        lambda: FolderLock(run.folder).acquire(),
        lambda: load(run.folder),
    ):
        with suppress(UserError, OSError):
            ask()


def test_a_pipe_among_what_was_staged_is_not_waited_for(tmp_path, alarm):
    os.mkfifo(tmp_path / ".tmp-a-00000000")
    write_bytes(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
