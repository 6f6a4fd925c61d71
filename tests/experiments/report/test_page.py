"""The page, in a real browser: from the file system, with no network, and silent on its console."""

import itertools
import json
import math
import re
import statistics
from dataclasses import replace

import pytest

from skipless.cli import run as skipless
from skipless.errors import UserError
from skipless.experiments import catalogue, experiment
from skipless.experiments.outcome import BETTER, FAILS, HOLDS, OPEN, OUTCOMES, Plot, Series
from skipless.experiments.report.axes import y_limits
from skipless.experiments.report.draw import save_plots
from skipless.experiments.report.page import files_folder, side_by_side, write_page, write_summary
from skipless.experiments.report.page_plots import MAX_POINTS, plot_data
from skipless.experiments.report.sections import compare
from skipless.experiments.report.styles import styles
from skipless.experiments.report.verdicts import Row, answer, draw_interval, tally
from skipless.recipes.laptop import laptop
from skipless.terminal.experiments import show_findings
from skipless.training.train import train
from tests.helpers.browser import settle
from tests.helpers.made_up_runs import ALL_KINDS, MATCH, finding, judged, line, make_run, missing, plot
from tests.helpers.tiny_runs import tiny, write_text

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"&{{ 7 * 7 }}</script>"


@pytest.fixture
def visit(browser):
    """Opens a page with no network; at the end, nothing may have been said on the console or asked of the network."""
    contexts, said = [], []

    def visit(path, width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        context.set_default_timeout(300_000)
        contexts.append(context)
        page = context.new_page()
        page.said = said
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
        page.goto(path.absolute().as_uri())
        settle(page)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


def frame(page):
    """Where the first plot is, once it is in sight."""
    page.locator(CANVAS).nth(0).scroll_into_view_if_needed()
    return page.locator(CANVAS).nth(0).bounding_box()


def show(tmp_path, *plots, **changes):
    return write_page([finding(*plots, **changes)], [], tmp_path / "page.html")


def texts(locator):
    return [" ".join(text.split()) for text in locator.all_text_contents()]


def numbers(path_data):
    """The coordinates of a path of absolute points."""
    pairs = re.findall(r"(-?[\d.]+),(-?[\d.]+)", path_data)
    return [(float(x), float(y)) for x, y in pairs]


CANVAS = ".canvas svg[role=img]"
CURVES = f"{CANVAS} .series .curve"


# -------------------------------------------------------------------------------- whole


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three blocks with three seeds."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / f"{block}-seed{seed}", block, seed, sample=f"def {block}:\n    pass")
        for block in ("pre-ln", "sas", "sas-p")
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """A page with everything on it."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    folder = path.parent / "more"
    others = [
        make_run(folder / "still-running", "sas", 8, reached=500),
        make_run(folder / "begun", "pre-ln", 9, reached=0),
    ]
    side = side_by_side(made)
    first = finding(*side.plots[:4], runs=made, note="A sentence of analysis.", answer="The small block matches.")
    save_plots(finding(*side.plots[2:4]), files_folder(path, first))
    second = finding(plot(line("x")), id="fig2", title="Another", verdicts=ALL_KINDS, warnings=("Two kinds of data.",))
    return write_page([first, second], [*made, *others], path)


def test_the_summary_says_it_in_markdown(made, tmp_path):
    page, side = tmp_path / "report.html", side_by_side(made)
    first = finding(*side.plots[:2], runs=made, note="A sentence of analysis.", command="skipless reproduce fig5")
    save_plots(first, files_folder(page, first))
    text = write_summary([first], page).read_text()
    assert (tmp_path / "report.md").exists()
    assert "- 3 claims of the paper: 1 holds, 1 does not hold, 1 not decidable\n" in text
    rows = [line for line in text.splitlines() if line.startswith(("| ✓", "| ✕", "| ≈"))]
    assert [row.count(" | ") for row in rows] == [6, 6, 6]
    assert "5.1% ± 0.4%" in rows[1]
    for part in ("A sentence of analysis.", "skipless reproduce fig5", "seeds: 0, 1, 2", "[The page](report.html)"):
        assert part in text
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 2
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)
    assert "| last values |" in text


def test_the_summary_goes_from_the_answer_to_the_evidence(tmp_path):
    page = tmp_path / "report.html"
    first = finding(
        plot(line("sas")), plot(line("sas"), key="other"), verdicts=ALL_KINDS, answer="It is | so.", note="A note."
    )
    own = finding(id="baseline", own=True, verdicts=(judged(0.1, 0.2, above=0.0),), warnings=("Two kinds of data.",))
    save_plots(first, files_folder(page, first))
    text = write_summary([first, own], page).read_text()
    order = [
        "9 claims of the paper: 3 hold, 1 differs (better), 1 does not hold, 4 not decidable",
        "2 checks of our own: 1 holds, 1 not decidable",
        "| experiment | what came out | verdicts |",
        "| fig5 | It is \\| so. | 9 claims of the paper: ",
        "## fig5: ",
        "**It is | so.**",
        "![Loss](fig5/loss.png)",
        "| verdict | claim | measured | holds | least effect | seeds | the paper |",
        "| ✓ holds | sas matches pre-ln | +0.3% [+0.0%, +0.6%] | between −2.0% and +2.0% | 0.5% | 3 | “they match” |",
        "| ↑ differs (better) |",
        "| ✕ does not hold | sas is faster than pre-ln | +5.1% [+4.4%, +5.8%] | below 0.0% |",
        "| ✓ holds, close to its bound |",
        "+1.2% [−0.8%, +3.2%] assumed | between −2.0% and +2.0% | – | 1 |",
        "+3.0 points [+2.1, +3.8] points | above +1.0 points | 1.2 points | 3 rounds |",
        "| ≈ not decidable | sas-p matches sas | no finished run | below +2.0% | – | – |",
        "; but with this spread a difference of 2.0% would often not have been seen | between",
        "| our own check (a check of the recipe) |",
        "**The paper:** They match.",
        "A note.",
        "![Loss](fig5/other.png)",
        "skipless reproduce fig5",
        "## baseline: ",
        "> **Warning:** Two kinds of data.",
    ]
    places = [text.find(part) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_the_same_findings_are_the_same_files(made, tmp_path):
    first = finding(*side_by_side(made).plots, runs=made, verdicts=ALL_KINDS)
    pages = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        page = write_page([first], made[:2], folder / "report.html")
        pages.append((page.read_bytes(), write_summary([first], page).read_bytes()))
    assert pages[0] == pages[1]


def test_bars_that_stand_side_by_side_are_a_table_of_their_own(tmp_path):
    page = tmp_path / "report.html"
    one = Series("one", {"task": ("A", "B")}, (49.44, 8.5), (1.234, math.nan))
    two = Series("two", {"task": ("B",)}, (0.123,))
    tasks = Plot("tasks", "Tasks", "score (points)", {"task": ""}, (one, two), kind="bars")
    lines = write_summary([finding(tasks)], page).read_text().splitlines()
    start = lines.index("| score (points) | A | B |")
    assert lines[start + 2 : start + 4] == ["| one | 49.4 ± 1.2 | 8.5 |", "| two | – | 0.1 |"]


def test_the_page_says_what_was_found(whole, visit):
    page = visit(whole)
    head = texts(page.locator("header .tally li"))
    assert head == [
        "12 claims of the paper: ✓4 hold ↑1 differs (better) ✕2 do not hold ≈5 not decidable",
        "1 check of our own: ✓1 holds",
    ]
    section = page.locator("#fig5-laptop")
    rows = section.locator("table.claims tbody tr")
    assert rows.count() == 3
    assert texts(rows.nth(1).locator("td"))[0] == "✕does not hold"
    assert "5.1% ± 0.4%" in rows.nth(1).inner_text()
    for expected in (
        "They match.",
        "A sentence of analysis.",
        "skipless reproduce fig5 --seeds 3",
        "torch 2.13.0",
        "0, 1, 2",
    ):
        assert expected in section.inner_text(), expected
    assert section.locator("table.runs").nth(0).locator("tbody tr").count() == 3
    assert section.locator("details.singles table.runs tbody tr").count() == 9
    section.locator("details.texts summary").click()
    assert "def sas-p:\n    pass" in section.locator("pre").all_inner_texts()
    section.locator("details.differences summary").click()
    row = section.locator("details.differences tr", has_text="model.block.layout")
    assert texts(row.locator("td")) == ["sequential", "sequential", "parallel"]
    blocks = section.locator("details.differences tbody tr").nth(0)
    assert texts(blocks.locator("th, td")) == ["block", "pre-ln", "sas", "sas-p"]
    unfinished = page.locator("#side-by-side table.runs tbody tr")  # those of the findings are not shown again
    assert unfinished.count() == 2
    assert "unfinished" in unfinished.nth(0).inner_text()
    assert whole.stat().st_size < 500_000


def test_the_overview_keeps_our_own_checks_apart(whole, visit):
    page = visit(whole)
    table = page.locator("table.overview")
    assert texts(table.locator("thead th")) == [
        "experiment",
        "what came out",
        "claims of the paper",
        "checks of our own",
    ]
    rows = [texts(row.locator("th, td")) for row in table.locator("tbody tr").all()]
    assert rows[0] == ["fig5", "The small block matches.", "✓1 holds ✕1 does not hold ≈1 not decidable", "–"]
    assert rows[1][0] == "fig2"
    assert rows[1][1].startswith(
        "3 of 9 claims hold; one differs in favour of the simpler block, one does not hold and"
    )
    assert rows[1][2:] == ["✓3 hold ↑1 differs (better) ✕1 does not hold ≈4 not decidable", "✓1 holds"]
    assert rows[2] == ["Runs side by side", "seeds 8, 9 · 2 runs", "–", "–"]
    table.get_by_role("link", name="fig2").click()
    assert page.url.endswith("#fig2-laptop")


KINDS_IN_ORDER = """section => {
  const kinds = ["h2", ".warning", ".answer", "figure.plot", "table.claims", "p.paper", "table.runs", ".command"];
  return [...section.querySelectorAll(kinds.join())].map((one) => kinds.find((kind) => one.matches(kind)));
}"""


def test_a_section_leads_with_its_answer(whole, visit):
    page = visit(whole)
    first, second = page.locator("#fig5-laptop"), page.locator("#fig2-laptop")
    rest = ["table.claims", "p.paper", *["figure.plot"] * 3, *["table.runs"] * 2, ".command"]
    assert first.evaluate(KINDS_IN_ORDER) == ["h2", ".answer", "figure.plot", *rest]
    rest = ["table.claims", "p.paper", ".command"]
    assert second.evaluate(KINDS_IN_ORDER) == ["h2", ".warning", ".answer", "figure.plot", *rest]
    assert first.locator(".answer").inner_text() == "The small block matches."
    assert second.locator(".answer").inner_text() == answer(finding(verdicts=ALL_KINDS))  # made of the counts
    assert "Two kinds of data." in second.locator(".warning").inner_text()
    size = "one => Number.parseFloat(getComputedStyle(one).fontSize)"
    assert first.locator(".answer").evaluate(size) > 1.15 * page.locator("body").evaluate(size)
    beside, below = (first.locator(what).bounding_box() for what in (".lead figure", "table.claims"))
    assert first.locator(".answer").bounding_box()["x"] < beside["x"]
    assert beside["y"] + beside["height"] < below["y"]
    narrow = visit(whole, width=700).locator("#fig5-laptop")
    assert narrow.locator(".answer").bounding_box()["y"] < narrow.locator(".lead figure").bounding_box()["y"]


def test_every_plot_of_the_page_is_drawn(whole, visit):
    page = visit(whole)
    for one in page.locator("details.more").all():
        one.locator("> summary").click()
    settle(page)
    assert page.locator("figure.plot").count() == page.locator(CANVAS).count() > 8
    for figure in page.locator("figure.plot").all():
        assert figure.locator(".series :is(.curve, .bar, .mark)").count() > 0


OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


@pytest.mark.parametrize("width", [320, 390, 900])
def test_nothing_sticks_out_of_a_narrow_page(whole, visit, width):
    page = visit(whole, width=width)
    page.evaluate(OPEN_ALL)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width


SCROLLING = """[...document.querySelectorAll("*")]
  .filter((one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX) && !one.closest(".files"))
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize("width", [pytest.param(320, marks=pytest.mark.slow), 400, 640])
def test_tables_are_cards_on_a_phone(whole, visit, width):
    page = visit(whole, width=width)
    page.evaluate(OPEN_ALL)
    settle(page)
    sideways = page.evaluate(SCROLLING)
    assert sideways == []
    for name in ("claims", "runs", "overview"):
        rows = page.locator(
            f"#fig2-laptop table.{name} tbody tr, #fig5-laptop table.{name} tbody tr, table.overview tr"
        )
        assert page.locator(f"table.{name} thead").nth(0).is_visible() is False
        for row in rows.filter(visible=True).all()[:4]:
            card = row.bounding_box()
            assert card["x"] >= 0
            assert card["x"] + card["width"] <= width
            for cell in row.locator("th, td").filter(visible=True).all():
                box = cell.bounding_box()
                assert box["x"] >= card["x"]
                assert box["x"] + box["width"] <= card["x"] + card["width"]
    run = page.locator("#fig5-laptop table.runs tbody tr").nth(0)
    label = "one => getComputedStyle(one, '::before').content"
    labels = [cell.evaluate(label).strip('"') for cell in run.locator("td").all()]
    assert labels[0] == "block"
    assert {"held-out loss, nats/token", "speed, tokens/s", "parameters"} <= set(labels)
    heights = [cell.bounding_box()["y"] for cell in run.locator("th, td").all()]
    assert heights == sorted(set(heights))  # one below the other
    claim = page.locator("#fig2-laptop table.claims tbody tr").nth(0)
    assert [claim.locator("td").nth(n).evaluate(label).strip('"') for n in (1, 3, 4)] == [
        "measured",
        "least detectable effect",
        "seeds",
    ]
    assert claim.locator("svg.interval").bounding_box()["width"] > 0.7 * claim.bounding_box()["width"]


STILL_FOLDED = """[...document.querySelectorAll("details > :not(summary)")]
  .filter((one) => !one.closest(".files"))
  .filter((one) => !one.checkVisibility({ contentVisibilityAuto: true }) || !one.getBoundingClientRect().height)
  .map((one) => one.outerHTML.slice(0, 90))"""


def test_on_paper_all_is_open_light_and_without_buttons(whole, visit):
    page = visit(whole, color_scheme="dark")
    page.locator("#theme").click()
    page.locator("#theme").click()  # dark by choice as well
    dark = page.evaluate("getComputedStyle(document.body).color")
    page.emulate_media(media="print")
    settle(page)
    assert page.evaluate("getComputedStyle(document.body).color") != dark
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    left_out = page.evaluate(STILL_FOLDED)
    assert left_out == []
    for name in ("#theme", ".choice", ".zoom button", ".files"):
        assert page.locator(name).filter(visible=True).count() == 0
    assert page.locator("section .curve, section .bar").filter(visible=True).count() > 8
    breaks = "one => getComputedStyle(one).breakInside"
    assert page.locator("figure.plot").nth(0).evaluate(breaks) == "avoid"
    assert page.locator("table.claims tbody tr").nth(0).evaluate(breaks) == "avoid"


def test_what_is_folded_is_opened_for_the_printer_and_closed_again(whole, visit):
    page = visit(whole)
    folded = page.locator("details:not([open])").count()
    hidden = page.locator("#side-by-side details.more figure.plot")
    assert folded > 10
    assert hidden.locator("svg[role=img]").count() == 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert hidden.locator("svg[role=img]").count() == hidden.count() > 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == folded
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_links_lead_to_files(whole, visit):
    pytest.importorskip("matplotlib")
    page = visit(whole)
    links = [link.get_attribute("href") for link in page.locator(".files a").all()]
    assert sorted(links) == [
        f"fig5/{key}.{ending}" for key in ("parameters", "speed") for ending in ("csv", "png", "svg")
    ]
    assert all((whole.parent / link).stat().st_size for link in links)
    assert page.locator("#fig2-laptop .files a").count() == 0


# --------------------------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([HOLDS], "The claim holds."),
        ([OPEN], "The claim is not decidable."),
        ([HOLDS, HOLDS], "Both claims hold."),
        ([HOLDS, HOLDS, OPEN, HOLDS], "3 of 4 claims hold; one is not decidable."),
        ([OPEN, FAILS, HOLDS, FAILS], "1 of 4 claims holds; two do not hold and one is not decidable."),
        (
            [BETTER, OPEN, FAILS, HOLDS],
            "1 of 4 claims holds; one differs in favour of the simpler block, one does not hold and one is not "
            "decidable.",
        ),
        ([FAILS, FAILS, FAILS], "None of the three claims holds."),
        ([OPEN, OPEN], "Neither of the two claims is decidable."),
        ([BETTER] * 3, "All 3 claims differ in favour of the simpler block."),
        ([FAILS, OPEN, OPEN], "1 of 3 claims does not hold; two are not decidable."),
        ([], ""),
    ],
)
def test_counts_as_a_sentence(outcomes, expected):
    verdicts = tuple(replace(missing(), outcome=outcome) for outcome in outcomes)
    assert answer(finding(verdicts=verdicts)) == expected
    own = answer(finding(verdicts=verdicts, own=True))
    assert own == expected.replace("The claim ", "Our own check ").replace("claims", "checks of our own")
    assert answer(finding(verdicts=verdicts, answer="So it is.")) == "So it is."


def test_claims_and_checks_of_our_own_are_never_added_up():
    mixed = finding(verdicts=(missing(), replace(missing(), own=True), replace(missing(), outcome=HOLDS)))
    paper, own = tally([mixed, finding(verdicts=(missing(),), own=True)])
    assert paper.line == "2 claims of the paper: 1 holds, 1 not decidable"
    assert own.line == "2 checks of our own: 2 not decidable"
    assert answer(mixed) == "1 of 2 claims holds; one is not decidable. Our own check is not decidable."
    assert tally([finding(verdicts=())]) == []


def test_the_numbers_of_a_claim_are_written_as_it_says():
    row = Row(judged(-0.021, -0.019, -0.020, above=-0.05, below=0.0), False)
    assert (row.measured, row.interval, row.bound) == ("−2.0%", "[−2.2%, −1.8%]", "between −5.0% and 0.0%")
    assert (row.least, row.seeds, row.assumed) == ("0.2%", "3", False)
    assert row.words == "−2.0%, 90% interval −2.2% to −1.8%; holds between −5.0% and 0.0%; holds"
    assert row.shown == {"sas": 2.903, "pre-ln": 2.914}
    points = Row(judged(2.5, 3.5, above=-1.0, form="+.1f", unit=" points", seed="round"), False)
    assert (points.measured, points.bound, points.seeds) == ("+3.0 points", "above −1.0 points", "2 rounds")
    one = Row(judged(0.01, **MATCH), False)
    assert (one.assumed, one.least, one.interval) == (True, "", "[−1.0%, +3.0%]")
    nothing = Row(missing(below=0.02), False)
    assert (nothing.measured, nothing.interval, nothing.least, nothing.seeds) == ("", "", "", "")
    assert (nothing.bound, nothing.drawing) == ("below +2.0%", None)
    unbound = replace(judged(0.1, 0.2, below=1.0), numbers={"mean": 0.15, "low": 0.1, "high": math.nan})
    assert Row(unbound, False).drawing is None
    assert Row(replace(unbound, numbers={"mean": 1, "low": 1, "high": 1}), False).drawing.allowed is None


@pytest.mark.parametrize(("low", "mean", "high"), [(0.0, 0.0, 0.0), (-3.0, 5.0, 6.0), (1e-9, 2e-9, 3e-9), (7, 7, 7)])
@pytest.mark.parametrize("bounds", [{}, {"above": 0.0}, {"below": -2.0}, {"above": -1.0, "below": 1.0}])
def test_a_drawing_has_room_for_what_it_shows(low, mean, high, bounds):
    numbers = {"mean": float(mean), "low": float(low), "high": float(high), **bounds}
    drawn = draw_interval(replace(missing(), numbers=numbers))
    places = [drawn.low, drawn.mean, drawn.high, *drawn.bounds]
    assert all(0 < place < drawn.width for place in places)
    assert drawn.low <= drawn.mean <= drawn.high
    assert len(drawn.bounds) == len(bounds)
    assert (drawn.allowed is None) == (not bounds)


DRAWN = """row => {
  const of = (name, ...keys) => [...row.querySelectorAll(name)].map((one) => keys.map((key) => one.getAttribute(key)));
  return {
    allowed: of(".allowed", "x", "width").flat().map(Number),
    bounds: of(".bound", "x1").flat().map(Number),
    zero: of(".zero", "x1").flat().map(Number),
    reach: of(".reach", "d").flat()[0]?.match(/[\\d.]+/g).map(Number),
    dot: of(".dot", "cx").flat().map(Number),
    near: of(".near", "cx").flat().map(Number),
    width: row.querySelector("svg.interval")?.viewBox.baseVal.width,
  };
}"""


def test_the_interval_is_drawn_where_its_numbers_say(whole, visit):
    rows = visit(whole).locator("#fig2-laptop table.claims tbody tr")
    assert rows.count() == len(ALL_KINDS)
    for row, verdict in zip(rows.all(), ALL_KINDS, strict=True):
        found, n = row.evaluate(DRAWN), verdict.numbers
        if "mean" not in n:
            assert row.locator("svg").count() == 0
            assert verdict.reason in row.inner_text()
            assert row.locator("details").count() == 0
            continue
        (left, y, right), (dot,) = found["reach"], found["dot"]
        assert y > 0
        share = (dot - left) / (right - left)
        assert share == pytest.approx((n["mean"] - n["low"]) / (n["high"] - n["low"]), abs=0.01)
        scale = (right - left) / (n["high"] - n["low"])

        def at(value, left=left, scale=scale, low=n["low"]):
            return left + (value - low) * scale

        bounds = [n[name] for name in ("above", "below") if name in n]
        assert found["bounds"] == pytest.approx([at(bound) for bound in bounds], abs=0.5)
        start, width = found["allowed"]
        assert start == pytest.approx(at(n["above"]) if "above" in n else 0, abs=0.5)
        assert start + width == pytest.approx(at(n["below"]) if "below" in n else found["width"], abs=0.5)
        if found["zero"]:
            assert found["zero"] == pytest.approx([at(0)], abs=0.5)
        else:
            assert not 0 < at(0) < found["width"]
        inside = start <= left and right <= start + width
        assert inside == (verdict.outcome == HOLDS or bool(verdict.why))
        outside = right < start or left > start + width
        assert outside == (verdict.outcome in (BETTER, FAILS))
        assert bool(found["near"]) == verdict.close


def test_a_claim_is_a_row(whole, visit):
    page = visit(whole)
    rows = page.locator("#fig2-laptop table.claims tbody tr")
    colours = {}
    for row, verdict in zip(rows.all(), ALL_KINDS, strict=True):
        text = row.inner_text()
        shown = Row(verdict, verdict.own)
        for part in (verdict.outcome, verdict.claim, verdict.paper, shown.measured, shown.interval, shown.bound):
            assert part in text
        assert shown.least in text
        assert ("our own check" in text) == verdict.own
        assert ("close to its bound" in text) == verdict.close
        assert verdict.why in text  # what the drawing does not show is not folded away
        assert row.locator("th[scope=row]").get_attribute("abbr") == verdict.claim
        if shown.drawing:
            image = row.get_by_role("img")
            assert image.get_attribute("aria-label") == shown.words
            assert verdict.reason not in text  # folded away, and a key opens it
            row.locator("summary").focus()
            page.keyboard.press("Enter")
            assert verdict.reason in row.inner_text()
            dot = row.locator(".dot").evaluate("one => getComputedStyle(one).fill")
            assert dot == row.locator(".verdict").evaluate("one => getComputedStyle(one).color")
            colours.setdefault(verdict.outcome, set()).add(dot)
    assert all(len(of) == 1 for of in colours.values())
    assert len(set().union(*colours.values())) == len(colours) == len(OUTCOMES)
    assert rows.nth(5).locator(".reach").evaluate("one => getComputedStyle(one).strokeDasharray") != "none"  # one seed
    assert rows.nth(0).locator(".reach").evaluate("one => getComputedStyle(one).strokeDasharray") == "none"


# --------------------------------------------------------------------------------- plots


def test_lines_lie_where_their_numbers_say(tmp_path, visit):
    y = (4.0, 2.0, 3.0)
    page = visit(show(tmp_path, plot(line("one", y, sd=(0.5, 0.5, 0.5)), line("two", (2.0, 2.0, 2.0)))))
    box = frame(page)
    points = numbers(page.locator(CURVES).nth(0).get_attribute("d"))
    assert len(points) == 3
    assert all(0 <= x <= box["width"] and 0 <= height <= box["height"] for x, height in points)
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y1 - y0) / (y2 - y0) == pytest.approx((y[1] - y[0]) / (y[2] - y[0]), rel=0.01)  # higher is further up
    assert y1 > y2 > y0
    assert page.locator(f"{CANVAS} .band").count() == 1
    edge = numbers(page.locator(f"{CANVAS} .band").get_attribute("d"))
    assert edge[0][1] < y0 < edge[-1][1]
    colours = [page.locator(CURVES).nth(n).evaluate("one => getComputedStyle(one).stroke") for n in (0, 1)]
    assert colours[0] != colours[1]


def test_the_legend_shows_and_hides(tmp_path, visit):
    page = visit(show(tmp_path, plot(line("one"), line("two"), line("three"))))
    one, two, three = page.locator(".legend button").all()
    one.click()
    assert one.get_attribute("aria-pressed") == "false"
    assert page.locator(CURVES).count() == 2
    one.press("Space")
    assert (one.get_attribute("aria-pressed"), page.locator(CURVES).count()) == ("true", 3)
    two.dblclick()
    assert [b.get_attribute("aria-pressed") for b in (one, two, three)] == ["false", "true", "false"]
    assert page.locator(f"{CANVAS} [data-series='1'] .curve").count() == page.locator(CURVES).count() == 1
    two.dblclick()
    assert page.locator(CURVES).count() == 3


def test_another_axis_can_be_chosen(tmp_path, visit):
    slow = line("slow", x={"steps": (100, 200, 300), "minutes": (2, 4, 6)})
    page = visit(show(tmp_path, plot(slow, line("fast"))))
    ticks = page.locator(f"{CANVAS} .x-tick")
    steps, before = texts(ticks), [one.get_attribute("d") for one in page.locator(CURVES).all()]
    assert page.locator(".x-label").text_content() == "training steps"
    assert "300" in steps
    page.get_by_role("radio", name="minutes").check()
    assert page.locator(".x-label").text_content() == "minutes of training"
    assert texts(ticks) != steps
    after = [one.get_attribute("d") for one in page.locator(CURVES).all()]
    assert numbers(after[1])[-1][0] < numbers(before[1])[-1][0]  # it ends after a quarter of the time
    page.get_by_role("radio", name="minutes").press("ArrowLeft")
    assert texts(ticks) == steps
    assert [one.get_attribute("d") for one in page.locator(CURVES).all()] == before


def test_pointing_shows_the_values(tmp_path, visit):
    page = visit(show(tmp_path, plot(line("one", (4.0, 2.0, 3.25), sd=(0.1, 0.1, 0.2)), line("two", (1.0, 1.0, 1.0)))))
    box = frame(page)
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
    assert texts(page.locator(".tip div")) == ["one3.25 ± 0.2", "two1"]
    assert page.locator(".tip strong").inner_text() == "300 training steps"
    tip = page.locator(".tip").bounding_box()
    assert box["x"] <= tip["x"]
    assert tip["x"] + tip["width"] <= box["x"] + box["width"] + 1
    page.mouse.move(0, 0)
    assert not page.locator(".tip").is_visible()
    page.locator(CANVAS).focus()
    for expected in ("100", "200", "300", "300"):
        page.keyboard.press("ArrowRight")
        assert page.locator(".tip strong").inner_text() == f"{expected} training steps"
    page.keyboard.press("ArrowLeft")
    assert page.locator(".tip strong").inner_text() == "200 training steps"


def test_dragging_zooms_and_can_be_undone(tmp_path, visit):
    page = visit(show(tmp_path, plot(line("one", [3 - 0.1 * n for n in range(20)]))))
    ticks = page.locator(f"{CANVAS} .x-tick")
    before = texts(ticks)
    box = frame(page)
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 180, steps=4)
    assert page.locator(".drag").count() == 1
    page.mouse.up()
    assert texts(ticks) != before
    page.get_by_role("button", name="reset zoom").click()
    assert texts(ticks) == before


def test_a_cut_beginning_can_be_seen(tmp_path, visit):
    page = visit(show(tmp_path, plot(line("one", [9.0, *(3 - 0.01 * n for n in range(20))]))))
    ticks = page.locator(f"{CANVAS} .y-tick")
    assert max(map(float, texts(ticks))) < 4
    page.get_by_role("button", name="whole range").click()
    assert max(map(float, texts(ticks))) >= 8
    page.get_by_role("button", name="cut the start").click()
    assert max(map(float, texts(ticks))) < 4


SHOWN_VALUES = """() => {
  const number = (node, name) => Number(node.getAttribute(name));
  const tick = (node) => [number(node, "y") - 4, Number(node.textContent)];
  const ticks = [...document.querySelectorAll(".y-tick")].map(tick);
  const [[y0, v0], [y1, v1]] = [ticks[0], ticks.at(-1)];
  const area = document.querySelector(".canvas clipPath rect");
  const at = (y) => v0 + ((y - y0) / (y1 - y0)) * (v1 - v0);
  return [at(number(area, "y") + number(area, "height") - 5), at(number(area, "y") + 5)];
}"""


def test_the_page_shows_at_first_what_the_pictures_show(tmp_path, visit):
    fall = plot(line("sas", [9.0, 5.0, *(3 - 0.01 * n for n in range(20))]), line("pre-ln", [8.0, *[2.9] * 20]))
    page = visit(show(tmp_path, fall))
    low, high = y_limits(fall)  # what `draw` gives to matplotlib, over any axis
    assert high < 5
    for axis in ("steps", "minutes"):
        page.get_by_role("radio", name=axis).check()
        assert page.evaluate(SHOWN_VALUES) == pytest.approx([low, high], abs=0.01)


def test_bars(tmp_path, visit):
    both = [Series(name, {"task": ("A", "B")}, (10.0, 20.0), (1.0, 2.0)) for name in ("one", "two")]
    alone = [Series(name, {"run": (name,)}, (value,)) for name, value in (("pre-ln", 3.0), ("a " * 40, -1.0))]
    grouped = Plot("tasks", "Tasks", "score", {"task": "task"}, tuple(both), kind="bars")
    named = Plot("size", "Sizes", "size", {"run": ""}, tuple(alone), kind="bars")
    page = visit(show(tmp_path, grouped, named))
    first, second = page.locator("figure.plot").all()
    places = [one.bounding_box() for one in first.locator(f"{CANVAS} .bar").all()]
    assert len(places) == 4
    assert [round(place["height"] / places[0]["height"]) for place in places] == [1, 2, 1, 2]
    lefts = sorted((place["x"], place["x"] + place["width"]) for place in places)
    assert all(right <= left for (_, right), (left, _) in itertools.pairwise(lefts))
    assert first.locator(f"{CANVAS} .whisker").count() == 4
    assert texts(first.locator(".x-tick")) == ["A", "B"]
    assert second.locator(".legend").count() == 0  # the names stand below the bars
    up, down = (one.bounding_box() for one in second.locator(f"{CANVAS} .bar").all())
    assert up["y"] + up["height"] == pytest.approx(down["y"], abs=1)
    assert "…" in texts(second.locator(".x-tick"))[1]
    second.locator(CANVAS).focus()
    page.keyboard.press("ArrowLeft")
    assert ("a " * 40).strip() in " ".join(second.locator(".tip strong").inner_text().split())


KINDS = ("line", "marks", "bars")


@pytest.mark.parametrize("count", [0, 1, 12, 40])
def test_any_number_of_series(tmp_path, visit, count):
    series = [line(f"layer {n}", (n, n + 1, n)) for n in range(count)]
    page = visit(show(tmp_path, *(plot(*series, kind=kind) for kind in KINDS)))
    for kind, figure in zip(KINDS, page.locator("figure.plot").all(), strict=True):
        drawn = figure.locator(f"{CANVAS} .series :is(.curve, .bar)")
        assert drawn.count() == count * (3 if kind == "bars" else 1)
        assert figure.locator(".legend button").count() == count
        assert ("nothing measured yet" in figure.locator(CANVAS).inner_html()) == (count == 0)


@pytest.mark.parametrize("log", [False, True])
def test_what_is_no_number_leaves_a_gap(tmp_path, visit, log):
    gaps = line("gaps", (3.0, None, 2.0, math.nan, 1.0, math.inf, 4.0, -1.0), sd=(0.1,) * 7 + (math.nan,))
    series = (gaps, line("nothing", (math.nan, None)), line("empty", ()))
    page = visit(show(tmp_path, *(plot(*series, kind=kind, log_x=log, log_y=log and kind != "bars") for kind in KINDS)))
    for kind, figure in zip(KINDS, page.locator("figure.plot").all(), strict=True):
        inside = figure.locator(CANVAS).inner_html()
        assert "NaN" not in inside
        assert "Infinity" not in inside
        if kind == "bars":
            assert figure.locator(".bar").count() == 5 + 3  # and three in the legend
        else:
            assert figure.locator(f"{CANVAS} .curve").get_attribute("d").count("M") == 4
            assert figure.locator(f"{CANVAS} .mark").count() >= 4  # a point between two gaps has a mark for a line
        figure.locator(CANVAS).focus()
        page.keyboard.press("ArrowRight")
        assert "gaps" in figure.locator(".tip").inner_text()


def test_logarithmic_axes(tmp_path, visit):
    rates = line("one", (10.0, 1.0, 100.0), x={"steps": (1e-4, 1e-3, 1e-2)})
    page = visit(show(tmp_path, plot(rates, axes={"steps": "learning rate"}, kind="marks", log_x=True, log_y=True)))
    (x0, y0), (x1, y1), (x2, y2) = numbers(page.locator(CURVES).get_attribute("d"))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y2 == pytest.approx(2 * (y1 - y0), rel=0.01)
    assert {"1e-4", "0.001", "0.01"} <= set(texts(page.locator(".x-tick")))
    assert page.locator("fieldset.choice").count() == 0  # there is nothing to choose


def test_a_long_line_keeps_its_ends():
    long = line("long", [math.sin(n / 50) for n in range(10_000)])
    data = plot_data(plot(long), styles([plot(long)])[0], 0)
    (series,) = data["series"]
    assert len(series["y"]) == len(data["xs"][0]) == MAX_POINTS
    assert (data["xs"][0][0], data["xs"][0][-1]) == (100, 1_000_000)
    assert series["y"][-1] == pytest.approx(long.y[-1], rel=1e-5)


# -------------------------------------------------------------------------------- tables


def column(table, number):
    return [texts(row.locator("th, td"))[number] for row in table.locator("tbody tr").all()]


def test_tables_sort_both_ways(tmp_path, visit):
    runs = [
        make_run(tmp_path / "run-10", "pre-ln", 3, reached=100),
        make_run(tmp_path / "run-9", "sas", 20, reached=2000, model__n_layer=2),
        make_run(tmp_path / "run-11", "sas", 100, reached=0),
    ]
    runs[2].metrics_file.unlink()
    page = visit(write_page([], runs, tmp_path / "page.html"))
    table = page.locator("table.runs")
    heads = {text.split("\n")[0]: head for head in table.locator("thead th").all() for text in [head.inner_text()]}
    names = list(heads)

    def sort_by(name):
        heads[name].get_by_role("button").click()
        return column(table, names.index(name))

    assert sort_by("seed") == ["3", "20", "100"]
    assert heads["seed"].get_attribute("aria-sort") == "ascending"
    assert sort_by("seed") == ["100", "20", "3"]
    assert heads["seed"].get_attribute("aria-sort") == "descending"
    assert sort_by("run") == ["run-9", "run-10", "run-11"]
    assert heads["seed"].get_attribute("aria-sort") is None
    assert sort_by("run") == ["run-11", "run-10", "run-9"]
    assert sort_by("steps") == ["0", "100", "2,000"]
    assert sort_by("steps") == ["2,000", "100", "0"]
    sort_by("steps")  # the row that has no loss comes first now
    rising, falling = sort_by("held-out loss"), sort_by("held-out loss")
    assert rising[-1] == falling[-1] == "–"  # what is not known comes last either way
    assert rising[:2] == falling[:2][::-1] == sorted(rising[:2], key=float)
    assert sort_by("state")[0] == "finished"
    claims = visit(show(tmp_path)).locator("table.claims")
    claims.get_by_role("button", name="verdict").click()
    assert [text[1:] for text in column(claims, 0)] == ["does not hold", "holds", "not decidable"]
    claims.get_by_role("button", name="verdict").press("Enter")
    assert [text[1:] for text in column(claims, 0)] == ["not decidable", "holds", "does not hold"]
    claims = visit(show(tmp_path, verdicts=ALL_KINDS[:4])).locator("table.claims")
    claims.get_by_role("button", name="measured").click()
    assert [text.split()[0] for text in column(claims, 2)] == ["−6.0%", "+0.3%", "+2.1%", "+5.1%"]


def test_runs_that_differ_in_their_seed_are_one_row(tmp_path, visit):
    runs = [make_run(tmp_path / f"sas-{seed}", "sas-gains", seed) for seed in range(4)]
    runs.append(make_run(tmp_path / "sas-9", "sas-gains", 9, reached=500))
    runs.append(make_run(tmp_path / "alone", "pre-ln", 3))
    page = visit(write_page([], runs, tmp_path / "page.html"))
    table = page.locator("table.runs").nth(0)
    heads = [" ".join(head.inner_text().split("\n")) for head in table.locator("thead th").all()]
    assert heads[:3] == ["run", "block", "seed"]
    assert {"train loss nats/token", "held-out loss nats/token", "speed tokens/s", "held-out bits per byte"} < set(
        heads
    )
    pool, alone = ([*texts(row.locator("th, td"))] for row in table.locator("tbody tr").all())
    shown = dict(zip(heads, pool, strict=True))
    assert (shown["run"], shown["block"], shown["seed"]) == ("sas-0, 5 seeds", "sas-gains", "0, 1, 2, 3, 9")
    losses = [[r["valid_loss"] for r in run.metrics() if "valid_loss" in r][-1] for run in runs[:4]]
    mean, sd = statistics.fmean(losses), statistics.stdev(losses)
    assert shown["held-out loss nats/token"] == f"{mean:.4f} ± {sd:.4f}"  # without the one that has not finished
    assert (shown["steps"], shown["state"]) == ("2,000", "4 of 5 finished")
    assert alone[:3] == ["alone", "pre-ln", "3"]
    assert "±" not in " ".join(alone)
    page.locator("details.singles summary").click()
    singles = page.locator("details.singles table.runs")
    assert column(singles, 0) == ["sas-0", "sas-1", "sas-2", "sas-3", "sas-9", "alone"]
    assert column(singles, 1) == ["sas-gains"] * 5 + ["pre-ln"]
    assert column(singles, len(heads) - 1) == [*["finished"] * 4, "unfinished", "finished"]
    apart = visit(write_page([], runs[:1], tmp_path / "page.html"))
    assert apart.locator("details.singles").count() == 0


def with_data(run, fingerprint):
    content = json.loads(run.config_file.read_text())
    run.config_file.write_text(json.dumps({**content, "data": {"fingerprint": fingerprint}}))
    return run


def test_runs_of_different_data_carry_a_warning(tmp_path, visit, capsys):
    runs = [with_data(make_run(tmp_path / f"run-{n}", seed=n), "ab"[n // 2]) for n in range(3)]
    assert side_by_side(runs[:2]).warnings == ()
    (warning,) = side_by_side(runs).warnings
    assert "different data" in warning
    page = visit(write_page([], runs, tmp_path / "page.html"))
    assert warning in page.locator("#side-by-side .warning").inner_text()
    above = page.locator(".warning").bounding_box()["y"]
    assert above < page.locator("figure.plot").nth(0).bounding_box()["y"] < 900
    names = [str(run.folder) for run in runs]
    assert skipless(["report", *names]) == 0
    assert " ".join(f"warning: {warning}".split()) in " ".join(capsys.readouterr().out.split())
    assert skipless(["report", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [warning]
    assert skipless(["report", *names[:2]]) == 0
    out = capsys.readouterr().out
    assert "warning" not in out
    assert out.count("(sas-p)") == 2  # the block of each run


def test_the_terminal_says_what_came_out_first(capsys):
    one = finding(answer="[It] is so.", verdicts=ALL_KINDS, warnings=("Two kinds of [data].",))
    show_findings([one, finding(own=True, paper="(Not in the paper.)", verdicts=ALL_KINDS[:1])])
    out = " ".join(capsys.readouterr().out.split())
    order = ["fig5", "warning: Two kinds of [data].", "[It] is so.", "The paper: They match.", "sas matches pre-ln"]
    places = [out.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "9 claims of the paper: 3 holds, 1 differs (better), 1 does not hold, 4 not decidable" in out
    assert "2 checks of our own: 2 holds" in out


# --------------------------------------------------------------------------------- looks

CONTRASTS = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const behind = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(node.parentElement) : colour;
  };
  const found = {};
  const texts = "h1, h2, p, td, th, a, .verdict, .muted, summary, label, pre, dt, dd, b, .axis";
  const lines = ".curve, .reach, .near";
  for (const node of document.querySelectorAll(`${texts}, ${lines}, .dot`)) {
    const style = getComputedStyle(node);
    const own = node.matches(lines) ? style.stroke : node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(own), light(behind(node))].sort();
    const name = node.tagName + "." + (node.getAttribute("class") ?? "");
    found[name] = Math.min(found[name] ?? 99, b / a);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(whole, visit, scheme):
    page = visit(whole, color_scheme=scheme)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    for name, contrast in contrasts.items():
        drawn = name.split(".")[0] in ("path", "circle")
        assert contrast >= (3 if drawn else 4.5), name


def test_the_switch_overrules_the_system(tmp_path, visit):
    background = "getComputedStyle(document.body).backgroundColor"
    path = show(tmp_path, plot(line("pre-ln")))
    light, dark = visit(path, color_scheme="light"), visit(path, color_scheme="dark")
    before = light.evaluate(background), dark.evaluate(background)
    assert before[0] != before[1]
    stroke = "getComputedStyle(document.querySelector('.curve')).stroke"
    assert (light.evaluate(stroke), dark.evaluate(stroke)) == ("rgb(0, 0, 0)", "rgb(242, 242, 240)")
    for page, name, other in ((light, "Dark", before[1]), (dark, "Light", before[0])):
        assert page.locator("#theme").inner_text() == name
        page.locator("#theme").click()
        assert page.evaluate(background) == other
        page.locator("#theme").click()
        assert page.evaluate(background) != other


def test_it_can_be_read_without_eyes(whole, visit):
    page = visit(whole)
    assert page.locator("html").get_attribute("lang") == "en-GB"
    first = page.locator(CANVAS).nth(0)
    assert first.get_attribute("aria-label") == "Held-out loss: loss (nats per token) over training steps"
    assert page.locator("table:not(:has(thead th[scope=col]))").count() == 0
    assert page.locator("table tbody tr:not(:has(> th[scope=row]))").count() == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, a, summary, [role=region], [role=group], fieldset')]"
        ".filter(one => !(one.ariaLabel ?? one.textContent).trim()).length"
    )
    assert unnamed == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(one => Number(one.tagName[1]))")
    assert levels[:2] == [1, 2]


# ------------------------------------------------------------------------------- hostile


def test_names_and_samples_stay_text(tmp_path, visit):
    name = "<img src=x onerror='hacked=1'>{{ 7 * 7 }}"
    run = make_run(tmp_path / name, "sas", sample=HOSTILE)
    one = finding(
        plot(line(HOSTILE), line("two"), title=HOSTILE, y_label=HOSTILE, axes={"steps": HOSTILE, "minutes": HOSTILE}),
        runs=[run],
        warnings=(HOSTILE,),
        **dict.fromkeys(("title", "paper", "command", "note", "answer"), HOSTILE),
    )
    claims = tuple(type(claim)(HOSTILE, HOSTILE, claim.outcome, HOSTILE, {HOSTILE: 1.0}) for claim in one.verdicts)
    drawn = replace(
        judged(0.1, 0.2, below=0.5),
        claim=HOSTILE,
        paper=HOSTILE,
        reason=HOSTILE,
        why=HOSTILE,
        unit=HOSTILE,
        seed=HOSTILE,
    )
    claims += (drawn,)
    hostile = type(one)(**{**vars(one), "verdicts": claims})
    page = visit(write_page([hostile], [make_run(tmp_path / "other" / name)], tmp_path / "page.html"))
    page.evaluate(OPEN_ALL)
    settle(page)
    page.locator(CANVAS).nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0
    assert page.locator("h2").nth(0).inner_text() == f"fig5: {HOSTILE}"
    assert page.locator(".answer").inner_text() == HOSTILE
    assert HOSTILE in page.locator(".warning").inner_text()
    assert page.locator("table.claims .claim").all_inner_texts() == [HOSTILE] * 4
    assert HOSTILE in page.locator("svg.interval").get_attribute("aria-label")
    assert page.locator(".samples pre").nth(0).inner_text() == HOSTILE
    assert page.locator(".legend button").nth(0).inner_text() == HOSTILE
    assert page.locator("table.runs th[scope=row]").nth(0).inner_text() == name
    assert HOSTILE in page.locator(".tip").nth(0).inner_text()
    assert page.locator(".canvas text", has_text="window.hacked").count() > 0


def test_no_script_runs_but_the_pages_own(tmp_path, visit):
    path = show(tmp_path, plot(line()))
    path.write_text(path.read_text().replace("<main>", "<main><script>window.hacked = 1</script>"))
    page = visit(path)
    assert page.evaluate("window.hacked") is None
    assert page.locator(CURVES).count() == 1
    assert any("Content Security Policy" in text for text in page.said)
    page.said.clear()


def test_half_a_character_does_not_stop_the_page(tmp_path):
    path = show(tmp_path, plot(line("a\ud800b")), title="\udcff")
    assert "fig5: ?" in path.read_text(encoding="utf-8")


# ------------------------------------------------------------------------ little or nothing


def test_an_empty_page(tmp_path, visit):
    page = visit(write_page([], [], tmp_path / "page.html"))
    assert "nothing to report" in page.locator("main").inner_text()
    bare = visit(show(tmp_path, verdicts=(), paper="", command="", seeds=()))
    assert "nothing to draw" in bare.locator("section").inner_text()
    assert bare.locator("table").count() == 0


def test_a_run_that_has_only_begun(tmp_path, visit):
    begun, writing = make_run(tmp_path / "begun"), make_run(tmp_path / "writing", "pre-ln", reached=300)
    begun.metrics_file.unlink()
    writing.metrics_file.write_text(writing.metrics_file.read_text() + '{"step": 310, "tok')
    gone = type(begun)(tmp_path / "gone")
    page = visit(write_page([finding(runs=[gone])], [begun, writing], tmp_path / "page.html"))
    rows = page.locator("#side-by-side table.runs tbody tr")
    assert rows.count() == 2
    assert texts(rows.nth(0).locator("td")).count("–") == 4
    assert "300" in rows.nth(1).inner_text()
    assert page.locator("#fig5-laptop table.runs").count() == 0


def test_differences_of_configurations():
    first, second = laptop("pre-ln"), laptop("pre-ln").override({"train.lr": 0.5, "train.seed": 4})
    third = laptop("sas-p")
    found = compare([first, second, third])
    assert found["train.lr"] == ["0.002", "0.5", "0.002"]
    assert found["model.block.layout"] == ["sequential", "sequential", "parallel"]
    assert found["model.block.alpha_sa.init"] == ["1", "1", "–"]
    assert "train.seed" not in found
    assert compare([]) == compare([first]) == {}


# ------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two blocks, really trained for a second."""
    folder = tmp_path_factory.mktemp("trained")
    source = write_text(folder / "text", files=8, functions=20)
    for block in ("pre-ln", "sas-p"):
        cfg = tiny(source, {"model.block": block}, sample_every=12)
        train(cfg, folder / block, trackers=[], cache_dir=folder / "cache")
    return folder


def test_the_report_of_real_runs(trained, tmp_path, visit, capsys):
    pytest.importorskip("matplotlib")
    target = tmp_path / "report.html"
    arguments = [str(trained / "pre-ln"), str(trained / "sas-p"), "--page", str(target), "--files"]
    assert skipless(["report", *arguments, "--plot", str(tmp_path / "losses.png")]) == 0
    out = capsys.readouterr().out
    assert f"page: {target}" in out
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    page = visit(target)
    assert page.locator("h1").inner_text() == "Runs side by side"
    assert column(page.locator("table.runs"), 0) == ["pre-ln", "sas-p"]
    assert texts(page.locator("table.runs td:last-child")) == ["finished", "finished"]
    assert "β_FF of each layer, sas-p" in texts(page.locator("details.more h4"))
    assert page.locator("article pre").count() == 2
    assert (tmp_path / "side-by-side" / "loss.csv").read_text().count("\n") == 7  # three evaluations of each


def test_the_report_of_an_experiment(trained, tmp_path, visit, capsys, monkeypatch):
    asked = []

    def find(name, scale, runs):
        asked.append((name, scale, str(runs)))
        return finding(plot(line("sas-p")), id=name, scale=scale, runs=[type(made)(trained / "sas-p")])

    made = make_run(tmp_path / "made")
    assert "fig5" in catalogue.EXPERIMENTS
    monkeypatch.setattr(experiment, "find", find)
    target = tmp_path / "report.html"
    command = ["report", "fig5", str(trained / "pre-ln"), "--scale", "paper", "--runs", str(trained)]
    assert skipless([*command, "--page", str(target)]) == 0
    assert asked == [("fig5", "paper", str(trained))]
    out = capsys.readouterr().out
    assert "The quick block wins." in out
    page = visit(target)
    assert [one.get_attribute("id") for one in page.locator("section").all()] == ["fig5-paper", "side-by-side"]
    assert skipless([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [run["name"] for run in found["runs"]] == ["sas-p", "pre-ln"]
    (one,) = found["findings"]
    assert [verdict["outcome"] for verdict in one["verdicts"]] == ["holds", "does not hold", "not decidable"]
    assert one["verdicts"][1]["numbers"] == {"gap": 0.051, "p": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--files", "give --page as well"),
        ("--page report.pdf", "ends in .html"),
        ("--page nowhere/report.html", "there is no folder"),
        ("--plot losses.bmp", ".png, .svg, .pdf"),
        ("another", "there is no run at 'another'"),
    ],
)
def test_bad_input_writes_nothing(trained, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert skipless(["report", str(trained / "pre-ln"), *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_written_where_it_can_be(tmp_path):
    with pytest.raises(UserError, match="ends in"):
        write_page([], [], tmp_path / "page")
