"""Inside a trained model: mixing matrices term by term, gains, outliers."""

import json

import pytest
import torch

import skipless
from skipless.analysis.attention_maps import LayerMaps, Maps, attention_maps
from skipless.analysis.attention_plot import plot_maps
from skipless.cli import run as command
from skipless.config.plugins import load_plugin
from skipless.errors import UserError
from skipless.nn.attention import Attention
from skipless.nn.masks import Mask
from skipless.training.train import train
from tests.helpers.plugins import example, no_plugins
from tests.helpers.tiny_runs import tiny

TEXT = "def alpha(beta, gamma):\n    return beta"


@pytest.fixture(scope="module")
def run(tmp_path_factory, source, cache_dir):
    cfg = tiny(source, {"model.block": "sas-p"}, health_every=4, gains_every=4)
    return train(cfg, tmp_path_factory.mktemp("inside") / "runs" / "mine", trackers=[], cache_dir=cache_dir)


def test_the_matrix_is_the_sum_of_its_terms_and_what_the_attention_applies(run):
    model = skipless.load(run.folder)
    maps = attention_maps(model, TEXT)
    assert len(maps.layers) == 2
    for layer in maps.layers:
        assert list(layer.terms) == ["αI", "βA", "−γC"]
        torch.testing.assert_close(sum(layer.terms.values()), layer.matrix)
        assert layer.matrix.triu(1).eq(0).all()
    ids = torch.tensor([model.tokenizer.encode(TEXT)[:16]])
    seen = []
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    hook = attention.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    model(ids)
    hook.remove()
    (x, _, _), output = seen[0]
    mixed = maps.layers[0].matrix[None] @ attention.heads(attention.value(x))
    torch.testing.assert_close(attention.projection(mixed.transpose(1, 2).flatten(-2)), output)
    torch.testing.assert_close(maps.layers[0].matrix[None], attention.matrix(x, Mask(True)))
    gains = maps.layers[0].gains
    assert gains["beta"] == pytest.approx(attention.mixing.beta.flatten().tolist(), abs=1e-5)
    assert len(gains["alpha"]) == model.config.n_head


@pytest.mark.parametrize(
    ("block", "terms"),
    [("pre-ln", ["A"]), ("v-skipinit", ["αI", "βA"]), ("sas:gamma={init: 0; trainable: false}", ["αI", "βA"])],
)
def test_every_mixing_has_its_terms(run, block, terms):
    model = skipless.CausalLM(run.config().model.override({"block": skipless.config.parse_block(block).model_dump()}))
    model.tokenizer = run.tokenizer()
    assert list(attention_maps(model, TEXT).layers[0].terms) == terms
    assert model.training


def test_a_mixing_of_ones_own_is_shown_whole(run):
    with no_plugins():
        load_plugin(example("contrast_mixing"))
        model = skipless.CausalLM(
            run.config().model.override({"block": skipless.BLOCKS["pre-ln-contrast"].model_dump()})
        )
        torch.nn.init.constant_(model.blocks[0].attention.mixing.contrast, 0.5)
        model.tokenizer = run.tokenizer()
        (first, _) = attention_maps(model, TEXT).layers
        assert first.terms == {}  # what it inherits says nothing of its matrix
        assert first.gains["contrast"] == [0.5, 0.5]
        torch.testing.assert_close(first.matrix.sum(-1), torch.ones(2, first.matrix.shape[-1]))


def test_the_command_draws_and_lists(run, tmp_path, capsys):
    words = ["inspect", "mine", "--runs", str(run.folder.parent), "--attention", TEXT]
    assert command([*words, "--plot", str(tmp_path / "inside.png")]) == 0
    assert "entropy of A" in capsys.readouterr().out
    assert (tmp_path / "inside.png").read_bytes().startswith(b"\x89PNG")
    assert command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layers"][0]["matrix"]) == 2
    assert len(found["tokens"]) == len(found["layers"][0]["matrix"][0])
    assert [len(values) for values in found["kurtosis"].values()] == [2] * len(found["kurtosis"])
    assert list(found["kurtosis"]) == ["4", "8", "12"]


def test_a_run_is_inspected_as_it_was_trained(run, capsys):
    assert command(["inspect", str(run.folder), "--no-signal", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["blocks"]
    assert found["total_parameters"] == skipless.load(run.folder).num_parameters()


def test_the_page_has_what_is_inside(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert command(["report", str(run.folder), "--page", str(page), "--attention", TEXT]) == 0
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "Outliers of each layer" in text
    assert "Gains over depth" in text
    capsys.readouterr()


def test_bad_input(run, capsys, tmp_path):
    def refused(*words):
        assert command(list(words)) == 2
        return capsys.readouterr().err

    assert "give the path or the name of a run" in refused("inspect", "--attention", TEXT)
    assert "there is no run at 'pre-ln'" in refused("inspect", "pre-ln", "--attention", TEXT, "--runs", str(tmp_path))
    assert "two tokens at least" in refused("inspect", str(run.folder), "--attention", "")
    assert "give --page as well" in refused("report", str(run.folder), "--attention", TEXT)
    with pytest.raises(UserError, match="no tokeniser"):
        attention_maps(skipless.CausalLM(run.config().model), TEXT)


def test_a_picture_that_is_too_large_is_not_drawn(tmp_path):
    matrix = torch.eye(2).expand(1000, 2, 2)
    layer = LayerMaps(1, matrix, {"alpha": matrix}, {"alpha": [1.0] * 1000}, [0.0] * 1000)
    with pytest.raises(UserError, match="1 layers of 1000 heads are too many to draw"):
        plot_maps(Maps(["a", "b"], [layer]), {}, tmp_path / "x.png")
