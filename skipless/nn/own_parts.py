"""User-defined parts: built from a configuration, checked with one trial call, responsible for their initialisation.

| kind | made of | called with | gives |
| --- | --- | --- | --- |
| norm | width | x (…, width) | the same shape |
| mixing | `ModelConfig` | Q, K, V (B, H, T, D) and a mask | (B, H, T, D) |
| map | `ModelConfig` | x (B, T, d) | (B, T, d) |
| mlp | `ModelConfig` | x (B, T, d) | (B, T, d) |
| activation | width of the hidden layer, or it is a function | x (…, width) | the same shape |
| positions | `ModelConfig` | positions (1 or B, T), dtype | (1 or B, T, d), or nothing; see `nn.positions.Positions` |

A part with settings is given them as the last argument.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.config.parts import Part, PartValue, Settings, find_part
from skipless.errors import UserError, first_line
from skipless.nn.masks import Mask

_tried: set[str] = set()
"""What was tried already: a model has many layers of one part."""

BATCH, LENGTH = 2, 3


def own_part(kind: str, value: PartValue, *given: Any) -> Any:
    """The part of a plugin that a configuration names, marked with its name."""
    part = find_part(kind, value)
    assert part.make is not None, f"{part.title} has nothing that makes it"
    arguments = (*given, value) if isinstance(value, Settings) else given
    key = f"{part.title} {id(part.make)} {arguments!r}"
    if key not in _tried:
        _try(part, arguments)
        _tried.add(key)
    made = _make(part, arguments)
    if isinstance(made, nn.Module):  # for `init_weights`, and for costs
        vars(made).update(own_part=part.title, made_of=given[0])
    return made


def is_own(module: nn.Module) -> bool:
    """Whether a module is a part of somebody's own, with what is inside it."""
    return hasattr(module, "own_part")


def _make(part: Part, arguments: tuple[Any, ...]) -> Any:
    make: Any = part.make
    if part.kind == "activation" and not isinstance(make, type):
        return make  # a function of x
    try:
        return make(*arguments)
    except UserError as error:
        raise UserError(f"{part.title}: {error}") from error
    except Exception as error:
        raise UserError(f"{part.title} cannot be made: {type(error).__name__}: {first_line(error)}") from error


# --------------------------------------------------------------------------------- trying


def trial(kind: str, about: Any, batch: int = BATCH, length: int = LENGTH) -> "Trial":
    """What a part of a kind is called with, on the device at hand; `about` is what it is made of: a width, a model."""
    return _INPUTS[kind](about, batch, length)


def _try(part: Part, arguments: tuple[Any, ...]) -> None:
    """A UserError where a part does not give what its kind gives. Without arithmetic: only shapes are looked at."""
    with torch.device("meta"), torch.no_grad():
        made = _make(part, arguments)
        if not callable(made):
            raise UserError(f"{part.title} must make something that can be called, got {type(made).__name__}")
        inputs, allowed = trial(part.kind, arguments[0])
        try:
            output = made(*inputs)
        except UserError as error:
            raise UserError(f"{part.title}: {error}") from error
        except Exception as error:
            if "meta" in str(error) or isinstance(error, NotImplementedError):
                return  # it looks at values, and here there are none
            said = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{part.title} fails on an input of {_shape(inputs[0])}: {said}") from error
    found = tuple(output.shape) if isinstance(output, Tensor) else None
    if found not in allowed:
        got = type(output).__name__ if found is None else str(found)
        wanted = " or ".join("nothing" if one is None else str(one) for one in allowed)
        raise UserError(f"{part.title} must give {wanted} for an input of {_shape(inputs[0])}, got {got}")


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


Trial = tuple[tuple[Any, ...], list[tuple[int, ...] | None]]
"""What a part is called with, and the shapes that it may give."""


def _same(*shape: int) -> Trial:
    return (torch.empty(shape),), [shape]


def _mixing(cfg: Any, batch: int, length: int) -> Trial:
    shape = (batch, cfg.n_head, length, cfg.d_head)
    return (*(torch.empty(shape) for _ in range(3)), Mask(True)), [shape]


def _positions(cfg: Any, batch: int, length: int) -> Trial:
    where = torch.zeros(batch, length, dtype=torch.long)
    return (where, torch.float32), [(batch, length, cfg.d_model), (1, length, cfg.d_model), None]


_INPUTS: dict[str, Callable[[Any, int, int], Trial]] = {
    "norm": lambda width, batch, length: _same(batch, length, width),
    "activation": lambda width, batch, length: _same(batch, length, width),
    "mlp": lambda cfg, batch, length: _same(batch, length, cfg.d_model),
    "map": lambda cfg, batch, length: _same(batch, length, cfg.d_model),
    "mixing": _mixing,
    "positions": _positions,
}


# --------------------------------------------------------------------------- initialising


def reset_own_part(part: nn.Module, known: Callable[[nn.Module, str], bool]) -> None:
    """Have a part set its own weights: `reset_parameters` of every module in it that has one.

    What is `known`, such as the weight of a linear layer, has been set. A UserError where a module has weights that
    nobody sets: made on one device and filled on another, they would be whatever was in memory.
    """
    for module in reversed(list(part.modules())):  # what is outside has the last word
        reset: Any = getattr(module, "reset_parameters", None)
        own = {name: tensor for name, tensor in _tensors(module).items() if not known(module, name)}
        if reset is not None and (own or not _is_torchs(module)):
            reset()
        elif own:
            raise UserError(
                f"{part.own_part}: nothing sets {', '.join(own)} of {type(module).__name__}; "
                "give the class a method reset_parameters that does"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    kept = {name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: value for name, value in {**module._parameters, **kept}.items() if value is not None}


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
