"""What a run needs to resume bit for bit besides its weights: optimiser states and random generators."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from skipless.errors import UserError, first_line
from skipless.runs import Run
from skipless.storage.atomic_files import to_json
from skipless.storage.checkpoint_format import Checkpoint
from skipless.storage.tensors import NamedTensors

Counters = TypeVar("Counters")

CONFIGURED = ("params", "lr", "weight_decay", "factor", "decay")
"""What the groups of every optimiser have from the configuration and the schedule."""


class NoValidCheckpoint(UserError):
    """A run has saved checkpoints, but all are missing or damaged, so it cannot be resumed."""

    status = 3

    def __init__(
        self,
        run: Run,
        damaged: Sequence[tuple[Path, str]],
        again: str = "remove the run's folder or give another --name",
    ) -> None:
        found = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
        super().__init__(
            f"run {str(run.folder)!r} has saved checkpoints, and none of them can be resumed "
            f"({found or 'the folder checkpoints is gone or empty'}); nothing was changed: restore one, "
            f"or to begin again {again}"
        )


@contextmanager
def foreign_state_said(checkpoint: Checkpoint) -> Iterator[None]:
    """Context manager: errors from an undamaged checkpoint of another kind of training become a UserError."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{str(checkpoint.path)!r} cannot be resumed: its state is not that of such a training "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def restored_counters(kind: type[Counters], checkpoint: Checkpoint) -> Counters:
    """The counters of a training as a checkpoint has them, in a dataclass of this kind that has a `step`."""
    stored = checkpoint.state["state"]
    TypeAdapter(kind).validate_python(stored)
    if stored["step"] != checkpoint.step:
        raise UserError(f"{str(checkpoint.path)!r} is of step {checkpoint.step}, and its state of {stored['step']!r}")
    return kind(**stored)


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Parameter, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimiser by parameter: tensors by `<parameter>/<key>`, and the rest as JSON.

    Options of the groups, such as the learning rate, are not in it: those come from the configuration and the schedule.
    Counters that an optimiser keeps among them are: numbers that are no longer what its options began with. The tensors
    are the optimiser's own, not copies. A tensor of another shape than its parameter's is noted with its shape.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, parameter in _named_parameters(optimizer, names).items():
        remembered = optimizer.state.get(parameter, {})
        held = {key: value for key, value in remembered.items() if isinstance(value, Tensor)}
        tensors.update({f"{name}/{key}": value for key, value in held.items()})
        scalars = {key: value for key, value in remembered.items() if key not in held}
        described[name] = {"tensors": sorted(held), "scalars": scalars}
        shapes = {k: list(value.shape) for k, value in held.items() if value.dim() and value.shape != parameter.shape}
        if shapes:
            described[name]["shapes"] = shapes
    counters = [_counters(optimizer, group) for group in optimizer.param_groups]
    return tensors, {"parameters": described, **({"groups": counters} if any(counters) else {})}


def _counters(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a group that its optimiser has changed."""
    found = {
        key: value for key, value in group.items() if key not in CONFIGURED and isinstance(value, bool | int | float)
    }
    return {key: value for key, value in found.items() if value != optimizer.defaults.get(key)}


def load_optimizer(
    optimizer: Optimizer, names: Mapping[Parameter, str], tensors: NamedTensors, state: Mapping[str, Any]
) -> None:
    """Give an optimiser the state that `optimizer_tensors` returned; training then continues bit for bit.

    The optimiser must have the same parameters by name; they may be grouped otherwise.
    """
    described = state["parameters"]
    parameters = _named_parameters(optimizer, names)
    _check_same("parameters", expected=set(parameters), found=set(described))
    stored = {f"{name}/{key}" for name, entry in described.items() for key in entry["tensors"]}
    _check_same("tensors", expected=stored, found=set(tensors))
    remembered = {}
    for index, name in enumerate(parameters):
        entry = described[name]
        # Copies, for the optimiser changes its tensors in place and those of the caller are not its own.
        values = {key: tensors[f"{name}/{key}"].clone() for key in entry["tensors"]} | entry["scalars"]
        _check_shapes(name, values, parameters[name], entry.get("shapes", {}))
        if values:
            remembered[index] = values
    counters = state.get("groups", [{} for _ in optimizer.param_groups])
    if len(counters) != len(optimizer.param_groups):
        raise UserError(f"the stored optimiser has {len(counters)} groups, and this one {len(optimizer.param_groups)}")
    # PyTorch numbers parameters in the order of the groups, and knows which device each value belongs on.
    optimizer.load_state_dict({"state": remembered, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, changed in zip(optimizer.param_groups, counters, strict=True):
        group.update({key: value for key, value in changed.items() if key not in CONFIGURED})


def check_storable(optimizer: Optimizer, names: Mapping[Parameter, str], before: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a checkpoint cannot hold all that an optimiser remembers.

    `before` are copies of its groups from before it stepped.
    """
    if set(optimizer.state) - set(names):
        raise UserError("it remembers something that belongs to no parameter")
    for old, group in zip(before, optimizer.param_groups, strict=True):
        for key, value in group.items():
            kept = key in CONFIGURED or isinstance(value, bool | int | float)
            if not kept and (isinstance(value, Tensor) or value != old.get(key)):
                raise UserError(
                    f"it keeps a {type(value).__name__} in {key!r} of a group, where only numbers are stored"
                )
    for name, entry in optimizer_tensors(optimizer, names)[1]["parameters"].items():
        for key, value in entry["scalars"].items():
            try:
                to_json(value)
            except (TypeError, ValueError):
                raise UserError(f"of {name} it remembers {key!r}, which is neither a tensor nor JSON") from None


def _named_parameters(optimizer: Optimizer, names: Mapping[Parameter, str]) -> dict[str, Parameter]:
    """The optimiser's parameters by name, in the order of its groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = {names[parameter]: parameter for parameter in parameters if parameter in names}
    if len(named) != len(parameters):
        raise UserError(f"{len(parameters) - len(named)} parameters of the optimiser have no name of their own")
    return named


def _check_same(kind: str, expected: set[str], found: set[str]) -> None:
    problems = [
        f"{problem} {', '.join(sorted(some)[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''}"
        for problem, some in (("missing", expected - found), ("unexpected", found - expected))
        if some
    ]
    if problems:
        raise UserError(f"the stored optimiser has other {kind}: {'; '.join(problems)}")


def _check_shapes(
    name: str, values: Mapping[str, Any], parameter: Parameter, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise where a tensor has neither the shape of its parameter nor the one that it is noted with."""
    for key, value in values.items():
        shape = tuple(shapes.get(key, parameter.shape))
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shape:
            found, wanted = (" × ".join(map(str, one)) for one in (value.shape, shape))
            what = "it was saved as" if key in shapes else "the parameter is"
            raise UserError(f"the stored optimiser has {name}/{key} of {found}, and {what} {wanted}")


def rng_state() -> dict[str, Any]:
    """The state of the global random generators of PyTorch (CPU, and CUDA if present), Python and numpy, as JSON."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": {"version": version, "words": _words_to_hex(words), "gauss": gauss},
        "numpy": {"words": _words_to_hex(key), "position": position, "has_gauss": has_gauss, "gauss": cached},
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to what `rng_state` returned. States of GPUs that are not here are left out."""
    try:
        torch.set_rng_state(_from_hex(state["torch"]))
    except RuntimeError as error:  # of another size
        raise ValueError(first_line(error)) from error
    for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_from_hex(text), device)
    python = state["python"]
    random.setstate((python["version"], tuple(_hex_to_words(python["words"]).tolist()), python["gauss"]))
    numpy = state["numpy"]
    words = _hex_to_words(numpy["words"])
    np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _words_to_hex(words: Any) -> str:
    return np.asarray(words, dtype="<u4").tobytes().hex()


def _hex_to_words(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype="<u4")
