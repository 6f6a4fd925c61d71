"""Rows with named columns: TSV, CSV, JSON lines, text, the hub; and whatever else is in a file is refused in a line."""

import gzip
import json
import sys
import types
from contextlib import suppress

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipless.data.tables import read_rows
from skipless.errors import UserError


def values(path) -> list[dict[str, str]]:
    return [row.values for row in read_rows(str(path))]


def test_tsv_has_no_quoting_and_rows_end_with_a_newline_alone(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_bytes('\ufefftext\tlabel\r\n"a\tno\r\nb\u2028c\x85d\tyes\n'.encode())
    assert values(path) == [{"text": '"a', "label": "no"}, {"text": "b\u2028c\x85d", "label": "yes"}]
    assert [row.number for row in read_rows(str(path))] == [2, 3]


def test_csv_is_quoted(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('text,label\n"a, ""b""\nc",yes\n\nd,no\n')
    assert values(path) == [{"text": 'a, "b"\nc', "label": "yes"}, {"text": "d", "label": "no"}]


def test_a_long_field_of_a_csv_file(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(f"text\n{'a' * 200_000}\n")
    assert len(values(path)[0]["text"]) == 200_000


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines(tmp_path, suffix):
    made = [{"text": "a\tb", "label": 1}, {"text": "c", "label": 0.5}, {"text": None, "label": True}]
    data = "".join(json.dumps(row) + "\n\n" for row in made).encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix[6:], bytes)(data)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(packed)
    assert values(path) == [
        {"text": "a\tb", "label": "1"},
        {"text": "c", "label": "0.5"},
        {"text": "", "label": "true"},
    ]


def test_half_a_character_becomes_a_question_mark(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a \\ud800 b"}\n')
    assert values(path) == [{"text": "a ? b"}]


def test_lines_of_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a\n\nb\n")
    assert values(path) == [{"text": "a"}, {"text": ""}, {"text": "b"}]


def test_a_data_set_of_the_hub(monkeypatch):
    asked = []

    class Rows(list):
        features = {"text": object(), "label": types.SimpleNamespace(names=["neg", "pos"]), "score": object()}

    def load_dataset(*names, **how):
        asked.append((names, how))
        return Rows([{"text": "a", "label": 1, "score": 0.5}, {"text": "b", "label": -1, "score": 2}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = [row.values for row in read_rows("hf:some/set:small@test")]
    assert asked == [(("some/set", "small"), {"split": "test", "streaming": True})]
    assert found == [
        {"text": "a", "label": "pos", "score": "0.5"},
        {"text": "b", "label": "-1", "score": "2"},  # no class: as it is
    ]


def test_a_data_set_that_cannot_be_opened_is_one_line(monkeypatch):
    def load_dataset(*names, **how):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"'hf:x' cannot be opened: no such thing$"):
        list(read_rows("hf:x"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", 'text\n"a', "row 2: unexpected end of data"),
        ("x.csv", "a,b\nc\n", "row 2: 1 fields, and the header has 2"),
        ("x.jsonl", "[1]\n", "row 1: expected a JSON object, got list"),
        ("x.jsonl", "{\n", "row 1: not valid JSON"),
        ("x.jsonl", "[" * 100_000, "row 1: not valid JSON"),
        ("x.jsonl.gz", "plain", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file(name, content, said, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        values(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=200), suffix=st.sampled_from([".tsv", ".csv", ".jsonl", ".txt", ".jsonl.gz", ".csv.zst"])
)
def test_any_bytes_are_rows_or_refused(data, suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    with suppress(UserError):
        assert all(isinstance(value, str) for row in values(path) for value in row.values())
