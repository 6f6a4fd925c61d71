"""User-defined optimisers and schedules.

An optimiser is made of parameter groups and the `TrainConfig`; a schedule is a function of how much of the budget
after the warm-up is left (from 1 to 0) and the `TrainConfig`, and gives a share of the peak learning rate. Either is
given its settings as the last argument, if it has any.
"""

from typing import Any

from torch.optim import Optimizer

from skipless.config.parts import PartValue, Settings, find_part
from skipless.errors import UserError, first_line


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
