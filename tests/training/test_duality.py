"""Appendix A: a step on V in W = U + βV is a step on W with its learning rate scaled, by β² for SGD and β for AdamW."""

import pytest
import torch
from torch import nn

from skipless.config.block import GainConfig, MapConfig
from skipless.config.model import ModelConfig
from skipless.config.run import TrainConfig
from skipless.nn.layers import ReparamLinear
from skipless.nn.model import CausalLM
from skipless.training.optimizers import make_optimizers, set_lr

WIDTH = 8


def reparameterised(beta: float, init: str) -> ReparamLinear:
    part = MapConfig(kind="reparam", init=init, beta=GainConfig(init=beta))
    layer = ReparamLinear(ModelConfig(d_model=WIDTH, n_head=2), part).double()
    if layer.w_init is not None:
        nn.init.orthogonal_(layer.w_init)
    return layer


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y.tanh() - x.flip(-1)).square().mean()


def step(kind: str, parameters: list[nn.Parameter], lr: float) -> None:
    if kind == "sgd":
        torch.optim.SGD(parameters, lr=lr).step()
    else:
        torch.optim.AdamW(parameters, lr=lr, eps=1e-30, weight_decay=0.0).step()


@pytest.mark.parametrize("init", ["identity", "orthogonal"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(("kind", "power"), [("sgd", 2), ("adamw", 1)])
def test_one_step_of_the_maps(kind, power, beta, init):
    torch.manual_seed(0)
    layer, x = reparameterised(beta, init), torch.randn(5, WIDTH, dtype=torch.double)
    free = nn.Parameter(layer.matrix().detach().clone())
    start = free.detach().clone()
    loss(x, layer(x)).backward()
    loss(x, x @ free.mT).backward()
    step(kind, list(layer.parameters()), 0.05)
    step(kind, [free], 0.05 * beta**power)
    assert not torch.allclose(free, start, atol=1e-4)
    torch.testing.assert_close(layer.matrix(), free, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "power"), [("sgd", 2), ("adamw", 1)])
def test_one_step_of_whole_models_through_the_optimisers_of_a_run(kind, power):
    """`vp_lr_factor` does to W^V and W^P what β does: the whole model computes the same after the first step."""
    beta = 0.2
    train = TrainConfig(optimizer=kind, lr=0.01, eps=1e-20, weight_decay=0.0)
    ids = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
    models = []
    for block, factor in (
        (
            f"sas:first_value=null,value={{kind: reparam; init: identity; beta: {beta}}},projection={{kind: identity}}",
            1.0,
        ),
        ("sas:first_value=null,value={kind: dense; init: identity},projection={kind: identity}", beta**power),
    ):
        torch.manual_seed(0)
        cfg = ModelConfig(block=block, n_layer=2, d_model=WIDTH, n_head=2, vocab_size=32, max_seq_len=16)
        model = CausalLM(cfg).double()
        if models:  # the same draws for all that both have
            model.load_state_dict(models[0].start, strict=False)
        model.start = {name: value.clone() for name, value in model.state_dict().items()}
        optimizers = make_optimizers(model, train.replace(vp_lr_factor=factor))
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        set_lr(optimizers, train.lr)
        for optimizer in optimizers:
            optimizer.step()
        models.append(model)
    first, second = models
    for one, other in zip(first.blocks, second.blocks, strict=True):
        moved = (other.attention.value.weight - torch.eye(WIDTH)).abs().max()
        assert moved > 1e-6
        torch.testing.assert_close(one.attention.value.matrix(), other.attention.value.weight, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(first(ids), second(ids), rtol=1e-6, atol=1e-9)
