"""GLUE's files: read as they are, and where they are wrong, named with their row."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.data.glue import ALL, COLUMNS, TASKS, parse_rows, parse_tasks, predictions, read_task, read_tsv
from skipless.data.labelled import encode
from skipless.errors import UserError
from tests.helpers.glue_files import real_glue, small_glue, write_tsv

HEADER = ["index", "sentence1", "sentence2", "label"]
GOOD = ["0", "a", "b", "entailment"]
COUNTS = {
    "cola": (8551, 1043),
    "sst2": (67_349, 872),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "rte": (2490, 277),
    "wnli": (635, 71),
    "qnli": (None, 5463),
}


def test_the_table_has_the_papers_tasks():
    assert set(ALL) == {"mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola"}
    assert COLUMNS == ("mnli", "mnli-mm", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola", "wnli")
    metrics = {name: task.metrics for name, task in TASKS.items() if task.metrics != ("accuracy",)}
    assert metrics == {
        "stsb": ("pearson", "spearman"),
        "qqp": ("accuracy", "f1"),
        "mrpc": ("accuracy", "f1"),
        "cola": ("matthews",),
    }


def test_answers_have_the_hubs_numbers():
    """Files name answers and the hub numbers them: a model of one must be right on the other."""
    binary = ("0", "1")
    assert {name: task.labels for name, task in TASKS.items()} == {
        "mnli": ("entailment", "neutral", "contradiction"),
        "rte": ("entailment", "not_entailment"),
        "qnli": ("entailment", "not_entailment"),
        "stsb": (),
        **dict.fromkeys(("sst2", "qqp", "mrpc", "cola", "wnli"), binary),
    }


# ------------------------------------------------------------------------------- the real files


@pytest.mark.parametrize("name", COUNTS)
def test_official_row_counts(name):
    data = read_task(real_glue(), TASKS[name])
    train, dev = COUNTS[name]
    assert train is None or len(data.train) == train
    assert len(data.dev[name]) == dev


@pytest.mark.parametrize("name", COUNTS)
def test_real_texts_are_in_the_file_letter_by_letter(name):
    data, task = read_task(real_glue(), TASKS[name]), TASKS[name]
    raw = (real_glue() / task.folder / "train.tsv").read_bytes().split(b"\n")
    for texts, line in zip(data.train.texts, data.train.lines, strict=True):
        fields = raw[line - 1].removesuffix(b"\r").split(b"\t")
        assert all(text.encode() in fields for text in texts), line
    if name in ("mrpc", "stsb", "qnli"):  # they have marks that a reader of quoted fields would have eaten
        assert any(text.startswith('"') for texts in data.train.texts for text in texts)
        assert any(text.count('"') % 2 for texts in data.train.texts for text in texts)


# -------------------------------------------------------------------------------- small files


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_and_line_ends(tmp_path, end):
    texts = ['" open', 'say ""', "it's", "a\u2028b\x0cc\x85d", "", " spaces "]
    rows = [[str(n), text, '"', "entailment"] for n, text in enumerate(texts)]
    found = read_tsv(write_tsv(tmp_path / "train.tsv", [HEADER, *rows], end), TASKS["rte"])
    assert found.texts == [(text, '"') for text in texts]
    assert found.labels.tolist() == [0] * len(texts)
    assert found.lines == list(range(2, len(texts) + 2))


def test_a_last_line_without_an_end_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes("\ufeffindex\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment".encode())
    assert read_tsv(path, TASKS["rte"]).labels.tolist() == [1]


def test_columns_are_found_by_name(tmp_path):
    header = ["index", "promptID", "sentence1_parse", "sentence1", "sentence2", "label1", "gold_label"]
    path = write_tsv(tmp_path / "train.tsv", [header, [0, 1, "(x)", "a", "b", "neutral", "contradiction"]])
    found = read_tsv(path, TASKS["mnli"])
    assert (found.texts, found.labels.tolist()) == ([("a", "b")], [2])


def test_cola_has_a_header_only_in_its_test_set(tmp_path):
    data = read_task(small_glue(tmp_path), TASKS["cola"])
    assert data.train.lines[0] == 1
    assert data.test["CoLA"].texts == [("good one",), ("bad one",)]
    assert data.test["CoLA"].labels is None


def test_mnli_has_two_dev_sets_and_three_test_sets(tmp_path):
    data = read_task(small_glue(tmp_path), TASKS["mnli"])
    assert list(data.dev) == ["mnli", "mnli-mm"]
    assert list(data.test) == ["MNLI-m", "AX"]  # no test_mismatched.tsv was made
    assert data.test["AX"].index == ["0", "1", "7"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([HEADER, GOOD, ["1", "a", "b", "maybe"]], r"row 3: label 'maybe' is not one of entailment, not_entailment"),
        ([HEADER, GOOD, ["1", "a", "b", ""]], r"row 3: label '' is not one of"),
        ([HEADER, GOOD, ["1", "a", "b"]], r"row 3: 3 fields, too few for sentence1, sentence2, label"),
        ([HEADER, GOOD, [""], GOOD], r"row 3: 1 fields, too few"),
        ([["index", "sentence1", "sentence_2", "label"], GOOD], r"row 1: there is no column 'sentence2'.*did you mean"),
        ([HEADER], "has no rows"),
        ([[""]], "is empty"),
        ([], "is empty"),
    ],
    ids=["label", "no-label", "short", "blank", "column", "header-only", "blank-file", "empty"],
)
def test_what_is_wrong_is_named_with_file_and_row(tmp_path, rows, message):
    path = write_tsv(tmp_path / "RTE" / "train.tsv", rows)
    with pytest.raises(UserError, match=rf"RTE/train\.tsv,? {message}") as caught:
        read_tsv(path, TASKS["rte"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", "", "nan", "inf", "5.1", "-0.1"])
def test_a_score_outside_its_range_is_refused(tmp_path, value):
    path = write_tsv(tmp_path / "dev.tsv", [["sentence1", "sentence2", "score"], ["a", "b", value]])
    with pytest.raises(UserError, match=r"dev\.tsv, row 2: score '.*' is not a number from 0 to 5"):
        read_tsv(path, TASKS["stsb"])


def test_bytes_that_are_no_text(tmp_path):
    path = write_tsv(tmp_path / "train.tsv", [HEADER, GOOD])
    path.write_bytes(path.read_bytes() + b"1\ta\xff\tb\tentailment\n")
    with pytest.raises(UserError, match=r"train\.tsv, row 3: not UTF-8"):
        read_tsv(path, TASKS["rte"])


def test_short_rows_of_qqp_are_left_out_and_counted(tmp_path):
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    path = write_tsv(
        tmp_path / "train.tsv", [header, [0, 1, 2, "a", "b", 1], [1, 1, 2, "cut off"], [2, 1, 2, "c", "d", 0]]
    )
    found = read_tsv(path, TASKS["qqp"])
    assert (len(found), found.skipped, found.lines) == (2, 1, [2, 4])


def test_a_missing_split_or_folder_is_named(tmp_path):
    small_glue(tmp_path)
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    with pytest.raises(UserError, match=r"MNLI/dev_mismatched\.tsv is missing; did you mean 'dev_matched\.tsv'"):
        read_task(tmp_path, TASKS["mnli"])
    with pytest.raises(UserError, match=r"there is no folder '.*QQP'"):
        read_task(tmp_path, TASKS["qqp"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [("all", list(ALL)), ("RTE, sst-2", ["sst2", "rte"]), ("wnli,all", [*ALL, "wnli"]), ("cola,cola", ["cola"])],
)
def test_names_of_tasks(names, expected):
    assert [task.name for task in parse_tasks(names)] == expected


@pytest.mark.parametrize("names", ["", "sst3", "cola,,rte"])
def test_unknown_tasks(names):
    with pytest.raises(UserError, match=r"unknown GLUE task.*known: all, mnli"):
        parse_tasks(names)


def test_rows_of_all_tasks_and_of_some():
    assert parse_rows("8000") == 8000
    assert parse_rows("SST-2=1000, qqp=5000") == {"sst2": 1000, "qqp": 5000}
    for wrong in ("", "0", "-3", "many", "sst2=", "sst2=0", "1000,sst2=500", "sst2=500,1000"):
        with pytest.raises(UserError, match="cannot read rows"):
            parse_rows(wrong)
    with pytest.raises(UserError, match="sst2"):
        parse_rows("sts2=5")


# ------------------------------------------------------------------------------------- the hub


def hub(monkeypatch, splits):
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    asked = []
    fake = SimpleNamespace(load_dataset=lambda *names: asked.append(names) or made)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_the_hub_gives_the_same(monkeypatch):
    pairs = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [2, 0]}
    unknown = {**pairs, "label": [-1, -1]}
    splits = {"train": pairs, "validation_matched": pairs, "validation_mismatched": pairs, "test_matched": unknown}
    asked = hub(monkeypatch, splits)
    data = read_task("hf:nyu-mll/glue", TASKS["mnli"])
    assert asked == [("nyu-mll/glue", "mnli")]
    assert data.train.texts == [("a", "c"), ("b", "d")]
    assert data.train.labels.tolist() == [2, 0]
    assert list(data.dev) == ["mnli", "mnli-mm"]
    assert (list(data.test), data.test["MNLI-m"].index) == (["MNLI-m"], ["0", "1"])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": {"sentence": ["a"], "label": [1]}}, "has no split 'validation'; splits: train"),
        ({"train": {"text": ["a"], "label": [1]}}, "no column 'sentence'; columns: text, label"),
        ({"train": {"sentence": ["a", "b"], "label": [1, -1]}}, "train, row 2: label -1 is not one of the task's"),
    ],
)
def test_a_wrong_hub_data_set(monkeypatch, splits, message):
    hub(monkeypatch, splits)
    with pytest.raises(UserError, match=message):
        read_task("hf:some/glue", TASKS["sst2"])


# -------------------------------------------------------------------------------------- tokens


class Letters:
    """A tokeniser whose tokens are the code points."""

    end_id = 0

    def encode_batch(self, texts):
        return [[ord(letter) for letter in text] for text in texts]


@settings(deadline=None)
@given(
    first=st.text("ab", max_size=30),
    second=st.text("cd", max_size=30),
    length=st.integers(4, 40),
)
def test_truncation_keeps_both_sentences(first, second, length):
    ((*tokens,),) = encode(Letters(), [(first, second)], length)
    middle = tokens.index(0)
    a, b = tokens[:middle], tokens[middle + 1 : -1]
    assert tokens[-1] == 0
    assert tokens.count(0) == 2
    assert len(tokens) == min(length, len(first) + len(second) + 2)
    assert [chr(t) for t in a] == list(first[: len(a)])
    assert [chr(t) for t in b] == list(second[: len(b)])
    if len(tokens) == length:  # the longer one gave, down to the length of the other
        assert len(a) >= min(len(first), (length - 2) // 2)
        assert len(b) >= min(len(second), (length - 2) // 2)


def test_one_sentence():
    assert encode(Letters(), [("abc",), ("",)], 3) == [[97, 98, 0], [0]]


def test_the_leaderboards_format():
    index, answers = ["0", "1", "9"], np.array([0, 1, 1])
    assert predictions(TASKS["rte"], index, answers) == (
        "index\tprediction\n0\tentailment\n1\tnot_entailment\n9\tnot_entailment\n"
    )
    assert predictions(TASKS["cola"], index, answers) == "index\tprediction\n0\t0\n1\t1\n9\t1\n"
    assert predictions(TASKS["stsb"], ["0", "1"], np.array([5.7, -0.2])) == "index\tprediction\n0\t5.000\n1\t0.000\n"
    boards = {board for task in TASKS.values() for board in task.test}
    assert boards == {
        *("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX"),
    }
