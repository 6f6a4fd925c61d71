"""What code writes for the site: nothing is made up, and nothing drifts from where it comes from."""

import re
import shutil

import pytest

from skipless import BLOCKS
from skipless.config.base import Config
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.run_index import RunIndex
from tests.helpers.plugins import no_plugins
from tools.site import ARCHIVE, DOCS, ROOT, api, commands, configuration, equations, findings, gallery, results, speeds
from tools.site.equation import equation
from tools.site.links import broken, rewrite
from tools.site.markdown import plain, raised
from tools.site.maths import MathsExtension
from tools.site.staging import Lost, site_link, written_pages

PAGE = (DOCS / "equations.md").read_text(encoding="utf-8")
SECTIONS = equations.sections(PAGE)

# -------------------------------------------------------------------------------- equations


@pytest.mark.parametrize("symbol", SECTIONS)
def test_the_equations_are_the_code(symbol):
    equations.check(symbol, SECTIONS[symbol])


def test_the_gains_of_each_block_are_those_of_its_configuration():
    def told(gain):
        if gain is None:
            return "0"
        start = r"$0.1\sqrt{18/L}$" if gain.init == "depth" else f"{gain.init:g}"
        return f"trained from {start}" if gain.trainable else start

    rows = {cells[1].strip(" `"): [cell.strip() for cell in cells[2:-1]] for cells in gain_rows()}
    for name, block in BLOCKS.items():
        gains = [block.alpha_sa, block.beta_sa, block.alpha_ff, block.beta_ff, block.alpha_comb]
        absent = (4,) if block.layout == "sequential" else (0, 2)
        expected = ["" if at in absent else told(gain) for at, gain in enumerate(gains)]
        assert rows[name] == ["1" if block.layout == "sequential" else "7", *expected]


def gain_rows():
    return [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]


def test_both_equations_are_there():
    forwards = [f"skipless.nn.{name}" for name in ("blocks.SequentialBlock.forward", "blocks.ParallelBlock.forward")]
    assert {*forwards, "skipless.nn.attention.Attention.forward", "skipless.nn.mixing.Shaped.matrix"} <= set(SECTIONS)


def test_a_changed_line_is_found():
    symbol = "skipless.nn.blocks.ParallelBlock.forward"
    source = "".join(code for code, _ in equations.pieces(SECTIONS[symbol]))
    equations.check(symbol, SECTIONS[symbol], source)
    for changed in (
        source.replace("beta_ff", "beta_sa", 1),
        source + "    x = 1\n",
        source.rpartition("    return")[0],
    ):
        with pytest.raises(equations.Drift, match="line"):
            equations.check(symbol, SECTIONS[symbol], changed)
    with pytest.raises(equations.Drift, match="nothing is said"):
        equations.check(symbol, f"```python\n{source}```\n", source)
    with pytest.raises(equations.Drift, match="there is no"):
        equations.find("nowhere.at_all")


def test_the_page_shows_all_of_it():
    shown = equations.render(PAGE)
    assert shown.count('<div class="note"') == sum(len(equations.pieces(section)) for section in SECTIONS.values())
    assert "lines of" not in shown


def test_formulas_become_mathml():
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown("so $A_h$ costs `$5`\n\n$$x^2$$", extensions=[MathsExtension()])
    assert html.count("<math") == 2
    assert "<msub><mi>A</mi><mi>h</mi></msub>" in html
    assert 'display="block"' in html
    assert "<code>$5</code>" in html
    for formula in re.findall(r"\$\$?([^$]+)\$\$?", re.sub(r"```.*?```|`[^`]*`", "", PAGE, flags=re.S)):
        assert "\\" not in re.sub(r"<[^>]+>", "", markdown.markdown(f"${formula}$", extensions=[MathsExtension()])), (
            formula
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_a_blocks_equation_has_what_the_block_has(name):
    text, block = equation(BLOCKS[name]), BLOCKS[name]
    assert ("X_h" in text) == (block.value.kind == "identity")
    assert ("W^P" in text) == (block.projection.kind != "identity")
    assert ("gamma" in text) == (block.mixing == "shaped")
    assert ("Norm" in text) == (block.norm != "none")
    assert (r"\hat X" in text) == (block.layout == "sequential")
    assert ("= X +" in text or "(X +" in text) == bool(block.alpha_sa or block.alpha_comb)


# -------------------------------------------------------------------------------- reference


def every(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from every(sub)


def test_every_key_is_described():
    import skipless.config.classifier  # all configurations are known
    import skipless.experiments.messages

    with no_plugins():
        ours = {cls for cls in every(Config) if cls.__module__.startswith("skipless.")}
        assert [
            f"{cls.__name__}.{key}" for cls in ours for key, info in cls.model_fields.items() if not info.description
        ] == []
    page = configuration.page()
    for cls in configuration.CLASSES:
        section = page.split(f"\n## {cls.__name__}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M) == list(cls.model_fields)
    assert skipless.config.classifier


def test_a_key_is_told_with_its_values_and_its_default():
    page = configuration.page()
    assert "| `lr` | number, > 0 | `0.001` | Peak learning rate. |" in page
    assert "| `layout` | `sequential`, `parallel` | `sequential` |" in page
    assert "| `mixing` | `softmax`, `v-skipinit`, `shaped` | `softmax` |" in page
    assert "| `block` | [BlockConfig](#blockconfig) | `pre-ln` |" in page


def test_every_public_name_is_in_the_reference():
    import skipless

    pages = api.pages()
    page = pages["api/skipless.md"]
    assert set(re.findall(r"^## `(\w+)`", page, flags=re.M)) == {name for name in skipless.__all__ if name[0] != "_"}
    loss = page.split("## `CausalLM`")[1].split("\n## ")[0]
    assert "### `loss`" in loss  # of its parent
    assert "mode: str = 'auto'" in loss
    for name, text in pages.items():
        places = re.findall(r"^Defined in `(.*)`\.$", text, flags=re.M)
        assert all(place.startswith("skipless/") for place in places), name
        silent = re.findall(r"^(#+ `\w+`)\n\n(?:```python\n[^`]*```\n\n)?(?=\n|#|\Z)", text, flags=re.M)
        assert silent == [], (name, silent)


def test_every_command_is_in_the_reference():
    from tests.helpers.commands import commands as known
    from tests.helpers.commands import options

    page = commands.page()
    for name, command in known().items():
        section = page.split(f"\n## skipless {name}\n")[1].split("\n## ")[0]
        assert [option for option in options(command) if f"`{option}`" not in section] == []


def test_stars_of_a_text_stay():
    assert plain("files:src/**/*.py and `a*b`") == r"files:src/\*\*/\*.py and `a*b`"


# ---------------------------------------------------------------------------------- gallery


@pytest.mark.parametrize("name", BLOCKS)
def test_five_lines_to_use_a_block_run(name):
    exec(compile(gallery.use(name), name, "exec"), {})  # noqa: S102


def test_the_gallery_tells_of_every_block():
    assert list(gallery.ABOUT) == list(BLOCKS)
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    assert re.findall(r'"blocks/([\w-]+)\.md"', config) == ["index", *BLOCKS]


def test_the_navigation_lists_every_experiment_and_module():
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    assert re.findall(r'"results/([\w-]+)\.md"', config) == ["index", *EXPERIMENTS]
    assert re.findall(r'"api/([\w.]+)\.md"', config) == ["index", *(title for title, _ in api.MODULES.values())]


def test_letters_are_raised_and_lowered_but_not_in_code():
    text = "W^V, β_FF and `W^V`, $W^V$, max_W^V\n\n```\nβ_FF\n```\n"
    assert raised(text) == "W<sup>V</sup>, β<sub>FF</sub> and `W^V`, $W^V$, max_W^V\n\n```\nβ_FF\n```\n"


def test_costs_are_counted():
    table = gallery._costs("sas-p")
    assert "| parameters | 166M | 145M |" in table
    assert "| smallest exact cache, a token | 110.6 kB | 55.3 kB |" in table  # 2·d·L floats, and half of it
    found = speeds.of_block("sas-p")
    assert f"| training speed | 1 | {found.text} |" in table
    assert "not measured" in gallery._costs("v-skipinit")


def test_a_blocks_claims_are_those_that_name_it():
    texts = [one.claim.text for one in findings.said_of("sas-p-nonorm")]
    assert "sas-p-nonorm is slightly behind sas-p" in texts
    assert all(
        "sas-p-nonorm" in one.claim.labels or "sas-p-nonorm" in one.claim.text
        for one in findings.said_of("sas-p-nonorm")
    )
    assert findings.said_of("post-ln") == []


# ---------------------------------------------------------------------------------- results


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Another archive, for the findings to be of."""

    def use(*kept):
        for name in kept:
            shutil.copytree(ARCHIVE / name, tmp_path / "results" / "runs" / name)
        (tmp_path / "results" / "runs").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(findings, "ARCHIVE", tmp_path / "results" / "runs")
        for cached in (findings.index, findings.findings, findings.decoders):
            cached.cache_clear()

    yield use
    for cached in (findings.index, findings.findings, findings.decoders):
        cached.cache_clear()


def test_an_empty_archive_is_said_to_be_one(archive, tmp_path):
    archive()
    page = results.overview(findings.findings())
    rows = re.findall(r"^\| \[`([\w-]+)`\].*\| (.*) \|$", page, flags=re.M)
    assert [name for name, _ in rows] == list(EXPERIMENTS)
    counted = {
        "fig5": "1 holds, 14 not judged yet",
        "tab1": "2 hold, 8 not judged yet",
        "languini": "1 holds, 6 not judged yet",
    }
    for name, text in rows:  # parameters are counted, and need no run
        if findings.findings()[name].verdicts:
            assert text == counted.get(name, "not judged yet")
    assert "judged so far: 4 hold; not judged yet" in page
    assert "judged so far: none" in page  # of the checks of our own
    text = results.experiment_page(findings.findings()["fig2"], tmp_path)
    assert "not judged yet: no run of it is in the archive" in text
    assert not any(sign in text for sign in "✓✕≈")


def run_of(block, seed=0):
    cfg = next(cfg for label, at, cfg in EXPERIMENTS["fig5"].runs(findings.LAPTOP, 3) if (label, at) == (block, seed))
    return RunIndex(ARCHIVE).find(cfg).name


def test_what_was_judged_is_told_from_what_was_not(archive, tmp_path):
    archive(run_of("pre-ln"), run_of("sas-p"))
    (tmp_path / "results" / "notes.yaml").write_text("fig5: {answer: Everything is settled., note: No doubt.}\n")
    finding = findings.findings()["fig5"]
    text = results.experiment_page(finding, tmp_path)
    row = next(line for line in text.splitlines() if "| sas-p matches pre-ln per step |" in line)
    assert "≈ not decidable" in row  # one seed does not decide it
    assert "assumed" in row
    other = next(line for line in text.splitlines() if "| sas matches pre-ln per step |" in line)
    assert other.startswith("| not judged yet |")
    assert findings.status(finding) == "2 hold, 1 not decidable, 12 not judged yet"  # parameters, and one tuned rate
    for shown in (text, results.overview(findings.findings())):  # said of it before all of it was judged
        assert "Everything is settled" not in shown
        assert "No doubt" not in shown
    assert (tmp_path / "fig5" / "fig5-dark.svg").exists()


# ------------------------------------------------------------------------------------ links


def test_links_of_a_page_hold_on_the_site():
    assert site_link("your-own.md", "../examples/plain_loop.py") == "examples.md#plain-loop"
    assert site_link("notes/log.md", "../../examples/plain_loop.py") == "../examples.md#plain-loop"
    assert site_link("notes/log.md", "bert.md#a") == "bert.md#a"
    assert site_link("encoders.md", "results/report.md#x") == "results/index.md#x"
    assert site_link("index.md", "https://arxiv.org") == "https://arxiv.org"
    with pytest.raises(Lost, match="leads to skipless/nn"):
        site_link("index.md", "../skipless/nn/blocks.py")


def test_code_has_no_links():
    text = "[a](b.md) `[a](b.md)`\n\n```\n[a](b.md)\n```\n[`x`](b.md)\n"
    assert rewrite(text, str.upper) == "[a](B.MD) `[a](b.md)`\n\n```\n[a](b.md)\n```\n[`x`](B.MD)\n"


def heading_anchors(text):
    from pymdownx.slugs import slugify

    found = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {own or slugify(case="lower")(title.replace("`", ""), "-") for title, own in found}


def test_every_link_of_the_documents_leads_somewhere():
    """The quick form of what the build of the site checks; and GitHub's readers follow them too."""
    pytest.importorskip("pymdownx")
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    }
    written = {name.partition("/")[0] for name in written_pages()} | {"blocks", "results"}
    lost = []
    for path, text in pages.items():
        if path.is_relative_to(DOCS / "results"):
            continue

        def follow(target, path=path):
            place, _, anchor = target.partition("#")
            if ":" in target:
                return target
            goal = (path.parent / place).resolve() if place else path
            if not goal.exists() and goal.is_relative_to(DOCS):
                known = goal.relative_to(DOCS).parts[0] in written
                lost.extend([] if known else [(path.name, target)])
            elif not goal.exists() or (
                anchor and not place.endswith(".svg") and anchor not in heading_anchors(pages[goal])
            ):
                lost.append((path.name, target))
            return target

        rewrite(text, follow)
        for source in re.findall(r'(?:src|srcset)="([^"]+)"', text):
            lost.extend([] if (path.parent / source).exists() else [(path.name, source)])
    assert lost == []


def test_broken_links_of_a_site_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">x</h1><a href="b.html#there">b</a><a href="https://else.where">c</a>'
    )
    (tmp_path / "b.html").write_text(
        '<p id="there"><a href="a.html#nowhere">a</a><img src="no.svg"><a href="c.html">c</a>'
    )
    assert list(broken(tmp_path)) == [
        "b.html: a.html#nowhere has no such anchor",
        "b.html: no.svg is not there",
        "b.html: c.html is not there",
    ]
