"""The playground: its graph is the model, its tokeniser is the library's, and the page works in a browser."""

import http.server
import random
import statistics
import threading
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skipless import CausalLM, ModelConfig
from skipless.analysis.attention_maps import attention_maps
from skipless.analysis.signal_propagation import mean_cosine
from skipless.data.corpus import default_cache_dir
from skipless.data.tokenizer import train as train_tokenizer
from skipless.errors import UserError
from skipless.recipes import recipe
from skipless.runs import load
from skipless.training.train import train
from tests.helpers.browser import settle
from tools import opened_model, playground

BLOCKS = ["pre-ln", "sas-p", "v-skipinit", "post-ln", "sas-p-nonorm:per_head_gains=false"]


@cache
def graph_of(block, positions):
    """A model with gains that differ by layer and head, and its graph in ONNX Runtime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    cfg = ModelConfig(block=block, n_layer=2, d_model=16, n_head=2, vocab_size=50, max_seq_len=12, positions=positions)
    model = CausalLM(cfg).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2].startswith(("alpha", "beta", "gamma")) or "query" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    graph = opened_model.to_graph(model)
    return model, onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])


def open_model(block, positions="sinusoidal"):
    """The model, which may be changed, and a function that runs its graph."""
    model, session = graph_of(block, positions)

    def run(ids, mixing, branches):
        given = {"ids": ids[None].numpy(), "mixing": mixing.numpy(), "branches": branches.numpy()}
        return [torch.from_numpy(part) for part in session.run(None, given | {"at": np.arange(len(ids))})]

    return deepcopy(model), run


@pytest.mark.parametrize(
    "block", [BLOCKS[1], *(pytest.param(one, marks=pytest.mark.slow) for one in BLOCKS if one != BLOCKS[1])]
)
@torch.no_grad()
def test_the_graph_is_the_model(block):
    model, run = open_model(block, "rotary" if block == "post-ln" else "sinusoidal")
    ids, outputs = torch.randint(50, (9,)), []
    hooks = [one.register_forward_hook(lambda *found: outputs.append(found[2])) for one in model.blocks]
    expected = model(ids[None])[0]
    for hook in hooks:
        hook.remove()
    logits, attention, similarity = run(ids, *opened_model.trained_gains(model))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(similarity[1:], torch.tensor([mean_cosine(one) for one in outputs]), atol=1e-5, rtol=0)
    assert attention.shape == (2, 2, 9, 9)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, 9))


@torch.no_grad()
def test_the_parts_of_the_matrix_are_those_that_inspect_shows():
    model, run = open_model("sas-p")
    ids = torch.randint(50, (9,))
    model.tokenizer = SimpleNamespace(encode=lambda text: ids.tolist(), decode=lambda ids: "")
    mixing, branches = opened_model.trained_gains(model)
    _, attention, _ = run(ids, mixing, branches)
    for layer in attention_maps(model, "text").layers:
        number = layer.layer - 1
        torch.testing.assert_close(layer.terms["βA"], mixing[number, 1][:, None, None] * attention[number])


@pytest.mark.parametrize(("block", "gain"), [("sas-p", "gamma"), ("sas-p", "beta_ff"), ("pre-ln", "alpha_sa")])
@torch.no_grad()
def test_a_gain_that_is_turned_is_a_model_with_that_gain(block, gain):
    """As the page turns it: in one layer, and of the mixing in one head."""
    model, run = open_model(block)
    ids, (mixing, branches) = torch.randint(50, (7,)), opened_model.trained_gains(model)
    before = run(ids, mixing, branches)[0]
    if gain == "gamma":
        mixing[1, 2, 0] = 0.25
        model.blocks[1].attention.mixing.gamma[0] = 0.25
    elif gain == "beta_ff":
        branches[1, 3] = -0.5
        model.blocks[1].beta_ff.fill_(-0.5)
    else:
        branches[1, 0] = 0.5
        model.blocks[1].alpha_sa = 0.5
    after = run(ids, mixing, branches)[0]
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, model(ids[None])[0], atol=1e-4, rtol=1e-4)


def test_what_the_playground_cannot_open():
    small = {"n_layer": 1, "d_model": 16, "n_head": 2, "vocab_size": 50, "max_seq_len": 12}
    with pytest.raises(UserError, match="no ALiBi"):
        opened_model.trained_gains(CausalLM(ModelConfig(positions="alibi", **small)))
    with pytest.raises(UserError, match="attention and an MLP"):
        opened_model.trained_gains(CausalLM(ModelConfig(block="parallel:beta_ff=0", **small)))
    lowered = train_tokenizer("bpe", lambda: iter(["Def"] * 9), vocab_size=280, lowercase=True)
    with pytest.raises(UserError, match="without a normaliser"):
        playground.tokenizer_for_the_page(lowered)


def test_a_package_with_another_hash_is_refused(tmp_path):
    (tmp_path / f"onnxruntime-web-{playground.RUNTIME}.tgz").write_bytes(b"something else")
    with pytest.raises(UserError, match="its hash is another"):
        playground.fetch_runtime(tmp_path)


# ------------------------------------------------------------------------------------------------------ the tokeniser

ODD = [
    "", " ", "  ", "\n", "a\n\n\tb", "I'll, you've, it's 'quoted'", "'S 'LL", "naïve café", "漢字かな交じり文",
    "👩‍👩‍👧‍👦 👍🏽", "🇩🇪🇫🇷", "\ufeffBOM", "x\u0085y\u00a0z", "\u2028 \u2029", "\u180e\u200b\u3000", "\x00\x01\x7f",
    "١٢٣ ½ Ⅷ ²", "e\u0301 ñ n\u0303", "<|endoftext|>", "def f(x):\n    return x  \n", "a" * 300, "…—–", "\r\n\r\n",
    "ﷺ", "मन्त्र", "อักษรไทย", "עברית العربية",
]  # fmt: skip


def odd_texts(count=600):
    rng = random.Random(0)
    kinds = [
        lambda: chr(rng.randrange(32, 127)),
        lambda: rng.choice(" \n\t'.,_()0123456789"),
        lambda: rng.choice("\u00a0\u0085\u2003\u2028\u3000\ufeff\u200b\r\x0b\x1c\x1f"),
        lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x30000)])),
        lambda: rng.choice(["def ", "return", "self", " the", "ll", "é", "漢", "👍"]),
    ]
    return ODD + ["".join(rng.choice(kinds)() for _ in range(rng.randrange(60))) for _ in range(count)]


@pytest.fixture
def blank(browser):
    """A page with the playground's scripts and nothing else."""
    page = browser.new_page()
    for name in ("tokenizer.js", "network.js", "charts.js"):
        page.add_script_tag(path=playground.PAGE / name)
    yield page
    page.close()


def test_the_tokeniser_is_the_librarys(blank):
    texts = odd_texts()
    learnt = "\n".join(texts) + "def read(self): return self.file.read()\n" * 50 + "naïve café 漢字 👍🏽 " * 50
    tokenizer = train_tokenizer("bpe", lambda: iter([learnt]), vocab_size=900)
    content = playground.tokenizer_for_the_page(tokenizer)
    blank.evaluate("content => { window.tokenizer = new Tokenizer(content) }", content)
    found = blank.evaluate("texts => texts.map(text => tokenizer.encode(text))", texts)
    for text, ids in zip(texts, found, strict=True):
        assert ids == tokenizer.encode(text), text
    assert blank.evaluate("texts => texts.map(ids => tokenizer.decode(ids))", found) == texts
    rng = random.Random(1)
    any_ids = [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(20))] for _ in range(300)]
    decoded = blank.evaluate("all => all.map(ids => tokenizer.decode(ids))", any_ids)
    assert decoded == [tokenizer.decode(ids) for ids in any_ids]


def test_the_next_token_is_drawn_by_its_probability(blank):
    logits = [0.0, 2.0, -1.0, 1.0]
    expected = torch.tensor(logits).softmax(0)
    assert blank.evaluate("logits => softmax(logits)", logits) == pytest.approx(expected.tolist())
    warm = (torch.tensor(logits) / 0.5).softmax(0)
    assert blank.evaluate("logits => softmax(logits, 0.5)", logits) == pytest.approx(warm.tolist())
    assert blank.evaluate("logits => softmax(logits, 0)", logits) == [0, 1, 0, 0]
    assert blank.evaluate("logits => likeliest(softmax(logits), 3)", logits) == [1, 3, 0]
    marks = [0.0, expected[0] + 1e-6, expected[:2].sum() - 1e-6, expected[:3].sum() + 1e-6, 0.9999999]
    drawn = blank.evaluate(
        "([l, marks]) => marks.map(mark => draw(softmax(l), mark))", [logits, list(map(float, marks))]
    )
    assert drawn == [0, 1, 1, 3, 3]


# ----------------------------------------------------------------------------------------------------------- the page

TEXT = "def read(path):\n    with open(path, "


@pytest.fixture(scope="module")
def site(tmp_path_factory, cache_dir):
    """The page whole, with models of the demo's size that have hardly been trained, and their runs."""
    pytest.importorskip("onnxscript")
    folder, runs = tmp_path_factory.mktemp("site"), {}
    changes = {"train.steps": 30, "train.eval_rows": 8, "train.sample_every": 0, "data.max_bytes": 4_000_000}
    for block in ("pre-ln", "sas-p"):
        cfg = recipe("demo", block).override(changes)
        runs[block] = str(train(cfg, folder / block, trackers=[], cache_dir=cache_dir).folder)
    sizes = playground.build(folder / "playground", list(runs.values()), default_cache_dir() / "npm")
    return SimpleNamespace(folder=folder / "playground", sizes=sizes, models=[load(run) for run in runs.values()])


@pytest.fixture
def served(site):
    """The page's address on a server that knows nothing but files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = partial(Quiet, directory=str(site.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.fixture
def visit(browser):
    """Opens the page; nothing may be said on its console, or asked of anybody else."""
    contexts, said = [], []

    def visit(address, width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        here = address.rpartition("/")[0]
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith((here, "data:", "blob:")) or said.append(request.url))
        page.goto(address)
        page.get_by_text("Ready.").wait_for()
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


def type_text(page, text):
    page.get_by_label("A beginning").fill(text)
    page.evaluate("(async () => { while (busy) await busy })()")


@torch.no_grad()
def logits_of(page, number, ids):
    """Of every token, as the page computes them."""
    wanted = list(range(len(ids)))
    found = page.evaluate(
        "async ([n, ids, at]) => Array.from((await state.networks[n].run(ids, at)).logits)", [number, ids, wanted]
    )
    return torch.tensor(found).view(len(ids), -1)


@pytest.mark.slow
@torch.no_grad()
def test_the_page_from_a_folder_without_a_network(site, visit):
    page = visit((site.folder / "index.html").as_uri(), offline=True)
    type_text(page, TEXT)
    for number, model in enumerate(site.models):
        ids = model.tokenizer.encode(TEXT)
        assert page.evaluate("state.ids") == ids
        expected = model(torch.tensor([ids]))[0]
        apart = (logits_of(page, number, ids) - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert apart < 1e-4
        shown = page.locator("#next article").nth(number).locator("button")
        assert shown.count() == 8
        best = page.evaluate("id => state.tokenizer.show(id)", int(expected[-1].argmax()))
        assert shown.first.locator(".token").text_content() == best


@pytest.mark.slow
@torch.no_grad()
def test_the_page_draws_what_the_model_does(site, visit, served):
    page = visit(served)
    type_text(page, TEXT)
    page.get_by_label("Layer", exact=True).select_option("3")
    page.get_by_label("Head", exact=True).select_option("2")
    for number, model in enumerate(site.models):
        layer = attention_maps(model, TEXT).layers[3]
        found = page.evaluate("n => state.networks[n].matrices(state.results[n], 3, 2)", number)
        length = len(layer.matrix[2])
        torch.testing.assert_close(
            torch.tensor(found["whole"]).view(length, length), layer.matrix[2], atol=1e-4, rtol=0
        )
        names = {"βA": "attention", "αI": "identity", "−γC": "centring", "A": "attention"}
        for name, term in layer.terms.items():
            torch.testing.assert_close(
                torch.tensor(found[names[name]]).view(length, length), term[2], atol=1e-4, rtol=0
            )
        canvas = page.locator("#mixing article").nth(number).locator("canvas").first
        colours = canvas.evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
        assert colours > 5
        canvas.press("ArrowDown")
        assert "token 2" in page.locator("#cell").text_content()
    assert page.locator("#depth polyline").count() == 4


@pytest.mark.slow
@torch.no_grad()
def test_a_skip_that_is_cut_is_cut(site, visit, served):
    page = visit(served)
    type_text(page, TEXT)
    model = deepcopy(site.models[0])
    ids = model.tokenizer.encode(TEXT)
    page.get_by_role("button", name="Cut the skip around the attention").click()
    page.evaluate("(async () => { while (busy) await busy })()")
    outputs = []
    for block in model.blocks:
        block.alpha_sa = 0.0
        block.register_forward_hook(lambda *found: outputs.append(mean_cosine(found[2])))
    expected = model(torch.tensor([ids]))[0]
    assert (logits_of(page, 0, ids) - expected).abs().max() / expected.abs().max().clamp(min=1) < 1e-4
    assert page.evaluate("Array.from(state.results[0].similarity)")[1:] == pytest.approx(outputs, abs=1e-4)
    assert page.get_by_role("button", name="Cut the skip around the attention").get_attribute("aria-pressed") == "true"
    before = page.evaluate("Array.from(state.trained[0])")
    page.locator("#cuts article").first.get_by_role("button", name="As trained").click()
    page.evaluate("(async () => { while (busy) await busy })()")
    assert page.evaluate("Array.from(state.results[0].similarity)") == before
    slider = page.get_by_label("sas-p: γ, the centring")
    slider.focus()
    slider.press("ArrowRight")
    page.evaluate("(async () => { while (busy) await busy })()")
    value = page.evaluate("state.networks[1].gain('gamma', [5], [3])")
    assert value == pytest.approx(float(slider.input_value()), abs=1e-6)


@pytest.mark.slow
def test_a_token_takes_less_than_a_tenth_of_a_second(visit, served):
    """With a full context, which is the slowest; and the page writes as it is asked to."""
    page = visit(served)
    type_text(page, TEXT * 20)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Write 20").click()
    page.locator("#stop:disabled").wait_for()
    assert len(page.get_by_label("A beginning").input_value()) > len(TEXT * 20)
    for number in range(2):
        times = [
            page.evaluate("async n => (await state.networks[n].run(read())).milliseconds", number) for _ in range(25)
        ]
        print(f"model {number}: {min(times):.1f} ms a token, median {statistics.median(times):.1f}")
        assert min(times) < 100  # the page's own time: the median is also that of whatever else the machine does


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits(visit, served, width, scheme):
    page = visit(served, width, color_scheme=scheme)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = "one => !one.labels?.length && !one.ariaLabel"
    controls = "[...document.querySelectorAll('input, select, textarea, canvas')]"
    assert page.evaluate(f"{controls}.filter({unnamed}).map(one => one.outerHTML)") == []


def test_without_its_models_the_page_says_what_to_do(browser):
    page = browser.new_page()
    page.goto((playground.PAGE / "index.html").as_uri())
    page.get_by_text("make playground").wait_for()
    page.close()
