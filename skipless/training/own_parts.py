"""User-defined optimisers and schedules.

An optimiser is made of parameter groups and the `TrainConfig`; a schedule is a function of how much of the budget
after the warm-up is left (from 1 to 0) and the `TrainConfig`, and gives a share of the peak learning rate. Either is
given its settings as the last argument, if it has any.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from skipless.config.parts import PartValue, Settings, find_part
from skipless.config.run import TrainConfig
from skipless.errors import UserError, first_line
from skipless.training.state import check_storable


def own_part(kind: str, value: PartValue, *given: Any) -> Any:
    """What the optimiser or the schedule of a plugin gives."""
    part = find_part(kind, value)
    assert part.make is not None, f"{part.title} has nothing that makes it"
    try:
        made = part.make(*given, value) if isinstance(value, Settings) else part.make(*given)
    except UserError as error:
        raise UserError(f"{part.title}: {error}") from error
    except Exception as error:
        raise UserError(f"{part.title} cannot be made: {type(error).__name__}: {first_line(error)}") from error
    wanted = (Optimizer, list, tuple) if kind == "optimizer" else (float, int)
    if not isinstance(made, wanted):
        what = "an Optimizer, or a list of them" if kind == "optimizer" else "a number"
        raise UserError(f"{part.title} must give {what}, got {type(made).__name__}")
    return made


def own_optimizers(groups: Sequence[Mapping[str, Any]], cfg: TrainConfig) -> list[Optimizer]:
    """The optimisers of a plugin, once others like them have made a step, and a checkpoint could hold their state."""
    small = [{**group, "params": [_like(min(group["params"], key=Tensor.numel))]} for group in groups]
    names = {group["params"][0]: f"a parameter of {tuple(group['params'][0].shape)}" for group in small}
    with torch.random.fork_rng(devices=[]):
        for optimizer in _listed(own_part("optimizer", cfg.optimizer, small, cfg)):
            _try_step(optimizer, names, find_part("optimizer", cfg.optimizer).title)
    return _listed(own_part("optimizer", cfg.optimizer, groups, cfg))


def _listed(made: Any) -> list[Optimizer]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _like(parameter: Parameter) -> Parameter:
    copy = Parameter(parameter.detach().clone())
    copy.grad = torch.full_like(copy, 1e-3)
    return copy


def _try_step(optimizer: Optimizer, names: dict[Parameter, str], title: str) -> None:
    before = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        optimizer.step()
    except Exception as error:
        raise UserError(f"{title} cannot make a step: {type(error).__name__}: {first_line(error)}") from error
    try:
        check_storable(optimizer, names, before)
    except UserError as error:
        raise UserError(f"{title} could not be resumed: {error}") from error
