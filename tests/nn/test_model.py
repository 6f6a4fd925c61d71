"""Sizes, initial values, and what an engineer does with a module: move it, save it, compile it, feed it nonsense."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from skipless import BLOCKS, BlockConfig, CausalLM, GainConfig, MaskedLM, ModelConfig, SequenceClassifier
from skipless.config.block import parse_block
from skipless.distributed.devices import check_cpu_bf16
from skipless.nn import init_weights
from skipless.nn.layers import ReparamLinear, RMSNorm, WithGains
from skipless.nn.positions import LearnedPositions
from tests.helpers.variants import VARIANTS
from tests.helpers.weights import disturbed

BF16_PROBLEM = None
try:
    check_cpu_bf16()
except ValueError as error:
    BF16_PROBLEM = str(error)

SKIPLESS = ["v-skipinit", "sas", "sas-p", "sas-p-nonorm"]


def codeparrot(block, kind=CausalLM):
    with torch.device("meta"):
        return kind(ModelConfig(block=block, n_layer=18, d_model=768, n_head=12, d_ff=3072, vocab_size=50_000))


def crammed_bert(name):
    norm = "none" if BLOCKS[name].norm == "none" else "layernorm"
    block = BLOCKS[name].replace(mlp="glu", activation="gelu", norm=norm, norm_eps=1e-12)
    with torch.device("meta"):
        return MaskedLM(ModelConfig(block=block, n_layer=16, d_model=768, n_head=12, d_ff=3072, vocab_size=32_768))


def millions(model):
    return model.num_parameters() / 1e6


@pytest.mark.parametrize("name", BLOCKS)
def test_parameter_counts_of_the_paper(name):
    few = name.startswith("sas")
    assert millions(codeparrot(name)) == pytest.approx(146 if few else 167, rel=0.01)
    assert millions(crammed_bert(name)) == pytest.approx(101 if few else 120, rel=0.01)


@pytest.mark.parametrize("name", ["sas", "sas-p"])
def test_share_of_parameters_removed(name):
    """13% and 16%, from whole millions as the paper counts; W^V and W^P of every layer but one value map are gone."""
    for build, share, layers in ((codeparrot, 13, 18), (crammed_bert, 16, 16)):
        before, after = round(millions(build("pre-ln"))), round(millions(build(name)))
        assert round(100 * (before - after) / before) == share
        removed = build("pre-ln").num_parameters() - build(name).num_parameters()
        assert removed == pytest.approx((2 * layers - 1) * 768**2, rel=0.001)


def test_languini_size():
    block = BLOCKS["pre-ln"].replace(activation="gelu")
    cfg = ModelConfig(
        block=block, n_layer=12, d_model=768, n_head=12, vocab_size=16_384, positions="alibi", max_seq_len=512
    )
    with torch.device("meta"):
        assert millions(CausalLM(cfg)) == pytest.approx(100, rel=0.03)


# ----------------------------------------------------------------------- initial values


def std(weight):
    return weight.std().item()


def value_of(gain):
    return gain.item() if isinstance(gain, torch.Tensor) else gain


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", [CausalLM, MaskedLM])
def test_initial_values(name, kind):
    cfg = ModelConfig(block=name, n_layer=8, d_model=128, n_head=4, positions="learned", tie_embeddings=False)
    model, block = kind(cfg), cfg.block

    def near(value):
        return pytest.approx(value, rel=0.05)

    assert std(model.embedding.weight) == near(0.02)
    assert std(model.head.weight) == near(0.02)
    assert std(model.positions.weight) == near(0.02)
    assert all((m.weight == 1).all() for m in model.modules() if isinstance(m, RMSNorm))
    skipless = name in SKIPLESS
    for number, layer in enumerate(model.blocks):
        assert std(layer.mlp.up.weight) == near(0.02)
        assert std(layer.mlp.down.weight) == near(0.02)
        assert std(layer.attention.key.weight) == near(0.02)
        assert std(layer.attention.query.weight) == (0 if skipless else near(0.02))
        expected = 0.1 * math.sqrt(18 / 8) if skipless else 1.0
        assert value_of(layer.beta_ff) == pytest.approx(expected)
        assert isinstance(layer.beta_ff, torch.Tensor) == skipless
        assert value_of(layer.beta_sa) == 1.0
        assert isinstance(layer.beta_sa, torch.Tensor) == skipless
        if block.mixing != "softmax":
            heads = 4 if block.mixing == "shaped" else 1
            assert layer.attention.mixing.alpha.flatten().tolist() == [1.0] * heads
            assert layer.attention.mixing.beta.flatten().tolist() == [1.0 if block.mixing == "shaped" else 0.0] * heads
        if block.mixing == "shaped":
            assert layer.attention.mixing.gamma.flatten().tolist() == [1.0] * 4
        if name.startswith("sas") and number == 0:
            value = layer.attention.value
            assert (value_of(value.alpha), value_of(value.beta)) == (1.0, 1.0)
            assert (value.delta == 0).all()
            assert torch.equal(value.matrix(), torch.eye(128))
        elif not name.startswith("sas"):
            for part in (layer.attention.value, layer.attention.projection):
                if name == "v-skipinit":
                    torch.testing.assert_close(part.weight @ part.weight.T, torch.eye(128), rtol=0, atol=1e-5)
                else:
                    assert std(part.weight) == near(0.02)


def test_depth_gain_is_a_tenth_at_18_layers():
    for depth, gain in ((18, 0.1), (72, 0.05)):
        with torch.device("cpu"):
            model = CausalLM(ModelConfig(block="sas-p", n_layer=depth, d_model=8, n_head=2, vocab_size=8))
        assert [value_of(block.beta_ff) for block in model.blocks] == pytest.approx([gain] * depth)


def test_gain_can_be_set():
    model = CausalLM(
        ModelConfig(block=BLOCKS["sas"].replace(beta_ff=0.05), n_layer=2, d_model=8, n_head=2, vocab_size=8)
    )
    assert value_of(model.blocks[0].beta_ff) == pytest.approx(0.05)
    assert isinstance(model.blocks[0].beta_ff, torch.nn.Parameter)


def test_query_norm_starts_at_zero_instead_of_the_query():
    """A norm in front of a zero query would have a gradient of 1/√eps."""
    model = CausalLM(ModelConfig(block=VARIANTS["qk-norm"], n_layer=1, d_model=64, n_head=2))
    attention = model.blocks[0].attention
    assert (attention.query_norm.weight == 0).all()
    assert std(attention.query.weight) == pytest.approx(0.02, rel=0.1)


def test_sinusoids_are_as_large_as_the_embedding():
    model = CausalLM(ModelConfig(n_layer=1, d_model=768, n_head=12, vocab_size=2000))
    positions = model.positions(torch.arange(128)[None], torch.float32)
    assert rms(positions) == pytest.approx(0.02, rel=0.01)
    scaled = CausalLM(ModelConfig(n_layer=1, d_model=64, positions="scaled-sinusoidal"))
    assert value_of(scaled.positions.scale) == pytest.approx(64**-0.5)


def test_embedding_is_normed_where_the_blocks_are_not():
    sizes = {}
    for name in ("sas-p", "sas-p-nonorm"):
        model = CausalLM(ModelConfig(block=name, n_layer=1, d_model=64))
        model.blocks[0].register_forward_pre_hook(lambda _, args, name=name: sizes.update({name: rms(args[0])}))
        model(torch.randint(4096, (2, 64)))
        assert isinstance(model.norm, RMSNorm)
    assert sizes["sas-p"] == pytest.approx(0.02 * math.sqrt(2), rel=0.2)
    assert sizes["sas-p-nonorm"] == pytest.approx(1, rel=0.001)
    off = CausalLM(ModelConfig(block="sas-p-nonorm", n_layer=1, d_model=64, embedding_norm=False))
    assert isinstance(off.embedding_norm, torch.nn.Identity)


# ------------------------------------------------------------- move, save, shard, compile


def tiny(block, kind=CausalLM, **more):
    cfg = ModelConfig(block=block, n_layer=2, d_model=16, n_head=2, vocab_size=32, max_seq_len=32)
    return disturbed(kind(cfg, **more))


@pytest.mark.parametrize("name", VARIANTS)
def test_state_dict_through_safetensors(name, tmp_path):
    model, ids = tiny(VARIANTS[name]), torch.randint(32, (2, 9))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = tiny(VARIANTS[name])
    assert not torch.equal(other(ids), model(ids))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(ids), model(ids))


@pytest.mark.parametrize("name", VARIANTS)
def test_meta_construction_then_init(name):
    """Built on the meta device, given memory full of nonsense, and initialised: the same as built at once."""
    cfg = tiny(VARIANTS[name]).config
    with torch.device("meta"):
        model = CausalLM(cfg)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7.0)
    torch.manual_seed(3)
    init_weights(model)
    torch.manual_seed(3)
    straight = CausalLM(cfg)
    torch.manual_seed(3)
    init_weights(straight)
    for (key, a), b in zip(model.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_follows_to(name):
    model, ids = tiny(VARIANTS[name]), torch.randint(32, (2, 9))
    model.to(torch.float64)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}
    assert model(ids).dtype == torch.float64
    assert model.loss(ids, ids).dtype == torch.float64
    inside = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        loose = [k for k, v in vars(module).items() if isinstance(v, torch.Tensor) and id(v) not in inside]
        assert not loose, (type(module), loose)


@pytest.mark.parametrize("kind", [CausalLM, pytest.param(MaskedLM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BLOCKS)
def test_compiles_as_one_graph(name, kind):
    torch.compiler.reset()
    model = tiny(name, kind)
    ids, labels = torch.randint(32, (2, 2, 17))
    eager = model.loss(ids, labels)
    expected = torch.autograd.grad(eager, list(model.parameters()), allow_unused=True)
    # inductor for some; for the others the tracing alone, which is what fullgraph can break
    backend = "inductor" if kind is CausalLM and name in ("pre-ln", "sas-p") else "aot_eager"
    compiled = torch.compile(model.loss, fullgraph=True, backend=backend)(ids, labels)
    got = torch.autograd.grad(compiled, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["fig4", "qk-norm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tied-all", "bert-sas", "gpt2"))]
)
@pytest.mark.parametrize(
    "positions", ["alibi", *(pytest.param(p, marks=pytest.mark.slow) for p in ("rotary", "learned"))]
)
def test_variants_trace_as_one_graph(name, positions):
    torch.compiler.reset()
    cfg = ModelConfig(block=VARIANTS[name], n_layer=2, d_model=16, n_head=2, vocab_size=32, positions=positions)
    model, ids = disturbed(CausalLM(cfg)), torch.randint(32, (2, 9))
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-4, atol=1e-5)


def test_gains_are_known():
    """Every trainable scalar is one that its module can set again."""
    model = CausalLM(ModelConfig(block="sas-p", n_layer=2, d_model=16, n_head=2))
    gains = {
        f"{path}.{name}" for path, m in model.named_modules() if isinstance(m, WithGains) for name in m.initial_gains
    }
    scalars = {name for name, p in model.named_parameters() if p.numel() <= 2}
    assert gains == scalars
    assert len(gains) == 2 * (2 + 3) + 2


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": "saz"}, "unknown block 'saz'.*pre-ln.*did you mean 'sas'"),
        ({"n_head": 3}, "n_head 3 does not divide d_model 64"),
        ({"n_head": 64, "positions": "rotary"}, "even width per head"),
        ({"n_layer": -1}, "greater than or equal to 1"),
        ({"n_layr": 3}, "n_layr"),
        ({"d_model": 7, "n_head": 7}, "even d_model"),
        ({"dropout": 1.0}, "less than 1"),
        ({"block": {"layout": "parallel"}}, "alpha_sa=0"),
        ({"block": "sas:alpha_comb=1"}, "parallel"),
        ({"block": "sas:projection.init=all-tied"}, "identity map has no W_init"),
        ({"block": "pre-ln:projection.init=all-tied"}, "needs value.init 'orthogonal'"),
        ({"block": "pre-ln:value.init=all-tied"}, "it is the projection that is tied"),
        ({"block": "pre-ln:value.kind=reparam"}, "needs an init"),
        ({"block": "parallel:norm_position=post"}, "sequential layout only"),
        ({"block": "pre-ln:alpha_sa=0,beta_sa=0"}, "no output"),
        ({"block": "pre-ln:mlp=glu", "d_ff": 33}, "must be even"),
        ({"block": "pre-ln:alpha=0.5"}, "the skips are alpha_sa"),
        ({"block": "v-skipinit:gamma=0.5"}, "gamma belongs to mixing 'shaped'"),
        ({"block": "sas:beta=null"}, "no attention"),
        ({"d_model": 2_000_000, "n_head": 1}, "less than or equal to 1000000"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"d_model": 64, **changes})


def test_configurations_are_frozen_and_round_trip():
    cfg = ModelConfig(block="sas-p", n_layer=3)
    with pytest.raises(ValueError, match="frozen"):
        cfg.n_layer = 4
    assert ModelConfig.model_validate_json(cfg.model_dump_json()) == cfg
    for block in VARIANTS.values():
        assert BlockConfig.model_validate_json(block.model_dump_json()) == block


def test_bad_tensors():
    model = tiny("sas")
    ids = torch.randint(32, (2, 8))
    with pytest.raises(ValueError, match="33 tokens is longer than max_seq_len 32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    for wrong in (32, -1):
        with pytest.raises(IndexError, match=r"token ids must lie in 0…31, got"):
            model(torch.full((1, 2), wrong))
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of the ids, \(2, 8\), got \(2, 7\)"):
        model(ids, attention_mask=torch.ones(2, 7, dtype=torch.long))
    with pytest.raises(ValueError, match=r"1 for real tokens and 0 for padding, got torch\.float32"):
        model(ids, attention_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="got list"):
        model(ids.tolist())
    with pytest.raises(ValueError, match="documents must have the shape"):
        model(ids, documents=torch.ones(1, 8))
    with pytest.raises(ValueError, match="labels must have the shape"):
        model.loss(ids, ids[:, :4])
    with pytest.raises(ValueError, match="integers"):
        model(torch.randn(2, 8))
    with pytest.raises(ValueError, match="integers"):
        model(ids[0])
    with pytest.raises(ValueError, match="num_labels"):
        SequenceClassifier(model.config, num_labels=0)
    with pytest.raises(ValueError, match=r"labels must be \(2,\), one for each sequence, got \(2, 1\)"):
        SequenceClassifier(model.config, num_labels=1).loss(ids, torch.ones(2, 1))


def test_gains_by_number_text_and_file():
    """The same rule everywhere: a number changes the value of a gain and leaves it as trainable as it was."""
    sas, trained = BLOCKS["sas"], GainConfig(init=0.2, trainable=True)
    for changed in (
        sas.replace(beta_ff=0.2),
        sas.override({"beta_ff": "2e-1"}),
        sas.merge({"beta_ff": 0.2}),
        sas.merge({"beta_ff": {"init": 0.2}}),
        parse_block("sas:beta_ff=2e-1"),
    ):
        assert changed.beta_ff == trained
    assert parse_block("pre-ln:beta_ff=depth").beta_ff == GainConfig(init="depth")
    for nothing in (0, "0", None, {"init": "0"}, {"init": 0, "trainable": "no"}, GainConfig(init=0)):
        assert BlockConfig(alpha_sa=nothing).alpha_sa is None
    with pytest.raises(ValueError, match="beta_ff"):
        sas.replace(beta_ff=True)


def test_autocast_loss_is_float32():
    for name in BLOCKS:
        model, ids = tiny(name), torch.randint(32, (2, 9))
        with torch.autocast("cpu", torch.bfloat16, enabled=not BF16_PROBLEM):
            assert model.loss(ids, ids).dtype == torch.float32, name


def test_nothing_masked_is_no_loss():
    model, ids = tiny("sas", MaskedLM), torch.randint(32, (2, 9))
    loss = model.loss(ids, torch.full_like(ids, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


def test_reparameterised_map_is_equation_6():
    model = tiny(VARIANTS["gains-orthogonal"])
    value = model.blocks[0].attention.value
    assert isinstance(value, ReparamLinear)
    x = torch.randn(5, 16)
    by_hand = x @ (value.alpha * value.w_init + value.beta * value.delta).T
    torch.testing.assert_close(value(x), by_hand)
    torch.testing.assert_close(x @ value.matrix().T, by_hand)
    assert "w_init" in dict(value.named_buffers())
    assert not value.w_init.requires_grad


def test_learned_positions_are_added():
    model = CausalLM(ModelConfig(n_layer=1, d_model=16, n_head=2, vocab_size=8, positions="learned", max_seq_len=8))
    assert isinstance(model.positions, LearnedPositions)
    assert model.positions.weight.shape == (8, 16)
