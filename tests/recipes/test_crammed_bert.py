"""The crammed BERT recipe: the paper's sizes and schedule, and masked language modelling on real text."""

import math
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipless import BLOCKS, MaskedLM
from skipless.config.run import RunConfig
from skipless.data import prepare
from skipless.data.batches import training_batch
from skipless.data.tokenizer import BERT_SPECIALS, fetch
from skipless.errors import UserError
from skipless.recipes import recipe
from skipless.recipes.laptop import crammed_bert_laptop
from skipless.recipes.paper import bert_block, crammed_bert
from skipless.runs import Run
from skipless.training.optimizers import decays
from skipless.training.schedule import batch_rows, learning_rate
from skipless.training.trainer import Trainer, fit_vocabulary
from tests.helpers.tiny_runs import MASKED, assert_same_run, tiny, write_config, write_text


def on_meta(cfg: RunConfig) -> MaskedLM:
    with torch.device("meta"):
        return MaskedLM(cfg.model)


# ---------------------------------------------------------------------------------- the recipe


@pytest.mark.parametrize("block", BLOCKS)
def test_parameters_of_the_paper(block):
    millions = on_meta(crammed_bert(block)).num_parameters() / 1e6
    assert millions == pytest.approx(101 if block.startswith("sas") else 120, rel=0.01)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_encoder_is_the_papers(block):
    cfg = crammed_bert(block)
    model = on_meta(cfg)
    assert (len(model.blocks), cfg.model.d_model, cfg.model.n_head, cfg.model.vocab_size) == (16, 768, 12, 32_768)
    assert {(m.up.out_features, m.down.in_features) for b in model.blocks for m in [b.mlp]} == {(3072, 1536)}
    assert cfg.model.block.activation == "gelu"
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    assert {m.eps for m in norms.values()} == {1e-12}
    assert "embedding_norm" in norms
    assert ("norm" in norms) or block == "post-ln"  # which ends in a norm of its last block
    assert any(name.startswith("blocks.") for name in norms) == (block != "sas-p-nonorm")
    assert model.positions.scale.shape == (1,)
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biases == {f"{name}.bias" for name in norms}  # cramming's layer norms have them, its linear maps do not
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert model.head is None  # tied
    gain = cfg.model.block.beta_ff
    papers = {"v-skipinit": (0.1 * math.sqrt(18 / 16), True)}  # O(1/√L), as in the decoder
    papers |= dict.fromkeys(("sas", "sas-p", "sas-p-nonorm"), (0.05, True))
    assert (gain.at_depth(16), gain.trainable) == papers.get(block, (1.0, False))


@pytest.mark.parametrize(
    ("block", "lr"),
    [
        ("pre-ln", 1e-3),
        ("parallel", 1e-3),
        ("sas", 3e-3),
        ("sas-p", 3e-3),
        ("sas-p-nonorm", 2e-3),
        ("sas:beta_ff=0.2", 3e-3),
    ],
)
def test_the_peak_learning_rate_is_the_papers(block, lr):
    assert crammed_bert(block).train.lr == lr


def test_the_training_is_the_papers():
    cfg = crammed_bert("sas")
    train = cfg.train
    assert (train.betas, train.eps, train.weight_decay, train.clip) == ((0.9, 0.98), 1e-12, 0.1, 0.5)
    assert (train.minutes, train.mask_share, cfg.data.seq_len) == (24 * 60, 0.25, 128)
    assert (cfg.data.tokenizer, cfg.data.lowercase, cfg.data.vocab_size) == ("wordpiece", True, 32_768)
    rates = [learning_rate(train, p) / train.lr for p in (0.0, 0.375, 0.75, 0.875, 1.0)]
    assert rates == pytest.approx([0.25, 0.625, 1, 0.5, 0])  # cramming's budget-triangle2 begins at a quarter
    assert [batch_rows(train, p) for p in (0.0, 0.3, 0.6, 1.0)] == [64, 4096, 8192, 8192]
    assert all(batch_rows(train, p / 100) % 64 == 0 for p in range(101))


def test_no_decay_on_gains_and_norms():
    names = {name for name, p in on_meta(crammed_bert("sas")).named_parameters() if not decays(p)}
    assert {re.sub(r"\d+", "N", name) for name in names} == {
        "positions.scale",
        *(f"{norm}.{name}" for norm in ("embedding_norm", "norm") for name in ("weight", "bias")),
        *(f"blocks.N.{norm}.{name}" for norm in ("norm_sa", "norm_ff") for name in ("weight", "bias")),
        *(f"blocks.N.{name}" for name in ("beta_sa", "beta_ff")),
        *(f"blocks.N.attention.mixing.{name}" for name in ("alpha", "beta", "gamma")),
        *(f"blocks.N.attention.value.{name}" for name in ("alpha", "beta")),
    }


def test_a_change_to_a_block_wins_over_the_recipe():
    block = crammed_bert("sas:beta_ff=0.2,activation=relu").model.block
    assert (block.beta_ff.init, block.beta_ff.trainable, block.activation, block.mlp) == (0.2, True, "relu", "glu")
    assert bert_block("sas-p", 4).beta_ff.init == pytest.approx(0.1)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_laptop_size_is_the_same_recipe(block):
    large, small = crammed_bert(block), recipe("crammed-bert-laptop", block)
    assert (small.train.tokens, small.train.minutes) == (8_000_000, None)  # the same for every block
    for key in (
        "schedule",
        "warmup_share",
        "warmup_from",
        "batch_ramp",
        "betas",
        "eps",
        "weight_decay",
        "clip",
        "mask_share",
    ):
        assert getattr(small.train, key) == getattr(large.train, key), key
    parts = (
        "layout",
        "mlp",
        "activation",
        "norm",
        "norm_eps",
        "mixing",
        "value",
        "projection",
        "first_value",
        "norm_bias",
    )
    for key in parts:
        assert getattr(small.model.block, key) == getattr(large.model.block, key), key
    for key in ("embedding_norm", "outer_norm", "dropout"):
        assert getattr(small.model, key) == getattr(large.model, key), key
    assert (small.model.positions, large.model.positions) == ("rotary", "scaled-sinusoidal")
    gains = [cfg.model.init_std * cfg.model.d_model**0.5 for cfg in (small, large)]
    assert gains[0] == pytest.approx(gains[1], rel=0.03), "a normed input is multiplied by as much"
    assert (small.train.lr > recipe("crammed-bert-laptop", "pre-ln").train.lr) == block.startswith("sas")
    assert on_meta(small).num_parameters() < 5e6


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_of_the_papers_size(block):
    """One optimiser step on two sequences: every weight moves, and stays finite."""
    cfg = crammed_bert(block)
    model = MaskedLM(cfg.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr, betas=cfg.train.betas, eps=cfg.train.eps)
    ids = torch.randint(5, cfg.model.vocab_size, (2, 128))
    hidden = torch.rand(ids.shape) < 0.25
    ids, labels = torch.where(hidden, 4, ids), torch.where(hidden, ids, -100)
    loss = model.loss(ids, labels)
    assert loss.item() == pytest.approx(np.log(cfg.model.vocab_size), abs=0.8)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.loss(ids, labels).isfinite()


# ------------------------------------------------------------------- masking, on real text


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """The laptop recipe on some of the standard library's text."""
    changes = {"data.source": "python-stdlib", "data.max_bytes": 1_000_000, "data.vocab_size": 1000}
    cfg = crammed_bert_laptop("sas-p").override(changes)
    corpus = prepare(cfg.data, cache_dir=tmp_path_factory.mktemp("cache"))
    return fit_vocabulary(cfg, corpus), corpus


def test_batches_of_real_text(real):
    cfg, corpus = real
    tokenizer = corpus.tokenizer
    rows = corpus.train.batch(cfg.train.seed, 0, 256)[:, :128]
    inputs, labels = training_batch(cfg, corpus, 0, 256)
    chosen = labels != -100
    special = np.isin(rows, tokenizer.special_ids)
    assert special.any()  # documents end in these rows
    assert not (chosen & special).any()
    assert chosen.sum(1).tolist() == [32] * 256  # a quarter of each row, so the head has a dense block of (B, 32)
    assert np.array_equal(inputs[~chosen], rows[~chosen])
    assert np.array_equal(labels[chosen], rows[chosen])
    n = chosen.sum()
    masked, kept = (inputs[chosen] == tokenizer.mask_id).sum(), (inputs[chosen] == rows[chosen]).sum()
    for count, share in ((masked, 0.8), (kept, 0.1), (n - masked - kept, 0.1)):
        assert abs(count - share * n) < 4 * np.sqrt(n * share * (1 - share)) + 0.1 * n / 900
    assert not np.isin(inputs[chosen & (inputs != rows) & (inputs != tokenizer.mask_id)], tokenizer.special_ids).any()


def test_a_batch_is_a_function_of_seed_and_number(real):
    cfg, corpus = real
    whole = training_batch(cfg, corpus, 100, 8)
    for one, other in zip(whole, training_batch(cfg, corpus, 104, 4), strict=True):
        assert np.array_equal(one[4:], other)
    other = cfg.override({"train.seed": 1})
    assert not np.array_equal(training_batch(other, corpus, 100, 8)[0], whole[0])


def test_text_is_lower_cased(real):
    _, corpus = real
    assert corpus.tokenizer.encode("Return NONE") == corpus.tokenizer.encode("return none")
    assert all(word == word.lower() for word in corpus.tokenizer._vocab if word not in BERT_SPECIALS)


@pytest.mark.parametrize("rows", [2, 24])
def test_the_loss_is_that_of_all_logits_at_the_masked_positions(real, rows):
    """Also where there are more masked positions than the chunked loss holds at once, and so are the gradients."""
    cfg, corpus = real
    model = Trainer(cfg, corpus).model.double()
    ids, labels = map(torch.from_numpy, training_batch(cfg, corpus, 0, rows))
    weights = dict(model.named_parameters())
    loss = model.loss(ids, labels)
    full = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(full.item(), rel=1e-12)
    for name, one, other in zip(
        weights,
        torch.autograd.grad(loss, list(weights.values())),
        torch.autograd.grad(full, list(weights.values())),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-12), name


def test_it_learns(real):
    cfg, corpus = real
    changes = {"train.steps": 20, "train.tokens": None, "train.batch_size": 16, "train.micro_batch": 16}
    trainer = Trainer(cfg.override({**changes, "train.eval_rows": 32}), corpus)
    before = trainer.evaluate().loss
    for _ in range(20):
        trainer.step()
    assert trainer.evaluate().loss < before - 1


# ------------------------------------------------------------------------- a vocabulary of BERT


def test_berts_vocabulary(tmp_path):
    words = [*BERT_SPECIALS, "un", "##aff", "##able", "the", ","]
    for end in ("\n", "\r\n"):
        (tmp_path / "vocab.txt").write_bytes(end.join([*words, ""]).encode())
        tokenizer = fetch(str(tmp_path / "vocab.txt"))
        assert tokenizer.encode("The UNAFFABLE, zz") == [8, 5, 6, 7, 9, 1]
        assert (tokenizer.mask_id, tokenizer.pad_id, tokenizer.end_id, tokenizer.vocab_size) == (4, 0, 3, 10)
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "The"]))
    assert fetch(str(tmp_path / "vocab.txt")).encode("The the") == [10, 8]


def test_a_text_that_is_no_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    with pytest.raises(UserError, match=r"not a BERT vocabulary: \[CLS\], \[SEP\], \[MASK\] missing"):
        fetch(str(tmp_path / "vocab.txt"))


# ----------------------------------------------------------------------------------------- kills

BERT = {
    **MASKED,
    "data.lowercase": True,
    "model.block": bert_block("sas-p", 2).model_dump(),
    "model.positions": "scaled-sinusoidal",
    "model.embedding_norm": True,
    "model.outer_norm": "layernorm",
    "train.schedule": "triangle",
    "train.batch_size": 8,
    "train.micro_batch": 2,
    "train.batch_ramp": 0.6,
    "train.betas": [0.9, 0.98],
    "train.eps": 1e-12,
    "train.clip": 0.5,
    "train.log_every": 1,
    "train.save_every": 1,
    "train.eval_every": 0,
}


@pytest.fixture
def start(tmp_path, fork_server):
    """Starts or resumes a training of a configuration, as a process."""
    source = write_text(tmp_path / "modules")

    def begin(name, **train):
        cfg = tiny(source, BERT, **train)
        file = write_config(tmp_path / "config.yaml", cfg)
        words = ["train", "--config", str(file), "--name", name, "--runs", str(tmp_path / "runs")]
        words += ["--cache-dir", str(tmp_path / "cache"), "--track", "none", "--resume"]
        return cfg, fork_server.start(words), tmp_path / "runs" / name

    return begin


def kill_at(child, folder: Path, step: int) -> None:
    child.wait_until(lambda: (folder / "checkpoints" / f"step-{step:08}").exists() or _newest(folder) >= step)
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.err


def _newest(folder: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*")), default=-1)


def test_with_a_budget_in_steps_a_kill_changes_nothing(start):
    _, child, reference = start("reference", steps=60)
    assert child.wait() == 0, child.err
    for step in (5, 30):
        _, child, folder = start("killed", steps=60)
        kill_at(child, folder, step)
    _, child, folder = start("killed", steps=60)
    assert child.wait() == 0, child.err
    assert_same_run(folder, reference)
    sizes = {record["batch_size"] for record in Run(reference).metrics() if "batch_size" in record}
    assert sizes == {2, 4, 6, 8}


@pytest.mark.slow
def test_with_a_budget_in_time_the_schedule_goes_on_from_the_elapsed_time(start):
    """Learning rate and batch of every step follow from the time that the steps before it took, over the kill too."""
    cfg, child, folder = start("clock", steps=None, minutes=0.05)
    kill_at(child, folder, 12)
    killed_at = _newest(folder)
    _, child, folder = start("clock", steps=None, minutes=0.05)
    assert child.wait() == 0, child.err
    records = [record for record in Run(folder).metrics() if "lr" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) > killed_at
    before = 0.0
    for record in records:
        assert record["seconds"] >= before
        progress = before / 3.0
        assert record["lr"] == pytest.approx(learning_rate(cfg.train, progress), abs=cfg.train.lr * 0.002)
        allowed = {batch_rows(cfg.train, max(progress + shift, 0)) for shift in (-0.001, 0, 0.001)}
        assert record["batch_size"] in allowed
        before = record["seconds"]
    assert before >= 3.0
