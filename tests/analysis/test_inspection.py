"""What `inspect` says is what the model does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from skipless import BLOCKS, CausalLM, MaskedLM, ModelConfig
from skipless.analysis import costs
from skipless.analysis.costs import count_parameters, flops_per_token, saved_bytes, training_memory
from skipless.analysis.drawing import draw, removed
from skipless.analysis.inspection import inspect
from skipless.analysis.signal_propagation import mean_cosine, measure_signal
from skipless.analysis.units import number
from skipless.config.block import parse_block
from skipless.config.plugins import load_plugin
from skipless.config.run import RunConfig
from skipless.nn import explicit_form
from skipless.terminal.inspection import COLLAPSED
from tests.helpers.plugins import example, no_plugins
from tests.helpers.variants import VARIANTS

DEEP = {"n_layer": 72, "d_model": 64, "n_head": 4, "vocab_size": 512, "max_seq_len": 64}


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_add_up(name):
    cfg = ModelConfig(block=VARIANTS[name], n_layer=3, d_model=16, n_head=2, positions="learned", tie_embeddings=False)
    counts = count_parameters(cfg)
    assert sum(counts.values()) == CausalLM(cfg).num_parameters()
    assert counts["head"] == counts["embedding"] == 4096 * 16
    assert counts["positions"] == 128 * 16
    if cfg.block.value.kind == cfg.block.projection.kind == "identity" and cfg.block.first_value is None:
        assert counts["value, projection"] == 0


@pytest.mark.parametrize(
    "name", ["pre-ln", "parallel", "v-skipinit", "sas", "sas-p", "bert-sas", "fig3-orthogonal-0", "mlp-only"]
)
def test_flops_are_those_that_torch_counts(name):
    cfg = ModelConfig(block=VARIANTS[name], n_layer=3, d_model=32, n_head=2, vocab_size=64, max_seq_len=24)
    model, ids = CausalLM(cfg), torch.randint(64, (2, 24))
    # torch does not count its fused attention on a CPU; the explicit form makes the same two products
    with FlopCounterMode(display=False) as counter, torch.no_grad(), explicit_form(model):
        model(ids)
    assert flops_per_token(cfg)["forward"] * ids.numel() == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert flops_per_token(cfg)["training"] == 3 * flops_per_token(cfg)["forward"]


def test_a_masked_model_computes_its_head_at_the_masked_tokens():
    cfg = RunConfig(task="masked", model=ModelConfig(block="pre-ln", n_layer=2, d_model=32, n_head=2, vocab_size=64))
    model, ids = MaskedLM(cfg.model), torch.randint(64, (2, 128))
    labels = torch.where(torch.arange(128) % 4 == 0, ids, -100)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), explicit_form(model):
        model.loss(ids, labels)
    counted = flops_per_token(cfg.model, 128, head_share=cfg.predicted_share)["forward"] * ids.numel()
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert counted < flops_per_token(cfg.model, 128)["forward"] * ids.numel()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
def test_activation_memory_is_what_autograd_saves(name, causal):
    """The traced prediction, made from two and three layers, against a real forward pass of five."""
    cfg = ModelConfig(block=name, n_layer=5, d_model=32, n_head=2, vocab_size=64, max_seq_len=24)
    model = (CausalLM if causal else MaskedLM)(cfg)
    ids = torch.randint(64, (3, 24))
    real = saved_bytes(lambda: model.hidden(ids), model.parameters())
    assert training_memory(cfg, 3, causal=causal)["activations"] == pytest.approx(real, rel=0.02)


def test_a_wide_model_is_not_traced_piece_by_piece(monkeypatch):
    """Of 1,000,000 columns there are thousands of pieces, and each took as long to trace as the whole."""
    monkeypatch.setattr(torch, "mm", lambda *_, **__: pytest.fail("a product was made in pieces"))
    cfg = ModelConfig(block="sas", n_layer=1, d_model=1_000_000, n_head=1, vocab_size=64, max_seq_len=24)
    assert training_memory(cfg, 3)["activations"] > 3 * 24 * cfg.ff_width * 4


def test_a_shape_is_traced_once_unless_a_part_is_somebodys_own(monkeypatch):
    traced = []
    monkeypatch.setattr(costs, "saved_bytes", lambda *_: traced.append(1) or 100)
    shape = {"n_layer": 2, "d_model": 16, "n_head": 2, "vocab_size": 71, "max_seq_len": 24}
    with no_plugins():
        load_plugin(example("dynamic_tanh"))
        for block, each in (("sas", 2), ("pre-ln-dyt", 4)):  # two depths of each, the second time again or not
            traced.clear()
            for _ in range(2):
                training_memory(ModelConfig(block=block, **shape), 3)
            assert len(traced) == each
            training_memory(ModelConfig(block=block, **shape), 4)
            assert len(traced) == each + 2
    costs._saved_bytes.cache_clear()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_memory_is_that_of_a_training_wherever_it_is_asked_for(context):
    cfg = ModelConfig(block="sas", n_layer=2, d_model=16, n_head=2, vocab_size=64, max_seq_len=24)
    expected = training_memory(cfg, 3)
    costs._saved_bytes.cache_clear()
    with context():
        assert training_memory(cfg, 3) == expected


def test_memory_of_a_step_is_weights_gradients_two_moments_and_what_autograd_saves():
    cfg = ModelConfig(block="sas-p", n_layer=2, d_model=16, n_head=2, vocab_size=64, max_seq_len=24)
    memory, n = training_memory(cfg, 3), CausalLM(cfg).num_parameters()
    assert (memory["weights"], memory["gradients"], memory["optimiser"]) == (4 * n, 4 * n, 8 * n)
    assert memory["logits"] == 2 * 4 * 3 * 24 * 64
    assert memory["total"] == sum(size for part, size in memory.items() if part != "total")


@pytest.mark.parametrize("causal", [True, False])
def test_naive_skipless_block_collapses_and_the_others_do_not(causal):
    naive = measure_signal(ModelConfig(block="pre-ln:alpha_sa=0", **DEEP), causal=causal)
    assert naive[-1].cosine > 0.9999
    without_any = measure_signal(ModelConfig(block="pre-ln:alpha_sa=0,alpha_ff=0", **DEEP), causal=causal)
    assert without_any[-1].cosine > 0.9999
    for name in ("pre-ln", "v-skipinit", "sas", "sas-p"):
        assert measure_signal(ModelConfig(block=name, **DEEP), causal=causal)[-1].cosine < 0.95 < COLLAPSED, name


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_reach_every_layer_at_depth_72(name):
    layers = measure_signal(ModelConfig(block=name, **DEEP))
    assert len(layers) == 72
    for layer in layers:
        assert 0 < layer.weight_gradient < 1e4
        assert 0 < layer.gradient < 1e4
        assert 1e-3 < layer.activation < 1e3


def test_skipless_signal_keeps_its_size():
    """The theory: with attention that starts as the identity, nothing grows and nothing dies."""
    for name in ("v-skipinit", "sas", "sas-p", "sas-p-nonorm"):
        layers = measure_signal(ModelConfig(block=name, **DEEP))
        assert layers[-1].activation == pytest.approx(1, rel=0.15), name
        assert layers[0].gradient == pytest.approx(1, rel=0.15), name


def test_mean_cosine():
    same = torch.ones(1, 5, 3)
    assert mean_cosine(same) == pytest.approx(1)
    assert mean_cosine(torch.eye(4)[None]) == pytest.approx(0)
    x = torch.randn(2, 6, 8)
    unit = torch.nn.functional.normalize(x, dim=-1)
    pairs = unit @ unit.mT
    by_hand = (pairs.sum((1, 2)) - 6).mean() / 30
    assert mean_cosine(x) == pytest.approx(by_hand.item(), abs=1e-5)


def test_drawings_show_what_is_there():
    pre_ln, sas, sas_p = (draw(BLOCKS[name]) for name in ("pre-ln", "sas", "sas-p"))
    assert pre_ln.count("(+)") == 2
    assert pre_ln.count("RMSNorm") == 2
    assert "W^V W^P" in pre_ln
    assert sas.count("(+)") == 1
    assert "W^" not in sas
    assert "αI + βA − γC" in sas
    assert sas_p.count("RMSNorm") == 1
    assert "└" not in sas_p
    assert "└" in draw(BLOCKS["parallel"])
    assert "RMSNorm" not in draw(BLOCKS["sas-p-nonorm"])
    assert "·0.5" in draw(parse_block("pre-ln:beta_sa=0.5"))
    for block in VARIANTS.values():
        lines = draw(block).splitlines()
        skips = [line for line in lines if "└" in line]
        # each skip line ends under the plus that it feeds
        for line in skips:
            above = lines[lines.index(line) - 1]
            assert all(above[i] == "+" for i, c in enumerate(line) if c == "┘"), draw(block)


def test_removed_parts():
    assert removed(BLOCKS["pre-ln"]) == []
    assert removed(BLOCKS["sas"]) == ["attention skip", "W^V (except in layer 1)", "W^P"]
    assert "norms" in removed(BLOCKS["sas-p-nonorm"])
    assert "both skips" in removed(BLOCKS["sas-p"])
    assert "MLP" in removed(VARIANTS["attention-only"])
    assert removed(VARIANTS["fig3-identity-0"]) == ["attention skip", "W^V", "W^P"]


def test_numbers_for_people():
    shown = [number(value) for value in (0, 999.6, 999_999, 145_173_422, 2.5e12)]
    assert shown == ["0", "1k", "1M", "145M", "2.5T"]


def test_inspection_as_json_is_complete():
    one = inspect(ModelConfig(block="sas", n_layer=2, d_model=16, n_head=2), "sas", batch_size=2, context=10)
    data = one.as_dict()
    assert (
        data["total_parameters"] == CausalLM(ModelConfig(block="sas", n_layer=2, d_model=16, n_head=2)).num_parameters()
    )
    assert data["decoding_memory"]["cache"] == 4 * 2 * 16 * 2 * 10
    assert [layer["layer"] for layer in data["signal"]] == [1, 2]
    assert data["training_memory"]["total"] == sum(v for k, v in data["training_memory"].items() if k != "total")
