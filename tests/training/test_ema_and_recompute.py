"""The average of the weights over steps, and blocks that run again in the backward pass."""

import pytest
import torch

import skipless
from skipless.analysis.costs import saved_bytes, training_memory
from skipless.config.run import TrainConfig
from skipless.data import prepare
from skipless.errors import UserError
from skipless.nn.model import CausalLM
from skipless.runs import load
from skipless.storage.checkpoints import Checkpoints
from skipless.training.recompute import recompute_blocks
from skipless.training.train import train
from skipless.training.trainer import Trainer, fit_vocabulary
from skipless.training.update import MicroBatch, Update
from tests.helpers.tiny_runs import Stop, assert_same_run, newest, records, stop_at, tiny

AVERAGED = {"train.ema": 0.9, "model.dropout": 0.1}
RECOMPUTED = {"train.activation_checkpointing": True, "model.dropout": 0.1}


def batch(cfg, seed: int) -> MicroBatch:
    ids = torch.randint(cfg.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(ids[:, :-1], ids[:, 1:], 16)


def test_the_average_is_the_formula():
    cfg = tiny("python-stdlib").model
    model = CausalLM(cfg)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = Update(model, TrainConfig(steps=9, ema=0.5))
    for step in range(1, 9):
        update.make([batch(cfg, step)], 0.5)
        factor = min(0.5, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            expected[name] = factor * expected[name] + (1 - factor) * parameter.detach()
    for name, tensor in update.average.tensors.items():
        torch.testing.assert_close(tensor, expected[name])


def test_the_weights_come_back_after_the_average_was_in_their_place():
    cfg = tiny("python-stdlib").model
    update = Update(CausalLM(cfg), TrainConfig(steps=9, ema=0.9))
    update.make([batch(cfg, 0)], 0.5)
    weights = {name: tensor.clone() for name, tensor in update.model.state_dict().items()}
    averages = {name: tensor.clone() for name, tensor in update.average.tensors.items()}

    def looked_at_and_left():
        with update.average.in_place():
            assert all(torch.equal(p, averages[name]) for name, p in update.model.named_parameters())
            raise Stop

    with pytest.raises(Stop):
        looked_at_and_left()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in update.model.state_dict().items())
    assert all(torch.equal(tensor, averages[name]) for name, tensor in update.average.tensors.items())


def test_the_average_of_a_model_in_bfloat16_is_not_rounded(tmp_path):
    """Neither by its many small steps, nor by an evaluation, nor in a checkpoint."""
    cfg = tiny("python-stdlib").model
    update = Update(CausalLM(cfg).bfloat16(), TrainConfig(steps=9, ema=0.999))
    average = update.average
    average.steps, begun = 10**5, {name: p.detach().double() for name, p in update.model.named_parameters()}
    with torch.no_grad():
        update.model.embedding.weight.add_(1.0)
    for _ in range(2000):
        average.update()
    weights = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    for name, tensor in average.tensors.items():
        expected = weights[name] + 0.999**2000 * (begun[name] - weights[name])
        torch.testing.assert_close(tensor, expected.float(), atol=1e-4, rtol=1e-3)

    before = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with average.in_place():
        for name, p in update.model.named_parameters():
            assert torch.equal(p, before[name].bfloat16())
    assert all(torch.equal(p, weights[name]) for name, p in update.model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in average.tensors.items())

    checkpoint = Checkpoints.load(Checkpoints(tmp_path).save(1, update.tensors(), update.state()))
    again = Update(CausalLM(cfg).bfloat16(), TrainConfig(steps=9, ema=0.999))
    again.restore(checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.average.tensors.items())
    rounded = {stem: {name: t.bfloat16() for name, t in named.items()} for stem, named in update.tensors().items()}
    again.restore(Checkpoints.load(Checkpoints(tmp_path).save(2, rounded, update.state())))
    assert all(tensor.dtype == torch.float32 for tensor in again.average.tensors.values())


def test_a_run_in_bfloat16_keeps_its_average(tmp_path):
    cfg = tiny("python-stdlib").model
    rows = [torch.arange(9) + number for number in range(8)]
    how = {"steps": 4, "ema": 0.9, "batch_size": 4, "sample_every": 0, "valid": rows[:2], "eval_every": 2}
    skipless.fit(CausalLM(cfg).bfloat16(), rows, folder=tmp_path / "run", **how)
    held = Checkpoints.load(newest(tmp_path / "run")).tensors("ema")
    opened = dict(load(tmp_path / "run", average=True).named_parameters())
    for name, tensor in held.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(opened[name].float(), tensor, atol=1e-2, rtol=1e-2)


def test_the_average_is_evaluated_beside_the_weights_and_changes_nothing(tmp_path, source, cache_dir):
    """At a rate at which the weights jump about, the average is better by far."""
    high = {
        "train.lr": 0.1,
        "train.schedule": "constant",
        "train.steps": 80,
        "train.batch_size": 1,
        "train.eval_every": 40,
    }
    plain, averaged = (
        train(tiny(source, high, more), tmp_path / name, trackers=[], cache_dir=cache_dir)
        for name, more in (("plain", {}), ("averaged", {"train.ema": 0.9}))
    )
    without, beside = ([line for line in records(run.folder) if "valid_loss" in line] for run in (plain, averaged))
    assert [line["valid_loss"] for line in without] == [line["valid_loss"] for line in beside]
    assert "ema_valid_loss" not in without[-1]
    assert beside[-1]["ema_valid_loss"] < beside[-1]["valid_loss"] - 0.1
    model = "model.safetensors"
    assert (newest(plain.folder) / model).read_bytes() == (newest(averaged.folder) / model).read_bytes()

    opened, weights = load(averaged.folder, average=True), load(averaged.folder)
    cfg, corpus = averaged.config(), prepare(averaged.config().data, cache_dir=cache_dir)
    trainer = Trainer(fit_vocabulary(cfg, corpus), corpus)
    for one, key in ((opened, "ema_valid_loss"), (weights, "valid_loss")):
        trainer.model.load_state_dict(one.state_dict())
        assert trainer.evaluate().loss == pytest.approx(beside[-1][key], abs=1e-6)
    with pytest.raises(UserError, match="no average of the weights"):
        load(plain.folder, average=True)


@pytest.mark.parametrize("more", [AVERAGED, RECOMPUTED], ids=["average", "recompute"])
def test_left_in_the_middle_it_goes_on_bit_for_bit(more, tmp_path, source, cache_dir):
    cfg = tiny(source, more)
    where = {"trackers": [], "cache_dir": cache_dir}
    train(cfg, tmp_path / "reference", **where)
    with pytest.raises(Stop):
        train(cfg, tmp_path / "run", observer=stop_at(6), **where)
    train(cfg, tmp_path / "run", resume=True, **where)
    assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_an_average_cannot_begin_in_the_middle(tmp_path, source, cache_dir):
    where = {"trackers": [], "cache_dir": cache_dir}
    with pytest.raises(Stop):
        train(tiny(source), tmp_path / "run", observer=stop_at(6), **where)
    with pytest.raises(UserError, match="has no average of the weights"):
        train(
            tiny(source, AVERAGED, {"model.dropout": 0.0}), tmp_path / "run", resume=True, accept_changes=True, **where
        )


# ------------------------------------------------------------------------------------- recompute


@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_blocks_that_run_again_train_the_same_to_the_bit(block, tmp_path, source, cache_dir):
    plain, again = (
        train(
            tiny(source, {"model.block": block, "model.dropout": 0.1, **more}),
            tmp_path / name,
            trackers=[],
            cache_dir=cache_dir,
        )
        for name, more in (("plain", {}), ("again", RECOMPUTED))
    )
    for name in ("model.safetensors", "optimizer0.safetensors"):
        assert (newest(plain.folder) / name).read_bytes() == (newest(again.folder) / name).read_bytes()


@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_only_the_blocks_inputs_are_kept(block):
    """And what `inspect` and the plan of a training say of the memory is not less than that."""
    cfg = tiny("python-stdlib").model.override({"block": block, "n_layer": 6})
    ids = torch.randint(cfg.vocab_size, (4, 16))
    model = CausalLM(cfg)
    every = saved_bytes(lambda: model.hidden(ids), model.parameters())
    recompute_blocks(model)
    few = saved_bytes(lambda: model.hidden(ids), model.parameters())
    assert few < every / 3
    planned = [training_memory(cfg, 4, length=16, recompute=on)["activations"] for on in (False, True)]
    assert few < planned[1] < planned[0] / 2
