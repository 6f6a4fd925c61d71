"""Models with the weights of a file: checked against the configuration before memory is allocated."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from skipless.config.model import ModelConfig
from skipless.data import Tokenizer
from skipless.errors import UserError
from skipless.nn.model import Transformer
from skipless.runtime.model import OnnxCausalLM

AnyModel = TypeVar("AnyModel", bound=Transformer)
Loaded = TypeVar("Loaded", bound=Transformer | OnnxCausalLM)


def with_weights(
    make: Callable[[], AnyModel], cfg: ModelConfig, tensors: Mapping[str, Tensor], where: Path
) -> AnyModel:
    """A model with these weights; a UserError where they are not of its configuration, or not finite.

    What its configuration asks for is compared before there is memory for it: it can say anything.
    """
    problem = f"the weights in {str(where)!r} cannot be loaded: "
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if len(layers) != cfg.n_layer:
        raise UserError(f"{problem}they have {len(layers)} layers, and the configuration has {cfg.n_layer}")
    try:
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    except RuntimeError as error:  # sizes that not even a number holds
        raise UserError(f"{problem}no model has the sizes of the configuration: {error}") from None
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({**wanted, **found}):
        if found.get(name) != wanted.get(name):
            sizes = [_shape(shapes.get(name)) for shapes in (found, wanted)]
            raise UserError(f"{problem}{name} is {sizes[0]}, and by the configuration {sizes[1]}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{problem}{name} is not finite")
    model = make()
    model.load_state_dict(tensors)
    return model


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else " × ".join(map(str, shape)) or "a number"


def with_tokenizer(model: Loaded, tokenizer: Tokenizer | None, where: Path) -> Loaded:
    """The model in eval mode with a tokeniser, all of whose ids it knows."""
    rows = model.config.vocab_size
    largest = rows - 1 if tokenizer is None else tokenizer.vocab_size - 1
    if largest >= rows:
        raise UserError(f"the tokenizer in {str(where)!r} has ids up to {largest}, and the model knows 0 … {rows - 1}")
    model.tokenizer = tokenizer
    return model.eval()
