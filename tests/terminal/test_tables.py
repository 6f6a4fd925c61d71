"""No table loses a cell, however narrow the terminal."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from skipless.analysis.inspection import inspect
from skipless.config.model import ModelConfig
from skipless.experiments.report.summary import Summary
from skipless.tasks.bench import Row
from skipless.terminal.bench import show_bench
from skipless.terminal.inspection import show_inspections, show_plans
from skipless.terminal.runs import show_glue, show_summaries
from skipless.terminal.tables import show_table
from skipless.terminal.text import say

WIDTHS = [60, 80, 120]
SETTINGS = {"derandomize": True, "database": None, "max_examples": 150}


def printed(width, *table, **how):
    out = io.StringIO()
    show_table(*table, console=Console(file=out, width=width), **how)
    return out.getvalue()


WORDS = st.text("abc0-_=:,./[]()#äβ漢×", min_size=1, max_size=24)
NAMES = st.lists(WORDS, min_size=1, max_size=4).map("-".join)
"""Of runs and blocks: up to a hundred characters, without a space."""
FIGURES = st.floats(-1e6, 1e6).map(lambda value: f"{value:,.3f}") | WORDS


@st.composite
def tables(draw):
    columns = draw(st.integers(1, 14))
    head = draw(st.lists(NAMES, min_size=columns, max_size=columns))
    rows = st.tuples(NAMES, *[FIGURES] * (columns - 1))
    return head, draw(st.lists(rows, min_size=1, max_size=6))


@pytest.mark.parametrize("width", WIDTHS)
@settings(**SETTINGS)
@given(table=tables())
def test_every_cell_is_whole(width, table):
    head, rows = table
    out = printed(width, "Title", head, rows)
    for row in rows:
        for cell in row:
            assert cell in out
    for name in head[1:]:
        assert name in out
    assert "…" not in out


@pytest.mark.parametrize("width", WIDTHS)
@settings(**SETTINGS)
@given(table=tables())
def test_lines_are_as_wide_as_the_terminal_where_cells_allow_it(width, table):
    head, rows = table
    if max(cell_len(cell) for row in (head, *rows) for cell in row) > width // 2 - 2:
        return
    assert all(cell_len(line) <= width for line in printed(width, "Title", head, rows).splitlines())


@pytest.mark.parametrize("width", WIDTHS)
@settings(**SETTINGS)
@given(st.lists(st.tuples(NAMES, FIGURES, st.lists(WORDS, max_size=20).map(" ".join)), min_size=1, max_size=5))
def test_sentences_are_folded_between_words(width, rows):
    out = printed(width, "Title", ["what", "size", "how"], rows, prose=True)
    for name, figure, sentence in rows:
        assert name in out
        assert figure in out
        assert all(word in out for word in sentence.split())


def test_a_table_that_fits_is_plain():
    out = printed(80, "Title", ["run", "loss"], [["a-run", "1.5"], ["b", "10.25"]])
    assert out == "Title\nrun     loss\n────────────\na-run    1.5\nb      10.25\n\n"


def test_rows_and_columns_change_places():
    head = ["run", *(f"figure {number}" for number in range(8))]
    lines = printed(60, "Title", head, [["one", *"01234567"], ["two", *"89abcdef"]]).splitlines()
    assert lines[1].split() == ["run", "one", "two"]
    assert lines[3].split() == ["figure", "0", "0", "8"]


def test_a_long_name_gets_a_key():
    name = "sas:alpha_ff=0,activation=leaky-relu,negative_slope=0.8"
    rows = [["parameters of the whole model", "3.37M", "3.36M"]]
    lines = printed(80, "Costs", ["", "sas", name], rows).splitlines()
    assert lines[1] == f"[1] {name}"
    assert lines[2].split() == ["sas", "[1]"]
    assert lines[4].split()[-2:] == ["3.37M", "3.36M"]


def test_columns_come_in_parts_each_with_its_rows():
    head = ["case", *(f"against {letter}" for letter in "abcdef")]
    rows = [[f"case {n}", *(f"{n}{letter}.00 (1.00–2.00)" for letter in "abcdef")] for n in range(9)]
    parts = printed(60, "Title", head, rows).split("\n\n")[:-1]
    assert len(parts) > 1
    for part in parts:
        names = re.findall(r"against ([a-f])", part)
        for n in range(9):
            (line,) = [line for line in part.splitlines() if line.startswith(f"case {n} ")]
            assert re.findall(rf"{n}([a-f])\.00", line) == names


def test_a_row_that_is_wider_than_the_terminal_becomes_a_list():
    name, value = "n" * 70, "v" * 65
    assert printed(60, "Title", ["run", "what"], [[name, value]]) == f"Title\n{name}\n  what: {value}\n\n"


@pytest.mark.parametrize("width", [20, *WIDTHS])
@settings(**SETTINGS)
@given(st.lists(NAMES, min_size=1, max_size=12))
def test_paragraphs_break_no_name(width, names):
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skipless.terminal.text.Console", lambda: Console(file=out, width=width))
        say("what: ", " ".join(names), indent=4)
    for name in names:
        assert name in out.getvalue()


# ------------------------------------------------------------------------- tables as commands show them


@pytest.fixture(params=[60, 80])
def columns(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


LONG_BLOCK = "sas:alpha_ff=0,activation=leaky-relu,negative_slope=0.8"


def test_blocks_side_by_side(columns, capsys):
    models = [ModelConfig(block=b, n_layer=2, d_model=16, n_head=2, vocab_size=32) for b in ("sas", LONG_BLOCK)]
    found = [inspect(m, n, devices=8) for m, n in zip(models, ("sas", LONG_BLOCK), strict=True)]
    show_inspections(found, batch_size=8, context=1024, plot=None)
    show_plans(found, batch_size=8, device_memory=10**9)
    out = capsys.readouterr().out
    costs = out.partition("Costs")[2]
    assert costs.count(LONG_BLOCK) >= 3
    for line in costs.splitlines():
        if line.startswith(("parameters", "training memory", "FLOPs", "decoding memory")):
            assert len(re.findall(r"\d[\d.]*[kMGB]+\b|\b\d+$", line)) >= 2, line
    layer = found[1].signal[-1]
    assert f"{layer.activation:.3g} / {layer.cosine:.3f} / {layer.gradient:.3g}" in out


def test_a_collapsed_block_is_called_one(capsys):
    deep = {"n_layer": 48, "d_model": 32, "n_head": 2, "vocab_size": 64, "max_seq_len": 16}
    names = ["pre-ln:alpha_sa=0", "sas-p"]
    found = [inspect(ModelConfig(block=name, **deep), name) for name in names]
    show_inspections(found, batch_size=8, context=1024, plot=None)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "pre-ln:alpha_sa=0: rank collapse" in said
    assert "sas-p: healthy" in said


def test_benchmarks_keep_their_last_column(columns, capsys):
    references = ("HF GPT-2 (dynamic)", "HF GPT-2 (static)", "pre-ln (kv)", "sas-p (kx)")
    speeds = {name: (number + 0.12, number + 0.01, number + 0.25) for number, name in enumerate(references)}
    show_bench("decode", [Row(name, 1.0, speeds) for name in references])
    out = capsys.readouterr().out
    for number, name in enumerate(references):
        assert out.count(f"{number}.12 ({number}.01–{number}.25)") == 4
        assert f"× {name}" in out
    assert max(map(len, out.splitlines())) <= columns


def test_runs_keep_their_names(columns, capsys):
    names = ["demo-pre-ln", "demo-sas-p", "study-with-a-long-name-that-somebody-gave-it-in-a-hurry-0123456789abcdef"]
    made = {"block": "pre-ln", "parameters": 1_210_000, "steps": 300, "tokens": 614_400, "train_loss": 2.345}
    made |= {"valid_loss": 2.4567, "valid_bits_per_byte": 1.234, "tokens_per_second": 12_345.0, "seconds": 65.0}
    fields = Summary.__dataclass_fields__
    for count in (1, 2, 3):
        show_summaries([Summary(**{**dict.fromkeys(fields), **made, "name": name}) for name in names[:count]])
        out = capsys.readouterr().out
        for name in names[:count]:
            assert f"{name} (pre-ln)" in out
        for cell in ("1.21M", "614k", "2.345", "2.4567", "1.234", "12,345", "1:05"):
            assert out.count(cell) == count


def test_glue_keeps_its_tasks(columns, capsys):
    tasks = ["mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola"]
    scores = {task: {"seeds": [0], "score_mean": 80.0 + n, "score_sd": 0.5} for n, task in enumerate(tasks)}
    show_glue("encoder", {"mean": 70.0, "sd": 1.0, "tasks": scores, "failures": {"cola": {"1": {}}}, "data": {}})
    out = capsys.readouterr().out
    for n, task in enumerate(tasks):
        assert task in out
        assert f"{80 + n}.0 ± 0.5" in out
    assert "cola failed" in out
    assert "seed 1" in out
