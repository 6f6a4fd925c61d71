"""Kernels in the place of plain modules, and back. Parameters, names and state dicts stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from skipless.nn.kernels.modules import (
    MLP,
    Attention,
    CausalLM,
    Embedding,
    MaskedLM,
    ParallelBlock,
    ReparamLinear,
    RMSNorm,
    SequentialBlock,
    Shaped,
)
from skipless.nn.model import LanguageModel

REPLACING: tuple[type[nn.Module], ...] = (
    *(RMSNorm, MLP, ReparamLinear, Shaped, Attention, SequentialBlock, ParallelBlock, CausalLM, MaskedLM),
)
KERNELS: dict[type[nn.Module], type[nn.Module]] = {kernel.__bases__[-1]: kernel for kernel in REPLACING}
"""Plain class → kernel. Only exact classes are replaced: a subclass of somebody's own stays what it is."""

PLAIN = {kernel: plain for plain, kernel in KERNELS.items()}

Module = TypeVar("Module", bound=nn.Module)


def install(module: Module) -> Module:
    """Replace every plain module in a model, and the model itself, by its kernel."""
    for part in module.modules():
        become(part, KERNELS.get(type(part)))
        if isinstance(part, LanguageModel) and type(part.embedding) is nn.Embedding:
            become(part.embedding, Embedding)
    return module


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Within this context a model is its plain equations."""
    swapped = {part: type(part) for part in module.modules() if type(part) in PLAIN or type(part) is Embedding}
    for part, kernel in swapped.items():
        become(part, PLAIN.get(kernel, nn.Embedding))
    try:
        yield
    finally:
        for part, kernel in swapped.items():
            become(part, kernel)


def plain_type(module: object) -> Any:
    """The class of a module as if it had no kernel."""
    return PLAIN.get(type(module), type(module))  # pyrefly: ignore


def become(module: nn.Module, kind: type[nn.Module] | None) -> None:
    """Make a module one of another class, with everything it has."""
    if kind is not None:
        module.__class__ = kind
