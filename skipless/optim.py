"""Parameter groups, optimisers, and schedules as functions of progress."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from skipless import parallel
from skipless.config import TrainConfig
from skipless.nn.attention import Attention
from skipless.nn.model import Transformer

Group = tuple[float, bool]
"""Factor on the learning rate, and whether weight decay applies."""


def parameter_groups(model: Transformer, vp_lr_factor: float = 1.0) -> dict[Group, dict[str, nn.Parameter]]:
    """Trainable parameters by name, grouped as the paper does.

    Matrices and embeddings decay; gains, norms and biases do not. W^V and W^P, with their gains, have a learning rate
    of their own.
    """
    maps = {id(p) for m in model.modules() if isinstance(m, Attention) for p in _value_projection(m)}
    groups: dict[Group, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = vp_lr_factor if id(parameter) in maps else 1.0
            groups.setdefault((factor, decays(parameter)), {})[name] = parameter
    return groups


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices. Norms and biases have one axis, gains none or three."""
    return parameter.ndim == 2


def _value_projection(attention: Attention) -> Iterable[nn.Parameter]:
    for part in (attention.value, attention.projection):
        if isinstance(part, nn.Module):
            yield from part.parameters()


class SharedMuon(Muon):
    """Muon for matrices of which each process has a share of the rows: what is made orthogonal is the whole matrix.

    What it remembers stays shared. Every process gathers the update, one matrix at a time, and applies its own rows.
    """

    def __init__(self, params: Any, group: parallel.Sharded, **options: Any) -> None:
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
        remembered = self.state[parameter]
        if "momentum_buffer" not in remembered:
            remembered["momentum_buffer"] = torch.zeros_like(gradient)
        local, lr, momentum = self.group.local, options["lr"], options["momentum"]
        average = local(remembered["momentum_buffer"])
        average.lerp_(local(gradient), 1 - momentum)
        share = torch.empty_like(gradient)
        local(share).copy_(local(gradient).lerp(average, momentum) if options["nesterov"] else average)
        update = _zeropower_via_newtonschulz(
            self.group.whole(share), options["ns_coefficients"], options["ns_steps"], options["eps"]
        )
        local(parameter).mul_(1 - lr * options["weight_decay"])
        own = update[self.group.rows(parameter)]
        local(parameter).add_(own, alpha=-_adjust_lr(lr, options["adjust_lr_fn"], parameter.shape))


def make_optimizers(model: Transformer, cfg: TrainConfig, share: parallel.Group | None = None) -> list[Optimizer]:
    """The optimisers of a run, for a model that a group may share.

    Every group of parameters has a `factor` by which `set_lr` multiplies the learning rate.
    """
    groups = parameter_groups(model, cfg.vp_lr_factor)
    if cfg.optimizer == "muon":
        inside = {name for name, _ in model.blocks.named_parameters(prefix="blocks")}
        hidden = _select(groups, lambda name, p: name in inside and p.ndim == 2)
        rest = _select(groups, lambda name, p: name not in inside or p.ndim != 2)
        # Muon's own step has the size of an orthogonal matrix; this makes it the size of AdamW's, for one learning rate
        kind = partial(SharedMuon, group=share) if isinstance(share, parallel.Sharded) else Muon
        muon = [kind(hidden, lr=cfg.lr, adjust_lr_fn="match_rms_adamw")] if hidden else []
        return [*_with_decay(muon, cfg), *_with_decay([_adamw(rest, cfg)], cfg)]
    every = _select(groups, lambda name, p: True)
    optimizer = SGD(every, lr=cfg.lr) if cfg.optimizer == "sgd" else _adamw(every, cfg)
    return _with_decay([optimizer], cfg)


def _select(
    groups: dict[Group, dict[str, nn.Parameter]], wanted: Callable[[str, nn.Parameter], bool]
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
        for p in group["params"]:  # now, not in the first step: what stays then lies below what comes and goes
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
    return optimizer


def _with_decay(optimizers: Sequence[Optimizer], cfg: TrainConfig) -> list[Optimizer]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = cfg.weight_decay if group["decay"] else 0.0
    return list(optimizers)


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    """Give every group its learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]


def learning_rate(cfg: TrainConfig, progress: float) -> float:
    """The learning rate when `progress`, from 0 to 1, of the budget is spent."""
    warmup = cfg.warmup_share
    if progress < warmup:
        return cfg.lr * (cfg.warmup_from + (1 - cfg.warmup_from) * progress / warmup)
    left = (1 - progress) / (1 - warmup) if warmup < 1 else 0.0
    shape = {
        "linear": left,
        "triangle": left,
        "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left))),
        "constant": 1.0,
    }[cfg.schedule]
    return cfg.lr * max(shape, 0.0)


def batch_rows(cfg: TrainConfig, progress: float) -> int:
    """Sequences in the next step: with a ramp, whole micro-batches that grow linearly to `batch_size`."""
    if progress >= cfg.batch_ramp:
        return cfg.batch_size
    micro = cfg.micro_rows
    count = math.ceil(cfg.batch_size / micro * progress / cfg.batch_ramp)
    return min(max(count, 1) * micro, cfg.batch_size)


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients whose norm together is `norm` down to `largest`, if it is larger, as PyTorch does."""
    torch._foreach_mul_(list(gradients), (largest / (norm + 1e-6)).clamp(max=1.0))
