"""The fine-tuning of one task with one seed: its protocol, its checkpoints, and what it says of numbers not finite."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config.run import FinetuneConfig
from skipless.data.glue import TASKS, read_task
from skipless.errors import UserError
from skipless.runs import load
from skipless.storage.checkpoints import Checkpoints
from skipless.tasks.classifier_fit import Unstable, make_classifier
from skipless.tasks.task_rows import epoch_batches
from skipless.training.schedule import learning_rate
from tests.helpers.glue_files import small_glue
from tests.helpers.glue_fits import QUICK, fit_of

# ------------------------------------------------------------------------------- the protocol


def test_the_protocol_is_the_papers():
    cfg = FinetuneConfig()
    assert (cfg.epochs, cfg.batch_size, cfg.lr, cfg.dropout, cfg.seq_len) == (5, 32, 1.5e-4, 0.1, 128)
    assert (cfg.betas, cfg.eps, cfg.weight_decay, cfg.clip) == ((0.9, 0.98), 1e-6, 0.0, None)
    training = cfg.training(1000, seed=0)
    assert learning_rate(training, 0.05) == pytest.approx(0.5 * 1.5e-4)
    assert learning_rate(training, 0.1) == pytest.approx(1.5e-4)
    assert learning_rate(training, 0.55) == pytest.approx(0.5 * 1.5e-4)
    assert learning_rate(training, 1.0) == pytest.approx(0)


def test_dropout_is_where_the_paper_has_it(run, glue):
    model = fit_of(run, glue).model
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert run.config().model.dropout == 0.0


@settings(max_examples=50)
@given(count=st.integers(1, 400), size=st.integers(1, 16), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_an_epoch_sees_every_row_once(count, size, seed, epoch):
    lengths = np.random.default_rng(count).integers(1, 50, count)
    batches = epoch_batches(lengths, size, [seed, epoch])
    assert len(batches) == math.ceil(count / size)
    assert sorted(np.concatenate(batches)) == list(range(count))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    again = epoch_batches(lengths, size, [seed, epoch])
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))


def test_epochs_differ_and_rows_of_a_batch_are_of_one_length():
    lengths = np.random.default_rng(0).integers(5, 100, 5000)
    first, second = (epoch_batches(lengths, 32, [0, epoch]) for epoch in (0, 1))
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))
    padded = sum(len(batch) * lengths[batch].max() for batch in first)
    assert padded < 1.1 * lengths.sum()  # at random it would be 1.8


def test_a_batch_is_padded_to_its_longest(run, glue):
    rows = fit_of(run, glue).train
    order = np.argsort([len(ids) for ids in rows.ids])
    ids, mask = rows.batch(order[[0, -1]], pad_id=0)
    assert ids.shape == mask.shape == (2, len(rows.ids[order[-1]]))
    assert mask.sum(1).tolist() == [len(rows.ids[row]) for row in order[[0, -1]]]
    assert ids[0][mask[0]].tolist() == rows.ids[order[0]]
    assert rows.batch(order[[0, 0]], pad_id=0)[1] is None


def test_the_classifier_has_the_encoder_of_the_run(run):
    encoder, config = load(run.folder), run.config()
    model = make_classifier(config, FinetuneConfig(dropout=0.0), encoder, 3)
    ids = torch.randint(config.model.vocab_size, (2, 9))
    assert torch.equal(model.hidden(ids), encoder.hidden(ids))
    scratch = make_classifier(config, FinetuneConfig(dropout=0.0), None, 3)
    assert not torch.allclose(scratch.hidden(ids), encoder.hidden(ids), atol=1e-2)


def test_head_only_moves_the_head_alone(run, glue):
    fit = fit_of(run, glue, cfg=QUICK.replace(head_only=True))
    before = {name: value.clone() for name, value in fit.model.state_dict().items()}
    fit.step()
    changed = {name for name, value in fit.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"}


def test_a_subset_follows_the_file(run, glue):
    rows = fit_of(run, glue, cfg=QUICK.replace(rows=10)).train
    assert len(rows.ids) == 10
    lines = rows.lines(range(10))
    assert lines == sorted(set(lines))
    labels = read_task(glue, TASKS["cola"]).train.labels
    assert rows.labels.tolist() == [labels[line - 1] for line in lines]


def test_seeds_differ_and_one_seed_is_the_same(run, glue):
    fits = []
    for seed in (0, 0, 1):
        fits.append(fit_of(run, glue, seed=seed))
        fits[-1].step()
        fits[-1].step()
    same, other = ([fits[0].model.state_dict(), fits[n].model.state_dict()] for n in (1, 2))
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    assert not torch.equal(other[0]["pooler.weight"], other[1]["pooler.weight"])


def test_answers_have_no_dropout(run, glue):
    """Also right after a step, which has some."""
    fit = fit_of(run, glue, "stsb", QUICK.replace(dropout=0.5))
    fit.step()
    assert fit.model.training
    assert np.array_equal(fit.answers(fit.train), fit.answers(fit.train))
    assert not fit.model.training


def test_every_epoch_of_a_fit_has_an_order_of_its_own(run, glue):
    fit = fit_of(run, glue)
    epochs = []
    for _ in range(2):
        train_to(fit, fit.state.step + fit.steps_per_epoch)
        epochs.append(np.concatenate(fit.batches).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(48))
    assert epochs[0] != epochs[1]


def test_regression_answers_are_in_the_units_of_the_file(run, tmp_path):
    glue = small_glue(tmp_path / "glue", rows=400)
    fit = fit_of(run, glue, "stsb", FinetuneConfig(epochs=6, batch_size=16, lr=5e-3))
    while fit.state.step < fit.steps:
        fit.step()
    found = fit.answers(fit.train)
    assert np.abs(found - fit.train.labels).mean() < 0.7


# ---------------------------------------------------------------------------- save and restore


def train_to(fit, step: int) -> None:
    while fit.state.step < step:
        fit.step()


def assert_same_fit(fit, reference) -> None:
    """To the last bit but for the time that was spent."""
    for stem, tensors in reference.tensors().items():
        assert tensors.keys() == fit.tensors()[stem].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, fit.tensors()[stem][name]), f"{stem}: {name}"
    found, expected = fit.description(), reference.description()
    for one in (found, expected):
        del one["state"]["seconds"]
    assert found == expected


@pytest.mark.parametrize("change", [{}, {"head_only": True}, {"clip": 0.1}], ids=["all", "head", "clip"])
@pytest.mark.parametrize("task", ["cola", "stsb"])
@pytest.mark.parametrize("middle", [1, 6, 9])
def test_restored_in_the_middle_it_ends_as_if_it_had_not_been_left(run, glue, tmp_path, task, middle, change):
    """After a step, after an epoch of six, and in the midst of one."""
    cfg, checkpoints = QUICK.replace(**change), Checkpoints(tmp_path / "checkpoints")
    whole = fit_of(run, glue, task, cfg)
    assert (whole.steps_per_epoch, whole.steps) == (6, 12)
    train_to(whole, 12)
    left = fit_of(run, glue, task, cfg)
    train_to(left, middle)
    checkpoints.save(middle, left.tensors(), left.description())
    train_to(left, middle + 1)
    again = fit_of(run, glue, task, cfg)
    torch.rand(5)
    again.restore(checkpoints.latest_valid()[0])
    train_to(again, 12)
    assert_same_fit(again, whole)
    assert np.array_equal(again.answers(again.train), whole.answers(whole.train))


def test_a_checkpoint_of_version_0_1_0_is_restored(run, glue, tmp_path):
    """It had `optimizer` where there is a list of optimisers now, and no loss scale."""
    whole = fit_of(run, glue)
    train_to(whole, 12)
    left = fit_of(run, glue)
    train_to(left, 5)
    tensors, state = left.tensors(), left.description()
    tensors["optimizer"] = tensors.pop("optimizer0")
    (state["optimizer"],) = state.pop("optimizers")
    del state["scaler"], state["rng_of_others"]
    Checkpoints(tmp_path / "old").save(5, tensors, state)
    again = fit_of(run, glue)
    again.restore(Checkpoints(tmp_path / "old").latest_valid()[0])
    train_to(again, 12)
    assert_same_fit(again, whole)


def test_a_checkpoint_has_the_form_of_a_pre_training(run, glue):
    fit, stored = fit_of(run, glue), run.checkpoints().latest_valid()[0]
    assert set(fit.tensors()) == set(stored.stems)
    assert set(fit.description()) == set(stored.state) - {"journals"}


def test_other_rows_are_refused(run, glue, tmp_path):
    fit = fit_of(run, glue)
    Checkpoints(tmp_path / "one").save(0, fit.tensors(), fit.description())
    other = fit_of(run, glue, cfg=QUICK.replace(rows=10))
    with pytest.raises(UserError, match="was made with other rows of cola; begin again with --fresh"):
        other.restore(Checkpoints(tmp_path / "one").latest_valid()[0])


# ----------------------------------------------------------------------------------- stability


@pytest.mark.parametrize("layer", [1, 2])
def test_a_loss_that_is_not_finite_names_the_first_layer(run, glue, layer):
    fit = fit_of(run, glue)
    train_to(fit, 2)
    with torch.no_grad():
        next(fit.model.blocks[layer - 1].mlp.parameters()).fill_(math.nan)
    with pytest.raises(Unstable) as caught:
        fit.step()
    report = caught.value.report
    assert report["what"] == f"the loss is nan, first in layer {layer}"
    assert (report["first_in"], report["count"], report["of"]) == (f"layer {layer}", 48, 48)
    assert report["message"].startswith(f"cola, seed 0, step 3: the loss is nan, first in layer {layer}; 48 of 48 rows")
    assert caught.value.where == f"layer {layer}"


@pytest.mark.parametrize("layer", [1, 2])
def test_a_gradient_that_is_not_finite_names_its_layer(run, glue, layer):
    fit = fit_of(run, glue)
    parameter = next(fit.model.blocks[layer - 1].mlp.parameters())
    parameter.register_hook(lambda gradient: gradient * math.nan)
    before = {name: tensor.clone() for name, tensor in fit.model.state_dict().items()}
    with pytest.raises(Unstable, match=rf"the gradient's norm is nan, first in layer {layer} \(blocks\.{layer - 1}\."):
        fit.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in fit.model.state_dict().items())
    assert fit.state.step == 0


def test_a_gradient_that_is_not_finite_is_named_with_its_rows(run, with_a_word):
    fit = fit_of(run, with_a_word, cfg=FinetuneConfig(epochs=1, batch_size=40))
    word = run.tokenizer().encode("return")[-1]

    def spoil(gradient):
        spoilt = gradient.clone()
        spoilt[word] = torch.where(gradient[word] == 0, 0.0, math.inf)
        return spoilt

    fit.model.embedding.weight.register_hook(spoil)
    with pytest.raises(Unstable, match=r"the gradient's norm is \w+, first in embedding.weight") as caught:
        fit.step()
    report = caught.value.report
    assert sorted(report["rows"][:2]) == [5, 21]
    assert (len(report["rows"]), report["first_in"], report["count"]) == (20, None, 0)
    assert "every row of" in report["message"]
