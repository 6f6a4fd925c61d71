"""Optimisers of one's own: all that they remember is resumed, or they are refused before the first step."""

import pytest
import torch
from torch.optim import Optimizer

import skipless
from skipless.errors import UserError
from skipless.parts import part
from skipless.storage.checkpoints import Checkpoints
from skipless.training.update import MicroBatch, Update
from tests.helpers.plugins import no_plugins

SHAPE = skipless.ModelConfig(block="sas-p", n_layer=2, d_model=16, n_head=2, vocab_size=32, max_seq_len=8)


class Slowing(Optimizer):
    """Steps that become shorter, by counters among the options of its groups, as in schedule-free optimisers."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0, "total": 0.0, "started": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"], group["total"], group["started"] = group["k"] + 1, group["total"] + 0.5, True
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["k"] - group["total"] / 100)


class Hiding(Slowing):
    """Keeps something where it would be lost."""

    def __init__(self, groups, lr, where):
        super().__init__(groups, lr)
        self.where = where

    def step(self, closure=None):
        super().step()
        first = self.param_groups[0]
        match self.where:
            case "group":
                first["sum"] = torch.ones(3)
            case "list":
                first["recent"] = [0.5]
            case "parameter":
                self.state[first["params"][0]]["factors"] = [torch.ones(2)]
            case "nobody":
                self.state["all"] = {"step": 1}
            case "error":
                raise RuntimeError("a closure\nis needed")


@pytest.fixture(autouse=True)
def plugin():
    with no_plugins():
        part("optimizer", "slowing")(lambda groups, cfg: Slowing(groups, cfg.lr))
        part("optimizer", "factored")(lambda groups, cfg: torch.optim.Adafactor(groups, lr=cfg.lr))
        for where in ("group", "list", "parameter", "nobody", "error"):
            part("optimizer", where)(lambda groups, cfg, where=where: [Hiding(groups, cfg.lr, where)])
        yield


def make(optimizer: str) -> Update:
    torch.manual_seed(1)
    return Update(skipless.CausalLM(SHAPE), skipless.TrainConfig(steps=10, optimizer=optimizer, lr=0.01))


def step(update: Update, seed: int):
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(seed))
    return update.make([MicroBatch(ids[:, :-1], ids[:, 1:], 32)], 0.5)


@pytest.mark.parametrize("optimizer", ["slowing", "factored"])
def test_it_makes_the_updates_that_would_have_followed(tmp_path, optimizer):
    update = make(optimizer)
    for number in range(3):
        step(update, number)
    Checkpoints(tmp_path).save(3, update.tensors(), update.state())
    expected = [step(update, number) for number in range(3, 6)]
    again = make(optimizer)
    again.restore(Checkpoints(tmp_path).latest_valid()[0])
    assert [step(again, number) for number in range(3, 6)] == expected
    assert again.state()["optimizers"] == update.state()["optimizers"]
    for name, value in update.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_what_is_stored_of_our_own_optimisers_is_as_before():
    for optimizer in ("adamw", "muon", "sgd"):
        update = make(optimizer)
        step(update, 0)
        for described in update.state()["optimizers"]:
            assert described.keys() == {"parameters"}
            assert all(entry.keys() == {"tensors", "scalars"} for entry in described["parameters"].values())


def test_a_tensor_of_another_shape_than_it_was_saved_in_is_refused(tmp_path):
    update = make("factored")
    step(update, 0)
    state = update.state()
    name, entry = next((n, e) for n, e in state["optimizers"][0]["parameters"].items() if "shapes" in e)
    key = next(iter(entry["shapes"]))
    entry["shapes"][key] = [7, 7]
    Checkpoints(tmp_path).save(1, update.tensors(), state)
    with pytest.raises(UserError, match=rf"has {name}/{key} of .*, and it was saved as 7 × 7"):
        make("factored").restore(Checkpoints(tmp_path).latest_valid()[0])


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("group", "could not be resumed: it keeps a Tensor in 'sum' of a group, where only numbers are stored"),
        ("list", "could not be resumed: it keeps a list in 'recent' of a group"),
        ("parameter", "it remembers 'factors', which is neither a tensor nor JSON"),
        ("nobody", "could not be resumed: it remembers something that belongs to no parameter"),
        ("error", "cannot make a step: RuntimeError: a closure$"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_first_step(where, said):
    with pytest.raises(UserError, match=f"optimizer '{where}' .*{said}"):
        make(where)


def test_the_trial_changes_neither_the_weights_nor_the_random_numbers():
    update = make("slowing")
    drawn = torch.rand(3)
    torch.manual_seed(1)
    model = skipless.CausalLM(SHAPE)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, update.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(group["k"] == 0 for group in update.optimizers[0].param_groups)
