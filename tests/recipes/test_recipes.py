"""Recipes are the paper's, every experiment builds at both scales, and runs are shared."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from skipless.config.block import BLOCKS
from skipless.data import prepare
from skipless.errors import UserError
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.run_index import run_key
from skipless.experiments.scale import Scale
from skipless.recipes import RECIPES, load_rates, recipe
from skipless.recipes.rates import packaged_rates, tuned
from skipless.recipes.variants import VARIANTS, block_name, find_block
from skipless.runs import MODELS
from skipless.training.trainer import Trainer, fit_vocabulary
from tests.helpers.tiny_runs import write_text
from tests.helpers.variants import APPENDIX

LAPTOP, PAPER = Scale("laptop"), Scale("paper")


def once(scale: str, key=run_key) -> dict[str, list]:
    """Experiment → the configurations that no earlier one has."""
    seen = set()
    found = {}
    for one in EXPERIMENTS.values():
        configs = {key(cfg): cfg for cfg in one.configs(Scale(scale)).values()}
        found[one.id] = [cfg for own, cfg in configs.items() if own not in seen]
        seen |= configs.keys()
    return found


@pytest.fixture(scope="module")
def unique():
    return once("laptop")


@pytest.fixture(scope="module")
def unlike():
    """What no earlier experiment has, where runs that differ in their peak rate or their length count as one."""
    alike = {"train.lr": 1e-3, "train.steps": 2000, "train.tokens": None, "train.minutes": None}
    often = dict.fromkeys(("eval_every", "log_every", "gains_every", "health_every"), 100)
    same = alike | {f"train.{key}": value for key, value in often.items()}
    return once("laptop", lambda cfg: run_key(cfg.override(same)))


@pytest.fixture(scope="module")
def papers_models():
    return once("paper", lambda cfg: (cfg.task, cfg.model))


def test_experiments_share_their_runs(unique):
    needed = {one.id: {run_key(cfg) for cfg in one.configs(LAPTOP).values()} for one in EXPERIMENTS.values()}
    assert sum(map(len, needed.values())) - len(set.union(*needed.values())) >= 35
    pre_ln = run_key(LAPTOP.decoder("pre-ln"))
    assert [id for id, keys in needed.items() if pre_ln in keys] == [
        *("fig2", "fig3", "fig5", "schedule", "preln-identity", "bits", "baseline", "rates", "trend")
    ]
    assert needed["matrix"] & needed["fig5"]
    assert not unique["tab1"]
    assert not unique["tab2"]
    assert not unique["preln-identity"][2:]


# ------------------------------------------------------------------------- two-step smoke runs


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Little text for both kinds of models."""
    folder = tmp_path_factory.mktemp("text")
    source = write_text(folder / "modules")
    changes = {"source": source, "valid_source": None, "valid_fraction": 0.2, "vocab_size": 300, "max_bytes": None}

    def corpus(cfg):
        return prepare(cfg.data.replace(**changes), cache_dir=folder / "cache")

    return corpus


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_two_steps_at_laptop_shapes(id, unlike, corpora, monkeypatch):
    # what it needs is traced elsewhere, slowly
    monkeypatch.setattr("skipless.training.trainer.plan", lambda *_, **__: SimpleNamespace(memory={"total": 0}))
    for cfg in unlike[id]:
        corpus = corpora(cfg)
        small = fit_vocabulary(cfg.override({"train.batch_size": 1, "train.micro_batch": None}), corpus)
        trainer = Trainer(small, corpus)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        for _ in range(2):
            measured = trainer.step()
            assert measured["grad_norm"] > 0
        assert math.isfinite(trainer.state.loss_sum)
        moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
        assert any(name.startswith("blocks.0.") for name in moved)
        assert any(name.startswith(f"blocks.{cfg.model.n_layer - 1}.") for name in moved)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_a_step_at_paper_shapes_without_memory(id, papers_models):
    """Loss and gradients, by their shapes alone."""
    for cfg in papers_models[id]:
        with torch.device("meta"):
            model = MODELS[cfg.task](cfg.model)
        assert len(model.blocks) == cfg.model.n_layer
        assert model.num_parameters() > 80e6
        model.blocks = model.blocks[:2]  # from the second on they are alike
        hidden = model.hidden(torch.zeros(1, cfg.data.seq_len, dtype=torch.long, device="meta"))
        assert hidden.shape == (1, cfg.data.seq_len, 768)
        labels = torch.zeros(cfg.data.seq_len, dtype=torch.long, device="meta")
        model.token_loss(hidden[0], labels).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


# ------------------------------------------------------------------------ the paper's settings


def test_depth_is_figure_6():
    for name, layers, gain in (("codeparrot-shallow", 18, 0.2), ("codeparrot-deep", 72, 0.1)):
        cfg = recipe(name, "sas")
        assert (cfg.model.n_layer, cfg.model.ff_width, cfg.model.block.beta_ff.init) == (layers, 1536, gain)
        assert cfg.model.block.beta_ff.trainable
        assert recipe(name, "pre-ln").model.block == BLOCKS["pre-ln"]
    assert [recipe(name, "v-skipinit").train.lr for name in ("codeparrot-shallow", "codeparrot-deep")] == [3e-4, 1e-4]
    assert recipe("codeparrot-deep", "sas").train.lr == 1e-3
    assert recipe("study-deep", "sas").model.n_layer >= 48


def authors_parameters(block: str) -> int:
    """As the authors' script counts them: frozen biases and the unused second norm of parallel blocks as well."""
    layers, d = 18, 768
    embeddings, final_norm = (50_000 + 1024) * d, 2 * d
    attention = 2 * d * d + 2 * d + (0 if block.startswith("sas") else 2 * (d * d + d))
    mlp = 8 * d * d + 4 * d + d
    gains = 4 + 3 * 12
    first_value = d * d + d + 2 if block.startswith("sas") else 0
    return embeddings + final_norm + first_value + layers * (attention + mlp + 2 * d + gains)


@pytest.mark.parametrize(("block", "millions"), [("pre-ln", 166.7), ("sas", 146.1), ("sas-p", 146.1)])
def test_the_authors_decoder_has_their_parameters(block, millions):
    """Ours has those that are trained; what theirs counts beyond them is frozen or unused."""
    with torch.device("meta"):
        ours = MODELS["causal"](recipe("codeparrot-authors", block).model).num_parameters()
    theirs = authors_parameters(block)
    assert theirs / 1e6 == pytest.approx(millions, abs=0.06)
    frozen = 18 * (5 * 768 + (0 if block.startswith("sas") else 2 * 768)) + (768 if block.startswith("sas") else 0)
    gains = 18 * 40
    unused = 18 * 768 if block == "sas-p" else 0
    assert theirs - frozen - unused - gains <= ours <= theirs - frozen - unused


def test_the_authors_decoder_is_their_codes():
    cfg = recipe("codeparrot-authors", "sas")
    block = cfg.model.block
    assert (cfg.model.positions, cfg.model.max_seq_len, cfg.data.seq_len) == ("learned", 1024, 128)
    assert (block.norm, block.norm_eps, cfg.model.outer_norm, block.norm_bias) == (
        "rms-plus-eps",
        1e-5,
        "layernorm",
        True,
    )
    assert (block.qk_bias, block.bias, block.alpha_ff.trainable, block.beta_ff.trainable) == (True, False, True, True)
    assert recipe("codeparrot-authors", "pre-ln").model.block.alpha_ff.trainable is False
    skipinit = recipe("codeparrot-authors", "v-skipinit").model.block
    assert (skipinit.mixing, skipinit.per_head_gains, skipinit.value.init) == ("shaped", True, "orthogonal")
    assert recipe("codeparrot-authors", "sas-p-nonorm").model.normalises_embedding
    text = recipe("codeparrot", "sas")
    assert cfg.train == text.train
    assert (text.model.positions, text.model.block.qk_bias, text.model.block.norm_eps) == ("sinusoidal", False, 1e-8)


def test_languini_is_the_papers():
    cfg = recipe("languini", "sas")
    assert (cfg.model.n_layer, cfg.model.d_model, cfg.model.ff_width, cfg.data.seq_len) == (12, 768, 3072, 512)
    assert (cfg.model.positions, cfg.model.block.activation, cfg.model.tie_embeddings) == ("alibi", "gelu", True)
    assert (cfg.train.batch_size, cfg.train.micro_batch, cfg.train.steps, cfg.train.warmup) == (128, 16, 19_000, 500)
    assert [recipe("languini", block).train.lr for block in ("sas", "sas-p", "pre-ln", "parallel")] == [
        *(3e-3, 3e-3, 1e-3, 1e-3)
    ]
    with torch.device("meta"):
        size = MODELS["causal"](recipe("languini", "pre-ln").model).num_parameters()
    assert size == pytest.approx(100e6, rel=0.03)


def test_bert_is_the_papers():
    cfg = recipe("crammed-bert", "sas")
    block = cfg.model.block
    assert (cfg.task, cfg.model.n_layer, cfg.model.d_model, cfg.model.ff_width) == ("masked", 16, 768, 3072)
    assert (block.mlp, block.activation, block.norm, block.norm_eps) == ("glu", "gelu", "layernorm", 1e-12)
    assert (block.beta_ff.init, block.beta_ff.trainable) == (0.05, True)
    train = cfg.train
    assert (train.minutes, train.batch_size, train.micro_batch, train.batch_ramp) == (1440, 8192, 64, 0.6)
    assert (train.betas, train.eps, train.clip, train.schedule, train.warmup_share) == (
        (0.9, 0.98),
        1e-12,
        0.5,
        "triangle",
        0.75,
    )
    rates = {block: recipe("crammed-bert", block).train.lr for block in ("pre-ln", "sas", "sas-p", "sas-p-nonorm")}
    assert rates == {"pre-ln": 1e-3, "sas": 3e-3, "sas-p": 3e-3, "sas-p-nonorm": 2e-3}
    assert recipe("crammed-bert", "pre-ln").model.block.beta_ff.init == 1.0


def test_longer_is_three_times_as_long():
    assert recipe("study-long", "sas").train.steps == 3 * recipe("study", "sas").train.steps


def test_variants_are_the_appendix():
    """Those that tests/helpers/variants.py states in other words."""
    same = {
        "sas-dense-orthogonal": "fig2-shaped",
        "sas-dense-identity": "vp-lr-identity",
        "sas-identity-0.2": "fig3-identity-0.2",
        "sas-orthogonal-0": "fig3-orthogonal-0",
        "sas-orthogonal-0.5": "fig3-orthogonal-0.5",
        "sas-ll-tied-0.2": "tied-last",
        "sas-all-tied-0.2": "tied-all",
        "sas-gains": "fig4",
        "sas-p-gains": "gains-parallel",
        "sas-gains-orthogonal": "gains-orthogonal",
        "pre-ln-gains": "gains-pre-ln",
        "sas-v-skipinit-matrix": "matrix-sas",
        "sas-p-v-skipinit-matrix": "matrix-sas-p",
        "sas-identity-0": "first-value-sas",
        "sas-p-identity-first": "first-value-sas-p",
        "pre-ln-identity": "preln-identity",
        "pre-ln-identity-half": "preln-identity-half",
        "sas-no-mlp-skip": "mlp-skipless-relu",
        "sas-no-mlp-skip-0.2": "mlp-skipless-0.2",
        "sas-no-mlp-skip-0.8": "mlp-skipless-0.8",
    }
    for name, other in same.items():
        assert VARIANTS[name] == APPENDIX[other], name
    assert VARIANTS["sas-beta-ff-0.3"].beta_ff.trainable


def test_blocks_have_names():
    assert all(block_name(find_block(name)) == name for name in (*BLOCKS, *VARIANTS))
    assert block_name(find_block("sas:qk_norm=true")) == "sas-like"


# -------------------------------------------------------------------------------------- rates


def test_rates_fall_back_on_what_a_name_begins_with():
    given = {
        "study": {"sas": {"train.lr": 0.5}, "sas-p": {"train.lr": 0.25}, "sas:beta_ff=0.2": {"train.lr": 0.125}},
        "study-deep": {"sas-p": {"train.lr": 1.0}},
    }
    assert tuned("study", "sas-gains", given) == {"train.lr": 0.5}
    assert tuned("study", "sas-p-nonorm", {"study": {"sas-p-nonorm": {}}}) == {}
    assert tuned("study", "sas-p-gains", given) == {"train.lr": 0.25}
    assert tuned("study", "sas:beta_ff=0.2", given) == {"train.lr": 0.125}
    assert tuned("study", "sas:beta_ff=0.3", given) == {"train.lr": 0.5}
    assert tuned("study-deep", "sas-p", given) == {"train.lr": 1.0}
    assert tuned("study-long", "sas-p", given) == {"train.lr": 0.25}
    assert tuned("laptop", "sas", given) == {}
    assert tuned("study", "sassy", given) == tuned("studying", "sas", given) == {}
    assert recipe("study-long", "sas", given).train.lr == 0.5


def test_packaged_rates_name_recipes_and_blocks():
    for name, blocks in packaged_rates().items():
        assert name in RECIPES
        for block, values in blocks.items():
            recipe(name, block).override(values)


def test_rates_from_a_file(tmp_path):
    path = tmp_path / "best.json"
    path.write_text(json.dumps({"study": {"sas": {"train.lr": 0.007}}}))
    assert Scale("laptop", load_rates(path)).decoder("sas").train.lr == 0.007
    path.write_text(json.dumps({"stduy": {}}))
    with pytest.raises(UserError, match="did you mean 'study'"):
        load_rates(path)
    path.write_text(json.dumps({"study": {"sas": 0.007}}))
    with pytest.raises(UserError, match="recipe → block → key → value"):
        load_rates(path)


def test_changes_win_over_everything():
    cfg = Scale("laptop", {"study": {"sas": {"train.lr": 0.5}}}, {"train.lr": 0.125}).decoder("sas", {"train.lr": 0.25})
    assert cfg.train.lr == 0.125
    with pytest.raises(UserError, match="did you mean 'paper'"):
        Scale("papre")
