"""What others have written, or half written: an object or a line, never a traceback."""

import gzip
import json
import os
import warnings

import pytest

from skipless.config.reading import read_json
from skipless.errors import UserError
from skipless.runs import Run
from skipless.storage.json_files import SkippedRow, read_json_lines

GOOD = {"step": 1, "tokens": 64, "seconds": 0.5, "loss": 2.0, "gains": {"a": [1.0, None]}}
FOREIGN = [
    b'{"step": 2, "tok',
    b"[]",
    b"null",
    b"{}",
    b'{"step": "2", "tokens": 1, "seconds": 1}',
    b'{"step": 2, "tokens": 1, "seconds": 1, "loss": "low"}',
    b'{"step": 2, "tokens": 1, "seconds": 1, "gains": {"a": "b"}}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
]


@pytest.mark.parametrize("bad", FOREIGN, ids=range(len(FOREIGN)))
@pytest.mark.parametrize("compressed", [False, True])
def test_a_row_that_is_no_record_is_passed_over_and_named(tmp_path, bad, compressed):
    line = json.dumps(GOOD).encode() + b"\n"
    text, run = line + bad + b"\n" + line, Run(tmp_path)
    path = run.archived_metrics_file if compressed else run.metrics_file
    path.write_bytes(gzip.compress(text) if compressed else text)
    with pytest.warns(SkippedRow) as said:
        assert list(run.metrics()) == [GOOD, GOOD]
    assert len(said) == 1
    assert f"{path}, row 2 is no record and was passed over" in str(said[0].message)
    assert len(str(said[0].message)) < len(str(path)) + 100


def test_a_line_that_is_being_written_is_nothing_to_speak_of(tmp_path):
    Run(tmp_path).metrics_file.write_bytes(json.dumps(GOOD).encode() + b'\n{"step": 2')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(Run(tmp_path).metrics()) == [GOOD]


def test_a_compressed_file_that_was_cut_gives_what_it_has(tmp_path):
    lines = b"".join(json.dumps({**GOOD, "step": step}).encode() + b"\n" for step in range(5000))
    path = tmp_path / "metrics.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:-2000])
    with pytest.warns(SkippedRow, match="cannot be read to its end"):
        found = list(Run(tmp_path).metrics())
    assert [record["step"] for record in found] == list(range(len(found)))
    assert len(found) > 100


def test_samples_that_are_none_are_passed_over(tmp_path):
    good = {"step": 1, "prompt": "a", "text": "b"}
    Run(tmp_path).samples_file.write_text('{"step": 1, "text": 3}\n' + json.dumps(good) + "\n")
    with pytest.warns(SkippedRow, match="row 1"):
        assert list(Run(tmp_path).samples()) == [good]


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000])
def test_what_is_not_json_is_said(tmp_path, text):
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(UserError, match=r"file\.json' is not JSON"):
        read_json(tmp_path / "file.json")


def test_what_is_no_object_is_said(tmp_path):
    (tmp_path / "file.json").write_text("[]")
    with pytest.raises(UserError, match=r"file\.json' is not a JSON object"):
        read_json(tmp_path / "file.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe' is not a file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe' is not a file"):
        list(read_json_lines(tmp_path / "pipe", lambda record: True))


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_json(tmp_path / "missing.json")
    assert list(read_json_lines(tmp_path / "missing.jsonl", lambda record: True)) == []
