"""Parts of one's own: the examples' are held to what ours are, and what is wrong with one is said in a line."""

import textwrap
import types

import pytest
import torch

import skipless
from skipless.analysis.costs import count_parameters, flops_per_token
from skipless.analysis.drawing import draw
from skipless.config.parts import PARTS, Settings, parts_in
from skipless.config.plugins import known_plugins, load_plugin
from skipless.errors import UserError
from skipless.nn.init import init_weights
from skipless.recipes import recipe
from skipless.testing import PROPERTIES, check
from tests.helpers.plugins import EVERY_PART, EXAMPLE_BLOCKS, example, no_plugins

SIZE = {"n_layer": 2, "d_model": 16, "n_head": 2, "vocab_size": 32, "max_seq_len": 8}


@pytest.fixture(autouse=True)
def _examples():
    with no_plugins():
        for name in EXAMPLE_BLOCKS:
            load_plugin(example(name))
        yield


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin and loads it."""

    def load(text, name="made_up"):
        file = tmp_path / f"{name}.py"
        file.write_text("import torch\nfrom torch import nn\nfrom skipless.parts import *\n" + textwrap.dedent(text))
        load_plugin(str(file))

    return load


# ------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("block", [*EXAMPLE_BLOCKS.values(), EVERY_PART])
def test_the_examples_have_every_property(block, name):
    check(block, name)


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("block", ["pre-ln", "sas-p", "sas:qk_norm=true", "post-ln"])
def test_so_have_our_own(block, name):
    check(block, name)


BROKEN = {
    "causality": '@part("mlp", "bad")\nclass Bad(MLP):\n    def forward(self, x): return super().forward(x.flip(1))',
    "padding": '@part("norm", "bad")\nclass Bad(RMSNorm):\n'
    "    def __init__(self, width): super().__init__(width, 1e-8)\n"
    "    def forward(self, x): return super().forward(x) + x.mean(1, keepdim=True)",
    "packing": '@part("mlp", "bad")\nclass Bad(MLP):\n    def forward(self, x): return super().forward(x.cumsum(1))',
    "caching": '@part("mixing", "bad")\nclass Bad(Softmax):\n'
    "    def combine(self, v, attended, mask): return attended + v.cumsum(2)",
    "explicit": '@part("mixing", "bad")\nclass Bad(Softmax):\n'
    "    def combine(self, v, attended, mask): return 2 * attended\n"
    "    def matrix(self, q, k, mask): return 3 * super().matrix(q, k, mask)",
    "gradients": '@part("norm", "bad")\nclass Bad(RMSNorm):\n'
    "    def __init__(self, width): super().__init__(width, 1e-8); self.extra = nn.Parameter(torch.empty(1))\n"
    "    def reset_parameters(self): nn.init.ones_(self.extra)",
    "compiling": '@part("norm", "bad")\nclass Bad(RMSNorm):\n'
    "    def __init__(self, width): super().__init__(width, 1e-8)\n"
    "    def forward(self, x):\n        print('here', x.sum().item() if not x.is_meta else 0)\n"
    "        return super().forward(x)",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_part_without_a_property_is_found_out(plugin, name):
    plugin(BROKEN[name])
    (kind,) = (kind for kind in PARTS if "bad" in PARTS[kind])
    with pytest.raises((AssertionError, torch._dynamo.exc.TorchDynamoException)):
        check(f"pre-ln:{kind}=bad", name)


def test_a_property_that_nobody_knows():
    with pytest.raises(UserError, match=r"unknown property 'causal'.*did you mean 'causality'"):
        check("pre-ln", "causal")


# ------------------------------------------------------------------------- in configurations


def test_a_configuration_names_the_part_and_what_was_set():
    cfg = skipless.ModelConfig(block="pre-ln-dyt", **SIZE)
    assert cfg.model_dump()["block"]["norm"] == {"name": "dyt", "alpha": 0.5}
    changed = cfg.override({"block.norm.alpha": 0.8})
    assert changed.block.norm.alpha == 0.8
    assert skipless.ModelConfig.model_validate_json(changed.model_dump_json()) == changed
    assert cfg.override({"block.norm": "rmsnorm"}).block == skipless.BLOCKS["pre-ln"]
    assert skipless.ModelConfig(block="pre-ln:norm={name: dyt; alpha: 0.8}", **SIZE) == changed
    assert cfg.merge({"block": {"mlp": {"name": "bilinear", "expansion": 2}}}).block.mlp.expansion == 2
    assert [part.title for part in parts_in(changed)] == ["norm 'dyt'"]
    assert list(parts_in(skipless.ModelConfig(**SIZE))) == []


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("pre-ln:norm=dyd", "'dyd' is not one of rmsnorm, rms-plus-eps, layernorm, none, dyt; did you mean 'dyt'?"),
        ("pre-ln:norm={name: dyt; alpah: 1}", "unknown key; did you mean 'alpha'"),
        ("pre-ln:norm={name: dyt; alpha: -1}", "norm 'dyt': alpha: input should be greater than 0, got -1"),
        ("pre-ln:norm={name: rmsnorm; alpha: 1}", "norm 'rmsnorm' has nothing to set, got alpha"),
        ("pre-ln:norm={alpha: 1}", "is not one of"),
        ("pre-ln-contrast:alpha=0.5", "mixing 'contrast' has no alpha"),
    ],
)
def test_wrong_settings_are_said(block, said):
    with pytest.raises(UserError, match=r"(?s).*") as found:
        skipless.config.parse_block(block)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_gains_of_ours_belong_to_a_mixing_that_has_them(plugin):
    plugin('@part("mixing", "like-shaped")\nclass Mine(Shaped): pass')
    assert skipless.BlockConfig(mixing="like-shaped", gamma=0.5).gamma.init == 0.5


@pytest.mark.parametrize(
    "name", ["crammed-bert", "crammed-bert-laptop", "languini", "study-books", "codeparrot-authors"]
)
def test_recipes_leave_parts_of_ones_own(name, plugin):
    plugin(
        """
        part("activation", "cube")(lambda x: x ** 3)
        block("mine", BLOCKS["pre-ln"].replace(norm="dyt", mlp="bilinear", activation="cube"))
        """
    )
    made = recipe(name, "mine").model.block
    assert (made.norm.name, made.mlp.name, made.activation) == ("dyt", "bilinear", "cube")


# ------------------------------------------------------------------- what it costs, how it is drawn


def test_parameters_products_and_drawing():
    cfg = skipless.ModelConfig(block="pre-ln-bilinear", **SIZE)
    hidden, d, T = round(8 / 3 * 16), 16, 8
    assert count_parameters(cfg)["MLP"] == 2 * 3 * hidden * d
    expected = 2 * (2 * 3 * hidden * d + 2 * 4 * d * d + 32 * d) + 2 * 4 * T * d
    assert flops_per_token(cfg)["forward"] == expected
    plain = skipless.ModelConfig(**SIZE)
    for other in ("pre-ln-dyt", "pre-ln-contrast"):  # which have no product of their own
        assert flops_per_token(cfg.replace(block=skipless.BLOCKS[other])) == flops_per_token(plain)
    assert count_parameters(cfg.replace(block=skipless.BLOCKS["pre-ln-dyt"]))["norms"] == 5 * (2 * 16 + 1)
    assert "DyT" in draw(skipless.BLOCKS["pre-ln-dyt"])
    assert "((1+λ)A − λC)" in draw(skipless.BLOCKS["pre-ln-contrast"])
    assert "─ Bilinear ─" in draw(skipless.BLOCKS["pre-ln-bilinear"])


def test_a_part_can_say_what_it_costs(plugin):
    plugin('@part("mlp", "told")\nclass Told(MLP):\n    def flops_per_token(self, length): return 7.0 * length')
    cfg = skipless.ModelConfig(block="pre-ln:mlp=told", **SIZE)
    without = flops_per_token(cfg.override({"block.beta_ff": 0}))["forward"]
    assert flops_per_token(cfg)["forward"] - without == 2 * 7 * 8


# ----------------------------------------------------------------------------- initialisation


def test_the_examples_start_as_they_say():
    model = skipless.CausalLM(skipless.ModelConfig(block="pre-ln-dyt:norm={name: dyt; alpha: 0.7}", **SIZE))
    norm = model.blocks[0].norm_sa
    assert norm.alpha.item() == pytest.approx(0.7)
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()
    contrast = (
        skipless.CausalLM(skipless.ModelConfig(block="pre-ln-contrast", **SIZE)).blocks[0].attention.mixing.contrast
    )
    assert contrast.shape == (2, 1, 1)
    assert contrast.eq(0).all()
    wide = skipless.ModelConfig(block="pre-ln-bilinear", **{**SIZE, "d_model": 256})
    assert skipless.CausalLM(wide).blocks[0].mlp.first.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_contrast_at_zero_is_softmax_attention():
    plain, own = (skipless.CausalLM(skipless.ModelConfig(block=name, **SIZE)) for name in ("pre-ln", "pre-ln-contrast"))
    own.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(32, (2, 8))
    torch.testing.assert_close(own(ids), plain(ids))


def test_weights_that_nobody_sets_are_refused(plugin):
    plugin(
        """
        @part("norm", "forgotten")
        class Forgotten(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(width))
            def forward(self, x): return x * self.scale
        """
    )
    with pytest.raises(UserError, match=r"norm 'forgotten': nothing sets scale of Forgotten; give .*reset_parameters"):
        skipless.CausalLM(skipless.ModelConfig(block="pre-ln:norm=forgotten", **SIZE))


def test_init_weights_leaves_a_strangers_modules_alone():
    conv = torch.nn.Conv1d(2, 2, 1)
    before = conv.weight.clone()
    init_weights(torch.nn.Sequential(conv), skipless.ModelConfig(**SIZE))
    assert conv.weight.equal(before)


# ---------------------------------------------------------------- activations, maps, positions, training


def test_every_kind_can_be_added(plugin):
    plugin(
        """
        class RankSettings(Settings):
            rank: int = Field(4, ge=1)

        @part("map", "low-rank", RankSettings, drawn=lambda s: f"W[{s.rank}]")
        class LowRank(nn.Module):
            def __init__(self, cfg, settings):
                super().__init__()
                self.a = nn.Linear(cfg.d_model, settings.rank, bias=False)
                self.b = nn.Linear(settings.rank, cfg.d_model, bias=False)
            def forward(self, x): return self.b(self.a(x))

        @part("activation", "squared-relu")
        def squared_relu(x): return torch.relu(x) ** 2

        @part("activation", "scaled")
        class Scaled(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.width, self.weight = width, nn.Parameter(torch.empty(width))
            def reset_parameters(self): nn.init.ones_(self.weight)
            def forward(self, x): return torch.tanh(x) * self.weight

        @part("positions", "ramp")
        class Ramp(Positions):
            def __init__(self, cfg):
                super().__init__()
                self.width = cfg.d_model
            def forward(self, positions, dtype):
                return (positions[..., None] / 100).expand(-1, -1, self.width).to(dtype)

        @part("positions", "half-rope")
        class HalfRope(Positions):
            def __init__(self, cfg):
                super().__init__()
                self.half = cfg.d_head // 2
            def rope(self, positions, dtype):
                angle = positions[:, None, :, None] * torch.linspace(0.1, 1, self.half, device=positions.device)
                return angle.cos().to(dtype), angle.sin().to(dtype)
        """
    )
    low = "pre-ln:value={kind: {name: low-rank; rank: 2}},projection={kind: low-rank}"
    assert "W[2] W[4]" in draw(skipless.config.parse_block(low))
    for block in (low, "pre-ln:activation=squared-relu", "pre-ln:mlp=glu,activation=scaled", "sas-p:activation=scaled"):
        check(block)
    for positions in ("ramp", "half-rope"):
        check("sas-p", positions=positions)
    model = skipless.CausalLM(skipless.ModelConfig(block="sas-p", positions="half-rope", **SIZE))
    with pytest.raises(UserError, match="rotary positions turn the keys"):
        model.new_cache(1, mode="x")


def test_a_cache_of_inputs_refuses_a_mixing_it_cannot_take_apart(plugin):
    plugin(
        """
        @part("mixing", "own-forward")
        class Own(Softmax):
            def forward(self, q, k, v, mask): return mask.attend(q, k, v) * 2
        """
    )
    model = skipless.CausalLM(skipless.ModelConfig(block="sas-p:mixing=own-forward", **SIZE))
    with pytest.raises(UserError, match="'own-forward' has a forward of its own"):
        model.new_cache(1, mode="x")


# -------------------------------------------------------------------------------- loading


def test_what_workers_are_told_to_load(plugin):
    plugin("", name="nothing_in_it")
    loaded = known_plugins()
    assert [path.rpartition("/")[2] for path in loaded] == [
        *(f"{name}.py" for name in EXAMPLE_BLOCKS),
        "nothing_in_it.py",
    ]


def test_an_installed_package_is_found_when_a_name_is_not_known(monkeypatch, tmp_path):
    (tmp_path / "installed_parts.py").write_text(
        'from skipless.parts import *\npart("activation", "installed")(lambda x: x * 2)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = types.SimpleNamespace(value="installed_parts")
    monkeypatch.setattr(
        "skipless.config.plugins.entry_points", lambda group: [point] if group == "skipless.parts" else []
    )
    monkeypatch.setattr("skipless.config.plugins._installed", [])
    assert "installed" not in PARTS["activation"]
    assert skipless.BlockConfig(activation="installed").activation == "installed"
    assert PARTS["activation"]["installed"].plugin.name == "installed_parts"


def test_settings_that_a_part_is_given_are_frozen():
    settings = skipless.BLOCKS["pre-ln-dyt"].norm
    assert isinstance(settings, Settings)
    with pytest.raises(Exception, match="frozen"):
        settings.alpha = 1.0


def test_a_plugin_may_define_its_part_again(plugin):
    plugin('part("activation", "twice")(lambda x: x)\npart("activation", "twice")(lambda x: 2 * x)')
    assert PARTS["activation"]["twice"].make(3) == 6


WRONG = {
    "a shape": (
        '@part("norm", "bad")\nclass Bad(nn.Module):\n    def __init__(self, width): super().__init__()\n'
        "    def forward(self, x): return x[..., :3]",
        r"norm 'bad' must give \(2, 3, 16\) for an input of \(2, 3, 16\), got \(2, 3, 3\)",
    ),
    "no tensor": (
        '@part("mlp", "bad")\nclass Bad(MLP):\n    def forward(self, x): return None',
        r"mlp 'bad' must give \(2, 3, 16\) .*, got NoneType",
    ),
    "a forward that raises": (
        '@part("mlp", "bad")\nclass Bad(MLP):\n    def forward(self, x): return self.down(x)',
        r"mlp 'bad' fails on an input of \(2, 3, 16\): RuntimeError",
    ),
    "a constructor that raises": (
        '@part("mixing", "bad")\nclass Bad(Softmax):\n    def __init__(self, cfg): 1 / 0',
        "mixing 'bad' cannot be made: ZeroDivisionError: division by zero",
    ),
    "settings that are not taken": (
        'class S(Settings):\n    a: int = 1\n@part("mlp", "bad", S)\nclass Bad(MLP): pass',
        "mlp 'bad' cannot be made: TypeError",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_part_that_does_not_fit_is_said_in_a_line(plugin, what):
    text, said = WRONG[what]
    plugin(text)
    (kind,) = (kind for kind in PARTS if "bad" in PARTS[kind])
    with pytest.raises(UserError, match=said) as found:
        skipless.CausalLM(skipless.ModelConfig(block=f"pre-ln:{kind}=bad", **SIZE))
    assert "\n" not in str(found.value)


def test_a_part_that_looks_at_values_is_let_through(plugin):
    plugin(
        """
        @part("norm", "by-value")
        class ByValue(nn.Module):
            def __init__(self, width): super().__init__()
            def forward(self, x): return x / (1 + x.abs().max().item())
        """
    )
    model = skipless.CausalLM(skipless.ModelConfig(block="pre-ln:norm=by-value", **SIZE))
    assert model(torch.randint(32, (1, 4))).isfinite().all()
