"""The site, built and looked at in a real browser: light, dark, and as wide as a phone."""

import http.server
import shutil
import threading
from functools import partial

import pytest

from tests.helpers.browser import settle
from tools.site import ROOT
from tools.site.build import build
from tools.site.links import broken

SOME = (
    "index",
    "blocks/sas-p",
    "first-run",
    "equations",
    "blocks/index",
    "results/index",
    "results/fig5",
    "configuration",
)
LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (400, "light")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A build of its own: strict, so that a warning would be an error."""
    pytest.importorskip("zensical")
    project = tmp_path_factory.mktemp("project")
    shutil.copyfile(ROOT / "zensical.toml", project / "zensical.toml")
    return build(project)


@pytest.fixture(scope="module")
def address(site):
    """A server that hands it out."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(browser, address):
    """Opens a page; at the end, nothing may have been said on the console or asked of another machine."""
    contexts, said = [], []

    def visit(page, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(300_000)
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: said.append((page, message.text)))
        opened.on("pageerror", lambda error: said.append((page, str(error))))
        opened.on(
            "request",
            lambda request: request.url.startswith((address, "data:", "blob:")) or said.append((page, request.url)),
        )
        opened.goto(f"{address}/{page}.html", wait_until="networkidle")
        settle(opened)
        return opened

    yield visit
    for context in contexts:
        context.close()
    assert said == []


def look(visit, page, width, scheme):
    """What is asked of every page."""
    opened = visit(page, width, scheme)
    assert opened.locator("h1").first.inner_text()
    wide = opened.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{page} scrolls sideways by {wide} pixels at a width of {width}"
    bad = "images => images.filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
    assert opened.eval_on_selector_all(".md-content img", bad) == []
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) < 200
    assert dark == (scheme == "dark")
    shown = opened.locator(f'.md-content img[src$="#only-{"light" if dark else "dark"}"]')
    assert not any(one.is_visible() for one in shown.all())


def test_every_page_of_the_navigation_is_there(site):
    assert list(broken(site)) == []
    assert {path.stem for path in (site / "blocks").glob("*.html")} > {"index", "pre-ln", "sas-p"}
    assert (site / "playground" / "index.html").exists()


@pytest.mark.parametrize("how", LOOKS)
@pytest.mark.parametrize("page", [*SOME[:2], *(pytest.param(page, marks=pytest.mark.slow) for page in SOME[2:])])
def test_pages_open(visit, page, how):
    look(visit, page, *LOOKS[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", LOOKS)
def test_all_pages_open(visit, site, how):
    pages = sorted(str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html"))
    pages = [page for page in pages if page not in ("404", "results/report") and not page.startswith("playground")]
    assert len(pages) > 50
    for page in pages:
        look(visit, page, *LOOKS[how])


def test_the_equations_stand_beside_the_code(visit):
    def places(width):
        page = visit("equations", width)
        note, code = (page.locator(f".annotated > .{kind}").nth(1).bounding_box() for kind in ("note", "code"))
        assert page.locator("math").count() > 40
        return note, code

    note, code = places(1280)
    assert code["x"] >= note["x"] + note["width"]
    assert abs(code["y"] - note["y"]) < 20
    note, code = places(400)
    assert code["y"] >= note["y"] + note["height"]


def test_search_finds(visit):
    page = visit("index")
    page.keyboard.press("Control+k")
    page.wait_for_timeout(500)
    page.keyboard.type("rank collapse")
    page.get_by_text("Equation 2: the attention matrix").first.wait_for()


def test_light_and_dark_can_be_chosen(visit):
    page = visit("index", scheme="light")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    before = page.evaluate(scheme)
    for _ in range(2):  # system, light, dark
        page.locator("label[for^=__palette]:visible").first.click()
        settle(page)
    assert (before, page.evaluate(scheme)) == ("default", "slate")
