"""The update that pre-training and fine-tuning share: what it averages, clips, refuses, saves and restores."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from skipless import CausalLM, MaskedLM, ModelConfig, SequenceClassifier, TrainConfig, UserError
from skipless.data import prepare
from skipless.distributed import devices
from skipless.storage.checkpoints import Checkpoints
from skipless.training.optimizers import clip_gradients
from skipless.training.schedule import learning_rate
from skipless.training.stopping import NonFinite
from skipless.training.trainer import Trainer, fit_vocabulary
from skipless.training.update import MicroBatch, Update
from tests.helpers.processes import ENVIRONMENT, ROOT
from tests.helpers.tiny_runs import tiny

SHAPE = ModelConfig(block="sas-p", n_layer=3, d_model=16, n_head=2, vocab_size=32, max_seq_len=8)
DESCENT = TrainConfig(steps=10, optimizer="sgd", lr=1.0, weight_decay=0.0, clip=None, schedule="constant", warmup=0)
MODELS = {"causal": CausalLM, "masked": MaskedLM, "classifier": lambda cfg: SequenceClassifier(cfg, 3)}


def make(kind: str = "causal", cfg: TrainConfig = DESCENT, **more) -> Update:
    torch.manual_seed(1)
    return Update(MODELS[kind](SHAPE.replace(**more)), cfg)


def batch(kind: str = "causal", rows: int = 4, seed: int = 0) -> MicroBatch:
    """Random ids and labels; those of a masked model are fewer in each row than in the one before."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (rows, 8), generator=generator)
    if kind == "classifier":
        padding = torch.arange(8) < torch.arange(8, 8 - rows, -1)[:, None]
        return MicroBatch(ids, ids[:, 0] % 3, rows, padding)
    labels = torch.randint(32, (rows, 8), generator=generator)
    if kind == "masked":
        labels[torch.arange(8) > 6 - 2 * torch.arange(rows)[:, None].clamp(max=3)] = -100
    return MicroBatch(ids, labels, int((labels != -100).sum()))


def part(whole: MicroBatch, rows: slice) -> MicroBatch:
    mask = None if whole.attention_mask is None else whole.attention_mask[rows]
    labels = whole.labels[rows]
    return MicroBatch(whole.ids[rows], labels, int((labels != -100).sum()), mask)


def weights(update: Update) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in update.model.state_dict().items()}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """How far all weights together have gone."""
    return torch.cat([(after[name] - before[name]).flatten() for name in before]).double().norm().item()


# ------------------------------------------------------------------------------------ the mean


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_of_unequal_size_count_by_their_labels(kind, sizes):
    whole, at = batch(kind), [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    parts = [part(whole, slice(*ends)) for ends in itertools.pairwise(at)]
    assert len({one.weight for one in parts}) > 1
    equal = [MicroBatch(one.ids, one.labels, 1, one.attention_mask) for one in parts]
    found = []
    for batches in ([whole], parts, equal):
        update = make(kind)
        made = update.make(batches, 0.5)
        found.append((made, weights(update)))
    (once, once_weights), (split, split_weights), (wrong, wrong_weights) = found
    assert split.loss == pytest.approx(once.loss, abs=1e-5)
    assert split.grad_norm == pytest.approx(once.grad_norm, rel=1e-4)
    assert moved(once_weights, split_weights) < 1e-5
    assert abs(wrong.loss - once.loss) > 1e-4
    assert moved(once_weights, wrong_weights) > 1e-3


def test_a_micro_batch_of_no_weight_counts_for_nothing():
    alone, along = make(), make()
    other = batch(seed=1)
    first = alone.make([batch()], 0.5)
    second = along.make([batch(), MicroBatch(other.ids, other.labels, 0)], 0.5)
    assert first == second
    assert all(torch.equal(tensor, weights(along)[name]) for name, tensor in weights(alone).items())


@pytest.mark.parametrize("kind", MODELS)
def test_a_micro_batch_without_labels_counts_for_nothing(kind):
    alone, along = make(kind), make(kind)
    other = batch(kind, seed=1)
    ignored = MicroBatch(other.ids, torch.full_like(other.labels, -100), 0, other.attention_mask)
    assert along.make([ignored, batch(kind), ignored], 0.5) == alone.make([batch(kind)], 0.5)
    assert all(torch.equal(tensor, weights(along)[name]) for name, tensor in weights(alone).items())
    with pytest.raises(UserError, match="step 2: all labels are ignored"):
        along.make([ignored], 0.5, "step 2")


def test_the_loss_is_that_of_the_model_before_the_update():
    update, one = make(), batch()
    with torch.no_grad():
        expected = update.model.loss(one.ids, one.labels).item()
    assert update.make([one], 0.5).loss == expected
    assert update.make([one], 0.5).loss < expected


def test_an_update_owes_nothing_to_the_gradient_before():
    """The second one is what it would be in a new training that begins with those weights."""
    update, fresh = make(), make()
    update.make([batch()], 0.5)
    fresh.model.load_state_dict(weights(update))
    assert update.make([batch(seed=1)], 0.5) == fresh.make([batch(seed=1)], 0.5)
    assert all(torch.equal(tensor, weights(fresh)[name]) for name, tensor in weights(update).items())


def test_an_update_owes_nothing_to_what_was_done_with_the_model_before():
    """Neither through the gradients of what it trains nor, by norm and clipping, through those of what is frozen."""
    found = []
    for used in (False, True):
        torch.manual_seed(1)
        model = CausalLM(SHAPE)
        if used:
            (50 * model.loss(batch().ids, batch().labels)).backward()
        model.embedding.weight.requires_grad_(False)
        update = Update(model, DESCENT.replace(clip=0.1))
        found.append((update.make([batch()], 0.5), update.make([batch(seed=1)], 0.5), weights(update)))
    (first, second, after), (again, next_one, after_use) = found
    assert (again, next_one) == (first, second)
    assert all(torch.equal(tensor, after[name]) for name, tensor in after_use.items())


def test_a_parameter_that_no_optimiser_holds_is_not_ignored():
    torch.manual_seed(1)
    model = CausalLM(SHAPE)
    model.embedding.weight.requires_grad_(False)
    update = Update(model, DESCENT)
    update.make([batch()], 0.5)
    model.embedding.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"no optimiser holds embedding\.weight, which requires a gradient"):
        update.make([batch()], 0.5)


def test_the_sum_of_the_losses_keeps_no_graph():
    """Else what autograd holds of every micro-batch would live until the update ends."""
    update = make()
    assert not update._accumulate([batch(seed=number) for number in range(3)], 96).requires_grad
    assert all(parameter.grad is not None for parameter in update.model.parameters())


def test_the_learning_rate_is_the_schedules():
    cfg = TrainConfig(steps=10, lr=0.25, schedule="cosine", warmup=0.2)
    for progress in (0.1, 0.2, 0.7):
        update = make(cfg=cfg.replace(vp_lr_factor=0.5))
        made = update.make([batch()], progress)
        assert made.lr == learning_rate(cfg, progress)
        rates = {group["lr"] for optimizer in update.optimizers for group in optimizer.param_groups}
        assert rates == {made.lr, 0.5 * made.lr}


# ------------------------------------------------------------------------------------- clipping


@given(st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_clipping_never_scales_up(norm, largest):
    gradients = [torch.tensor([0.6, 0.0]) * norm, torch.tensor([[-0.8]]) * norm]
    before = [gradient.clone() for gradient in gradients]
    clip_gradients(gradients, largest, torch.nn.utils.get_total_norm(gradients))
    after = torch.nn.utils.get_total_norm(gradients).item()
    assert after <= norm * (1 + 1e-6)
    assert after <= largest * (1 + 1e-5)
    if norm < 0.99 * largest - 1e-6:
        assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))
    elif norm > 1.01 * largest:
        assert after == pytest.approx(largest, rel=1e-2)


def test_a_gradient_below_the_limit_makes_the_update_that_it_makes_without_one():
    free, clipped = make(), make(cfg=DESCENT.replace(clip=1e4))
    assert free.make([batch()], 0.5) == clipped.make([batch()], 0.5)
    assert all(torch.equal(tensor, weights(clipped)[name]) for name, tensor in weights(free).items())


def test_a_gradient_above_the_limit_is_as_long_as_it():
    update = make(cfg=DESCENT.replace(clip=1e-2))
    before = weights(update)
    assert update.make([batch()], 0.5).grad_norm > 0.1, "the norm is that before clipping"
    assert moved(before, weights(update)) == pytest.approx(1e-2, rel=1e-3)


# ------------------------------------------------------------------------------- finite numbers


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_that_is_not_finite_names_the_first_layer(kind, layer):
    update = make(kind)
    with torch.no_grad():
        next(update.model.blocks[layer - 1].mlp.parameters()).fill_(math.inf)
    before = weights(update)
    with pytest.raises(NonFinite) as caught:
        update.make([batch(kind, rows=2), batch(kind, rows=2, seed=1)], 0.5, "step 7")
    assert (caught.value.what, caught.value.where) == ("the loss is nan", f"layer {layer}")
    assert str(caught.value) == f"step 7: the loss is nan, first in layer {layer}; the update was not made"
    assert all(torch.equal(tensor, weights(update)[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("names", "where"),
    [
        (["blocks.1.mlp.up.weight"], "layer 2 (blocks.1.mlp.up.weight)"),
        (["blocks.0.mlp.up.weight", "blocks.2.mlp.up.weight"], "layer 3 (blocks.2.mlp.up.weight)"),
        (["embedding.weight"], "embedding.weight"),
        (["embedding.weight", "blocks.0.mlp.up.weight", "norm.weight"], "norm.weight"),
    ],
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_gradient_that_is_not_finite_names_the_parameter_nearest_to_the_loss(kind, names, where):
    update = make(kind)
    named = dict(update.model.named_parameters())
    hooks = [named[name].register_hook(lambda gradient: gradient * math.inf) for name in names]
    before = weights(update)
    with pytest.raises(NonFinite) as caught:
        update.make([batch(kind)], 0.5)
    assert caught.value.what in ("the gradient's norm is inf", "the gradient's norm is nan")
    assert caught.value.where == where
    assert all(torch.equal(tensor, weights(update)[name]) for name, tensor in before.items())
    for hook in hooks:
        hook.remove()
    again, fresh = update.make([batch(kind)], 0.5), make(kind).make([batch(kind)], 0.5)
    assert again == fresh, "nothing of the bad gradient is left"


# ----------------------------------------------------------------------------------------- cost


class Transfers(TorchDispatchMode):
    """Counts numbers that are read from the device, each of which waits for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_update_waits_for_the_device_twice(micro_batches):
    update, batches = make(cfg=TrainConfig(steps=10)), [batch()] * micro_batches
    with Transfers() as transfers:
        update.make(batches, 0.5)
    assert transfers.count == 2  # the loss and the norm


# ------------------------------------------------------------------------------------ precision


BF16 = """
import torch
from tests.training.test_update import batch, make, weights
from skipless import TrainConfig
from skipless.training.update import Update

plain = make(cfg=TrainConfig(steps=10))
cast = Update(make().model, plain.cfg, dtype=torch.bfloat16)
seen = set()
cast.model.blocks[0].mlp.up.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
before = weights(cast)
one, other = (update.make([batch()], 0.5) for update in (plain, cast))
assert seen == {torch.bfloat16}, seen
assert one.loss != other.loss and abs(one.loss - other.loss) < 0.02, (one, other)
assert abs(one.grad_norm / other.grad_norm - 1) < 0.1, (one, other)
after = weights(cast)
assert {tensor.dtype for tensor in after.values()} == {torch.float32}
assert all(tensor.isfinite().all() for tensor in after.values())
assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
"""


def test_an_update_with_products_in_bfloat16():
    """In a process of its own: on some CPUs such a product ends the process."""
    try:
        devices.check_cpu_bf16()
    except UserError as problem:
        pytest.skip(str(problem))
    done = subprocess.run([sys.executable, "-c", BF16], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_overflows_in_float16_changes_nothing_but_the_loss_scale(value):
    """The embedding is AdamW's. Muon's matrices, whose gradients are finite, wait too, and so does the average."""
    update = Update(make().model, TrainConfig(steps=10, optimizer="muon", ema=0.5), dtype=torch.float16)
    assert len(update.optimizers) == 2
    before, scale = weights(update), update.scaler.get_scale()
    averages = {name: tensor.clone() for name, tensor in update.average.tensors.items()}
    hook = update.model.embedding.weight.register_hook(lambda gradient: torch.full_like(gradient, value))
    update.make([batch()], 0.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(update).items())
    assert all(torch.equal(tensor, averages[name]) for name, tensor in update.average.tensors.items())
    assert (update.average.steps, update.scaler.get_scale()) == (0, scale / 2)
    hook.remove()
    update.make([batch()], 0.5)
    assert not torch.equal(weights(update)["embedding.weight"], before["embedding.weight"])
    assert update.nonfinite_parameters() == []


# ---------------------------------------------------------------------------- save and restore


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("kind", MODELS)
def test_restored_it_makes_the_updates_that_would_have_followed(tmp_path, kind, optimizer):
    cfg = TrainConfig(steps=10, optimizer=optimizer, lr=0.01)
    update = make(kind, cfg, dropout=0.2)
    for number in range(3):
        update.make([batch(kind, seed=number)], 0.5)
    Checkpoints(tmp_path).save(3, update.tensors(), update.state())
    expected = [update.make([batch(kind, seed=number)], 0.5) for number in range(3, 6)]
    again = make(kind, cfg, dropout=0.2)
    torch.rand(7)
    again.restore(Checkpoints(tmp_path).latest_valid()[0])
    assert [again.make([batch(kind, seed=number)], 0.5) for number in range(3, 6)] == expected
    for stem, tensors in update.tensors().items():
        assert tensors.keys() == again.tensors()[stem].keys()
        assert all(torch.equal(tensor, again.tensors()[stem][name]) for name, tensor in tensors.items())


def test_another_optimiser_and_another_model_are_refused(tmp_path):
    update = make()
    Checkpoints(tmp_path).save(3, update.tensors(), update.state())
    checkpoint = Checkpoints(tmp_path).latest_valid()[0]
    with pytest.raises(UserError, match="was made with another optimiser than 'muon'"):
        make(cfg=DESCENT.replace(optimizer="muon")).restore(checkpoint)
    with pytest.raises(UserError, match="holds another model than the configuration"):
        make(n_layer=2).restore(checkpoint)


def test_a_trainers_checkpoint_is_that_of_its_update(source, cache_dir):
    """So that what restores one training restores the other."""
    cfg = tiny(source)
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    trainer = Trainer(fit_vocabulary(cfg, corpus), corpus)
    assert trainer.tensors().keys() == trainer.update.tensors().keys()
    assert trainer.description() == {
        "state": vars(trainer.state),
        "data": corpus.fingerprint,
        **trainer.update.state(),
    }
