"""Parameter groups and optimisers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from skipless.config.run import TrainConfig
from skipless.distributed.fsdp import FSDPGroup
from skipless.distributed.group import Group
from skipless.nn.attention import Attention
from skipless.nn.model import Transformer
from skipless.training.own_parts import own_optimizers

GroupKey = tuple[float, bool]
"""Factor on the learning rate, and whether weight decay applies."""


def parameter_groups(model: Transformer, vp_lr_factor: float = 1.0) -> dict[GroupKey, dict[str, nn.Parameter]]:
    """Trainable parameters by name, grouped as the paper does.

    Weight decay applies to matrices and embeddings, not to gains, norms or biases. W^V and W^P, with their gains, have
    a learning rate of their own.
    """
    maps = {id(p) for m in model.modules() if isinstance(m, Attention) for p in _value_projection(m)}
    groups: dict[GroupKey, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = vp_lr_factor if id(parameter) in maps else 1.0
            groups.setdefault((factor, decays(parameter)), {})[name] = parameter
    return groups


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices alone. Norms, biases and gains have one axis or three."""
    return parameter.ndim == 2


def _value_projection(attention: Attention) -> Iterable[nn.Parameter]:
    for part in (attention.value, attention.projection):
        if isinstance(part, nn.Module):
            yield from part.parameters()


class ShardedMuon(Muon):
    """Muon for matrices that are sharded by rows: what is made orthogonal is the whole matrix.

    The momentum stays sharded. Every process gathers the update, one matrix at a time, and applies its own rows.
    """

    def __init__(self, params: Any, group: FSDPGroup, **options: Any) -> None:
        super().__init__(params, **options)
        self.group = group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every matrix."""
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, options)

    def _update(self, parameter: Tensor, gradient: Tensor, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        local, lr, momentum = self.group.local, options["lr"], options["momentum"]
        average = local(state["momentum_buffer"])
        average.lerp_(local(gradient), 1 - momentum)
        direction = torch.empty_like(gradient)
        local(direction).copy_(local(gradient).lerp(average, momentum) if options["nesterov"] else average)
        update = _zeropower_via_newtonschulz(
            self.group.whole(direction), options["ns_coefficients"], options["ns_steps"], options["eps"]
        )
        local(parameter).mul_(1 - lr * options["weight_decay"])
        own = update[self.group.rows(parameter)]
        local(parameter).add_(own, alpha=-_adjust_lr(lr, options["adjust_lr_fn"], parameter.shape))


def make_optimizers(model: Transformer, cfg: TrainConfig, group: Group | None = None) -> list[Optimizer]:
    """The optimisers of a training, for a model that a process group may have wrapped.

    Every parameter group has a `factor` by which `set_lr` multiplies the learning rate.
    """
    groups = parameter_groups(model, cfg.vp_lr_factor)
    if isinstance(cfg.optimizer, str) and cfg.optimizer in OPTIMIZERS:
        return _with_decay(OPTIMIZERS[cfg.optimizer](model, groups, cfg, group), cfg)
    return _with_decay(own_optimizers(_select(groups, lambda name, p: True), cfg), cfg)


def _muon(model: Transformer, groups: "Groups", cfg: TrainConfig, group: Group | None) -> list[Optimizer]:
    inside = {name for name, _ in model.blocks.named_parameters(prefix="blocks")}
    hidden = _select(groups, lambda name, p: name in inside and p.ndim == 2)
    rest = _select(groups, lambda name, p: name not in inside or p.ndim != 2)
    kind = partial(ShardedMuon, group=group) if isinstance(group, FSDPGroup) else Muon
    # match_rms_adamw scales Muon's update, an orthogonal matrix, to the size of AdamW's: one learning rate for both
    muon = [kind(hidden, lr=cfg.lr, adjust_lr_fn="match_rms_adamw")] if hidden else []
    return [*muon, _adamw(rest, cfg)]


Groups = dict[GroupKey, dict[str, nn.Parameter]]

OPTIMIZERS: dict[str, Callable[[Transformer, Groups, TrainConfig, Group | None], list[Optimizer]]] = {
    "adamw": lambda model, groups, cfg, group: [_adamw(_select(groups, lambda name, p: True), cfg)],
    "muon": _muon,
    "sgd": lambda model, groups, cfg, group: [SGD(_select(groups, lambda name, p: True), lr=cfg.lr)],
}


def _select(
    groups: dict[GroupKey, dict[str, nn.Parameter]], wanted: Callable[[str, nn.Parameter], bool]
) -> list[dict[str, Any]]:
    chosen: list[dict[str, Any]] = []
    for (factor, decay), named in groups.items():
        parameters = [parameter for name, parameter in named.items() if wanted(name, parameter)]
        if parameters:
            chosen.append({"params": parameters, "factor": factor, "decay": decay})
    return chosen


def _adamw(groups: list[dict[str, Any]], cfg: TrainConfig) -> AdamW:
    optimizer = AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
    for group in optimizer.param_groups:
        for p in group["params"]:  # now, not in the first step: in memory they then lie below what comes and goes
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
    return optimizer


def _with_decay(optimizers: Sequence[Optimizer], cfg: TrainConfig) -> list[Optimizer]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = cfg.weight_decay if group["decay"] else 0.0
    return list(optimizers)


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients whose norm together is `norm` down to `largest`, if it is larger, as PyTorch does."""
    torch._foreach_mul_(list(gradients), (largest / (norm + 1e-6)).clamp(max=1.0))
