"""Plots as data and as files."""

import csv
import io
import itertools
import math
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skipless import BLOCKS
from skipless.analysis.plotting import BLOCK_COLOURS, COLOURS, group_colours
from skipless.errors import UserError
from skipless.experiments.outcome import Plot, Series
from skipless.experiments.report import draw as draw_module
from skipless.experiments.report import run_plots as run_plots_module
from skipless.experiments.report.axes import (
    bar_places,
    mark_every,
    named_below,
    shorten,
    split_bars,
    x_limits,
    y_limits,
)
from skipless.experiments.report.draw import draw, save_plots, to_csv
from skipless.experiments.report.page_plots import plot_data
from skipless.experiments.report.run_plots import curve, draw_losses, run_plots
from skipless.experiments.report.series import mean_sd
from skipless.experiments.report.styles import styles
from skipless.experiments.report.summary import pool_seeds
from tests.helpers.made_up_runs import finding, line, make_run, plot

NASTY = "_a $\\frac{1}$ <b>&\n" + "x" * 200


def lightness(colour: str) -> float:
    """Relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# -------------------------------------------------------------------------------- styles


def test_a_block_has_one_colour_wherever_it_is_drawn():
    first = plot(line("other"), line("sas"), line("pre-ln"))
    second = plot(line("SAS, deep", group="sas"), line("another"))
    one, two = styles([first, second])
    (alone,) = styles([plot(line("SAS"))])
    assert one[1].light == two[0].light == alone[0].light
    assert one[0].light not in (one[1].light, one[2].light)
    assert two[1].light not in {style.light for style in one}


def test_the_blocks_colours_are_those_of_the_palette():
    assert set(BLOCK_COLOURS) == set(BLOCKS)
    assert sorted(BLOCK_COLOURS.values()) == sorted(COLOURS)


def test_what_stands_before_the_comma_may_be_a_block():
    names = ("pre-ln, linear", "Pre-LN, cosine", "pre-ln", "sas-p, 3 seeds", "sas-like, 3 seeds", "sas-p-nonorm, a, b")
    (look,) = styles([plot(*map(line, names))])
    own = [BLOCK_COLOURS[name] for name in ("pre-ln", "pre-ln", "pre-ln", "sas-p")]
    assert [style.light for style in look[:4]] == own
    assert look[5].light == BLOCK_COLOURS["sas-p-nonorm"]
    assert look[4].light not in {style.light for n, style in enumerate(look) if n != 4}  # no block is called that
    assert len({(style.dash, style.mark) for style in look[:3]}) == 3
    bars = plot(Series("size", {"steps": ("pre-ln, deep", "other")}, (3.0, 2.0)), kind="bars", axes={"steps": ""})
    assert styles([split_bars(bars)])[0][0].light == BLOCK_COLOURS["pre-ln"]


def test_other_pictures_have_the_same_colours():
    found = group_colours(["other", "sas-p, deep", "sas-p", "pre-ln", "another"])
    assert found["sas-p, deep"] == found["sas-p"] == BLOCK_COLOURS["sas-p"]
    assert found["pre-ln"] == BLOCK_COLOURS["pre-ln"]
    assert len(set(found.values())) == 4
    assert group_colours([]) == {}


def test_many_settings_of_two_blocks_can_be_told_apart():
    settings = [f"{block}, setting {n}" for block in ("pre-ln", "sas-p") for n in range(9)]
    (look,) = styles([plot(*map(line, settings), kind="marks")])
    assert all(style.mark for style in look)
    assert len({(style.light, style.mark, style.dash) for style in look}) == len(settings)


def test_a_group_shares_its_colour_and_not_its_dashes():
    (look,) = styles([plot(line("18", group="sas"), line("72", group="sas"), line("18", group="pre-ln"))])
    assert look[0].light == look[1].light != look[2].light
    assert look[0].dash == () != look[1].dash
    assert look[0].mark != look[1].mark


def test_bars_of_one_group_are_paler_one_after_the_other():
    bars = plot(*(line(name, group="sas") for name in "abc"), line("pre-ln"), line("d", group="pre-ln"), kind="bars")
    (look,) = styles([bars])
    light, dark = ([lightness(getattr(style, where)) for style in look] for where in ("light", "dark"))
    assert light[0] < light[1] < light[2]
    assert light[3] < light[4]
    assert dark[0] > dark[1] > dark[2]
    assert dark[3] > dark[4]


@given(st.lists(st.sampled_from([*BLOCKS, *"abcdefghijklmnop"]), min_size=1, max_size=20, unique=True))
def test_no_two_series_look_the_same(names):
    look = styles([plot(*map(line, names))])[0]
    assert len({(style.light, style.mark, style.dash) for style in look}) == len(names)
    assert len({(style.dark, style.mark, style.dash) for style in look}) == len(names)


def test_a_large_group_has_shades():
    values, maps = ([line(f"{part} {n}", group=part) for n in range(12)] for part in ("value", "pre-ln"))
    (look,) = styles([plot(*values, *maps)])
    assert len({style.light for style in look}) == len({style.dark for style in look}) == 24
    assert all(style.dash == () and not style.mark for style in look)
    for style in look:
        assert 1.05 / (lightness(style.light) + 0.05) > 3
        assert (lightness(style.dark) + 0.05) / (lightness("#1a1c20") + 0.05) > 2.9


def test_bars_of_blocks_have_the_blocks_colours():
    together = plot(
        Series("size", {"steps": ("pre-ln", "sas", "other")}, (3.0, 2.0, 1.0)), kind="bars", axes={"steps": ""}
    )
    split = split_bars(together)
    assert [(series.name, series.y) for series in split.series] == [
        ("pre-ln", (3.0,)),
        ("sas", (2.0,)),
        ("other", (1.0,)),
    ]
    assert styles([split])[0][1].light == styles([plot(line("sas"))])[0][0].light
    assert named_below(split)
    tasks = plot(Series("score", {"steps": ("CoLA", "RTE")}, (3.0, 2.0)), kind="bars")
    assert split_bars(tasks) == tasks
    assert split_bars(plot(line("sas"))) == plot(line("sas"))


@pytest.mark.parametrize("count", [8, 12, 72])
def test_many_series_go_from_dark_to_light(count):
    look = styles([plot(*(line(f"layer {n}") for n in range(count)))])[0]
    for shades in ([lightness(style.light) for style in look], [lightness(style.dark) for style in look]):
        assert all(b > a for a, b in itertools.pairwise(shades))
    assert 1.05 / (lightness(look[-1].light) + 0.05) > 3  # seen on white
    assert (lightness(look[0].dark) + 0.05) / (lightness("#1a1c20") + 0.05) > 3  # and on a dark card


def test_a_plot_of_many_leaves_the_colours_of_the_others_alone():
    layers = plot(*(line(f"layer {n}") for n in range(12)))
    few = plot(line("a"), line("b"))
    assert styles([layers, few])[1] == styles([few])[0]


# -------------------------------------------------------------------------------- limits


def test_a_steep_beginning_leaves_the_plot_at_the_top():
    fall = [8, 4, *(3 - 0.01 * n for n in range(20))]
    low, high = y_limits(plot(line(y=fall)))
    assert low < min(fall)
    assert 3 < high < 3.2
    assert y_limits(plot(line(y=fall)), whole=True)[1] > 8
    assert y_limits(plot(line(y=fall), kind="marks"))[1] > 8
    assert y_limits(plot(line(y=fall[::-1])))[1] > 8  # the end of a line is never cut
    assert y_limits(plot(line(y=fall), log_x=True))[1] > 8
    swept = line(y=fall, x={"rate": tuple(range(len(fall)))})
    assert y_limits(plot(swept, axes={"rate": "learning rate"}))[1] > 8  # nor is what does not happen in time
    slow = [8 - 0.2 * n for n in range(20)]
    assert y_limits(plot(line(y=slow)))[1] > 8


def test_bars_begin_at_zero_and_show_their_deviation():
    bars = plot(Series("a", {"steps": ("x", "y")}, (5.0, 9.0), (0.5, 2.0)), kind="bars")
    low, high = y_limits(bars)
    assert low == 0
    assert high > 11
    assert y_limits(plot(Series("a", {"steps": ("x",)}, (-5.0,)), kind="bars"))[0] == -5


def test_a_series_without_the_first_axis_is_not_cut_off():
    whole, without = line("a", (3.0, 2.0)), replace(line("b", (9.0, 8.0)), x={"minutes": (1.0, 2.0)})
    assert y_limits(plot(whole, without))[1] > 9
    fall = [8, 4, *(3 - 0.01 * n for n in range(20))]
    late = replace(line("b", fall), x={"minutes": tuple(range(len(fall)))})
    assert y_limits(plot(line("a", fall), late)) == y_limits(plot(line("a", fall)))  # its beginning is one as well


VALUES = st.one_of(st.none(), st.floats(-1e100, 1e100), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


@given(
    st.lists(st.lists(VALUES, max_size=6), max_size=3),
    st.sampled_from(["line", "marks", "bars"]),
    st.booleans(),
    st.booleans(),
)
@example([[3e46, 2e-262]], "line", False, True)
@example([[5e-324]], "line", False, True)
def test_limits_are_limits_whatever_was_measured(rows, kind, log_x, log_y):
    one = plot(
        *(line(str(n), row) for n, row in enumerate(rows)), kind=kind, log_x=log_x, log_y=log_y and kind != "bars"
    )
    for low, high in (y_limits(one), y_limits(one, whole=True), x_limits(one, "steps")):
        assert math.isfinite(low)
        assert math.isfinite(high)
        assert low < high
        assert low > 0 or not (one.log_y and low is y_limits(one)[0])


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True, max_size=4), min_size=1, max_size=5))
def test_bars_stand_beside_each_other(rows):
    series = tuple(Series(str(n), {"steps": tuple(row)}, (1.0,) * len(row)) for n, row in enumerate(rows))
    bars = sorted(bar for row in bar_places(plot(*series, kind="bars"), "steps") for bar in row)
    for (left, width), (right, _) in itertools.pairwise(bars):
        assert right - left >= width


def test_bars_stand_about_their_name():
    """Those of a category together, with its name in their middle, also where a series lacks one."""
    rows = {"one": ("x", "y"), "two": ("x", "y"), "three": ("y", "z")}
    series = (Series(name, {"steps": row}, (1.0,) * len(row)) for name, row in rows.items())
    places = bar_places(plot(*series, kind="bars"), "steps")
    centres = {name: [] for name in "xyz"}
    for row, bars in zip(rows.values(), places, strict=True):
        for name, (centre, _) in zip(row, bars, strict=True):
            centres[name].append(centre)
    assert {name: statistics.fmean(found) for name, found in centres.items()} == pytest.approx({"x": 0, "y": 1, "z": 2})
    assert [sorted(found) == found for found in centres.values()] == [True] * 3  # in the order of the series


def test_bars_are_drawn_where_the_page_draws_them(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    one = Series("one", {"steps": ("x", "y", "z")}, (3.0, 1.0, 2.0), (0.1, 0.2, 0.3))
    two = Series("two", {"steps": ("y", "z")}, (5.0, 4.0))
    bars, panels, draw_panel = plot(one, two, kind="bars", axes={"steps": "block"}), [], draw_module._draw_panel

    def remember(panel, *rest):
        draw_panel(panel, *rest)
        panels.append([(bar.get_x() + bar.get_width() / 2, bar.get_width(), bar.get_height()) for bar in panel.patches])

    monkeypatch.setattr(draw_module, "_draw_panel", remember)
    draw(bars, tmp_path / "bars.svg", ["steps"])
    heights = [*one.y, *two.y]
    expected = [
        (*place, height) for place, height in zip(itertools.chain(*bar_places(bars, "steps")), heights, strict=True)
    ]
    assert panels == [[pytest.approx(bar) for bar in expected]]
    data = plot_data(bars, styles([bars])[0], 0)
    shown = [centre for series in data["series"] for centre in data["xs"][series["x"][0]]]
    assert shown == pytest.approx([centre for centre, _, _ in expected], abs=1e-5)


def test_bands_are_the_standard_deviation_of_a_sample():
    means, deviations = mean_sd([[1.0, 5.0], [3.0, 5.0]])
    assert means == (2.0, 5.0)
    assert deviations == pytest.approx((math.sqrt(2), 0.0))
    assert mean_sd([[1.0, 5.0]]) == ((1.0, 5.0), None)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_every_line_has_a_few_marks(count, of):
    for position in range(of):
        first, every = mark_every(count, position, of)
        assert len(range(first, count, every)) <= 16
        assert len(range(first, count, every)) >= min(count, 1)


@given(st.text(max_size=60), st.integers(5, 50))
def test_a_shortened_text_keeps_its_ends(text, length):
    short = shorten(text, length)
    assert len(short) <= length
    assert short == text or (short[0] == text[0] and short[-1] == text[-1])


# --------------------------------------------------------------------------------- files


def test_every_plot_becomes_pictures_and_a_table(tmp_path):
    pytest.importorskip("matplotlib")
    one = finding(plot(line("sas", sd=(0.1, 0.1, math.nan)), line("pre-ln", (3, math.nan, 2))))
    saved = save_plots(one, tmp_path / "new" / "folder")
    names = {"loss.png", "loss.svg", "loss.csv"}  # over its own axis; the table has the others
    assert "steps,minutes" in (tmp_path / "new" / "folder" / "loss.csv").read_text()
    assert "training steps" in (tmp_path / "new" / "folder" / "loss.svg").read_text()
    assert "minutes of training" not in (tmp_path / "new" / "folder" / "loss.svg").read_text()
    assert {path.name for path in saved} == names == {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    for path in saved:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        elif path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_table_is_what_was_drawn():
    one = plot(line('a, "b"', (3.25, None, math.nan), sd=(0.5, 1.0, math.inf), group="g"), line("c", (1.0,)))
    rows = list(csv.DictReader(io.StringIO(to_csv(one))))
    assert list(rows[0]) == ["series", "group", "steps", "minutes", "y", "sd"]
    assert [row["series"] for row in rows] == ['a, "b"'] * 3 + ["c"]
    assert rows[0] == {"series": 'a, "b"', "group": "g", "steps": "100", "minutes": "0.5", "y": "3.25", "sd": "0.5"}
    assert [row["y"] for row in rows[1:3]] == ["", ""]
    assert (rows[2]["sd"], rows[3]["sd"], rows[3]["group"]) == ("", "", "")


@pytest.mark.parametrize("kind", ["line", "marks", "bars"])
def test_anything_can_be_drawn(tmp_path, kind):
    pytest.importorskip("matplotlib")
    words = Series(NASTY, {"steps": ("a", "$b", None)}, (1.0, math.nan, 2.0), (0.1, math.nan, 0.2))
    for number, series in enumerate([(), (line(NASTY),), (words, line("c", (1.0,))), (line("", ()),)]):
        one = plot(*series, kind=kind, title=NASTY, y_label=NASTY)
        for axis in ("steps", "minutes"):
            path = draw(one, tmp_path / f"{number}.svg", [axis])
            ElementTree.parse(path)


def test_the_same_plot_is_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    one = plot(line("sas", sd=(0.1,) * 3), line("pre-ln"))
    for ending in ("png", "svg", "pdf"):
        first, second = (draw(one, tmp_path / f"{n}.{ending}", ["steps", "minutes"]).read_bytes() for n in "ab")
        assert first == second
    assert list(tmp_path.glob(".tmp*")) == []


FALL = tuple(3 + 6 * math.exp(-n / 2) - 0.01 * n for n in range(40))
SHOWN = {
    "a steep beginning": plot(line("sas", FALL, sd=(0.05,) * 40), line("pre-ln", FALL[:30])),
    "over time first": plot(line("sas", FALL), axes={"minutes": "minutes of training", "steps": "training steps"}),
    "a sweep": plot(line("sas", FALL), kind="marks", log_x=True),
    "logarithms": plot(line("sas", FALL), log_x=True, log_y=True),
    "bars": plot(Series("a", {"steps": ("x", "y"), "minutes": (1, 2)}, (5.0, -9.0), (0.5, 2.0)), kind="bars"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_the_part_that_the_page_shows_at_first(tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    panels, draw_panel, one = [], draw_module._draw_panel, SHOWN[name]

    def remember(panel, *rest):
        panels.append(panel)
        draw_panel(panel, *rest)

    monkeypatch.setattr(draw_module, "_draw_panel", remember)
    data = plot_data(one, styles([one])[0], 0)
    first, second = one.axes
    draw(one, tmp_path / "both.png", [first, second])
    draw(one, tmp_path / "one.svg", [second])
    assert len(panels) == 3
    for panel, axis in zip(panels, (0, 1, 1), strict=True):
        assert panel.get_ylim() == pytest.approx(data["y"])
        names = data["axes"][axis]["categories"]
        assert panel.get_xlim() == pytest.approx((-0.5, len(names) - 0.5) if names else data["axes"][axis]["limits"])
    if name in ("a steep beginning", "over time first"):
        assert panels[0].get_ylim()[1] < 5 < data["whole"][1]


# -------------------------------------------------------------------------- plots of runs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / f"{block}-{seed}", block, seed, reached=400, model__n_layer=3)
        for block in ("pre-ln", "sas")
        for seed in (0, 1, 2)
    ]


def test_runs_that_differ_in_their_seed_are_one(made, tmp_path):
    other = make_run(tmp_path / "other", "sas", 5, train__lr=0.1)
    first, second, third = pool_seeds([*made, other])
    assert (first.name, first.group, first.runs) == ("pre-ln, 3 seeds", "pre-ln", tuple(made[:3]))
    assert (second.name, second.group) == ("sas-0, 3 seeds", "sas")  # its block alone would name the third as well
    assert (third.name, third.group, third.runs) == ("other", "sas", (other,))
    assert [pool.group for pool in pool_seeds(made[:1])] == [None]
    copy = make_run(tmp_path / "copy", "pre-ln", 1, model__n_layer=3)
    assert [len(pool.runs) for pool in pool_seeds([*made[:3], copy])] == [3, 1]  # the same seed says nothing new


def test_a_curve_is_the_mean_over_seeds(made, tmp_path):
    short = make_run(tmp_path / "short", "pre-ln", 3, reached=200, model__n_layer=3)
    found = curve([*made[:3], short], "valid_loss")
    assert found.x["steps"] == (100, 200)  # those that all have reached, but for the one before training
    values = [next(r for r in run.metrics() if r["step"] == 200 and "valid_loss" in r) for run in (*made[:3], short)]
    assert found.y[1] == pytest.approx(statistics.fmean(value["valid_loss"] for value in values))
    assert found.sd[1] == pytest.approx(statistics.stdev(value["valid_loss"] for value in values))
    assert found.x["minutes"][1] == pytest.approx(statistics.fmean(value["seconds"] for value in values) / 60)
    assert curve(made[:1], "valid_loss").sd is None
    assert curve([make_run(tmp_path / "none", reached=0)], "valid_loss").y == ()


def test_plots_of_runs(made, tmp_path):
    found = {one.key: one for one in run_plots([*made, make_run(tmp_path / "none", "parallel", reached=0)])}
    assert list(found)[:4] == ["loss", "train-loss", "parameters", "speed"]
    assert [series.name for series in found["loss"].series] == ["pre-ln, 3 seeds", "sas, 3 seeds"]
    assert [series.name for series in found["parameters"].series] == ["pre-ln, 3 seeds", "sas, 3 seeds", "none"]
    assert list(found["loss"].axes) == ["steps", "tokens", "minutes"]
    alpha = found["gains-2-attention.mixing.alpha"]
    assert alpha.y_label == "α"
    assert [series.name for series in alpha.series] == ["layer 1", "layer 2", "layer 3"]
    record = next(record for record in made[3].metrics() if "gains" in record)
    heads = record["gains"]["blocks.1.attention.mixing.alpha"]
    assert alpha.series[1].y[0] == pytest.approx(statistics.fmean(heads))
    assert alpha.series[1].sd[0] == pytest.approx(statistics.pstdev(heads))
    assert found["gains-2-beta_ff"].series[0].sd is None
    assert len({one.key for one in found.values()}) == len(found)


def test_losses_in_one_picture(made, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(run_plots_module, "draw", lambda *given: seen.append(given) or draw(*given))
    draw_losses(made, tmp_path / "losses.svg")
    ((plotted, _, axes),) = seen
    assert (plotted, axes) == (run_plots(made)[0], ["steps", "minutes"])  # what the page shows, so cut like it
    text = (tmp_path / "losses.svg").read_text()
    assert "training steps" in text
    assert "minutes of training" in text
    empty = make_run(tmp_path / "empty", reached=0)
    with pytest.raises(UserError, match="'empty' has no held-out loss yet"):
        draw_losses([*made, empty], tmp_path / "losses.svg")


def test_a_series_may_lack_an_axis(tmp_path):
    pytest.importorskip("matplotlib")
    one = plot(line("a"), replace(line("b"), x={"steps": (1, 2, 3)}))
    assert "b,,1,,3.0," in to_csv(one)
    draw(one, tmp_path / "b.png", ["minutes"])
    assert isinstance(one, Plot)
