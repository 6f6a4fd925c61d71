"""Inside a trained model: the mixing matrices of a text, term by term, and the gains over depth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.analysis.health import entropy
from skipless.errors import UserError
from skipless.nn.attention import Attention
from skipless.nn.masks import Mask
from skipless.nn.mixing import attention_matrix
from skipless.nn.model import Transformer
from skipless.runtime.model import OnnxCausalLM

LONGEST = 128
"""Tokens of a text that are looked at: a matrix has their square."""


@dataclass(frozen=True)
class LayerMaps:
    """The mixing of one layer, for one text."""

    layer: int
    matrix: Tensor
    """(H, T, T)."""
    terms: Mapping[str, Tensor]
    """What it is the sum of, such as αI, βA and −γC; empty where it has no parts that are known."""
    gains: Mapping[str, list[float]]
    """Each gain, by head."""
    entropy: list[float]
    """Of A, in nats, by head: 0 where one token has all the attention."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in four decimals."""

        def numbers(x: Tensor) -> list[Any]:
            return [[[round(value, 4) for value in row] for row in head] for head in x.tolist()]

        return {
            "layer": self.layer,
            "gains": self.gains,
            "attention_entropy": self.entropy,
            "matrix": numbers(self.matrix),
            "terms": {name: numbers(term) for name, term in self.terms.items()},
        }


@dataclass(frozen=True)
class Maps:
    """The mixing of every layer for a text."""

    tokens: list[str]
    layers: list[LayerMaps]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"tokens": self.tokens, "layers": [layer.as_dict() for layer in self.layers]}


@torch.no_grad()
def attention_maps(model: Transformer | OnnxCausalLM, text: str) -> Maps:
    """The mixing matrices of each layer and head of a model that reads a text; a UserError where it has none."""
    if not isinstance(model, Transformer):
        raise UserError("an ONNX export shows none of its matrices: give the run that it was made of")
    if model.tokenizer is None:
        raise UserError("the model has no tokeniser, so it cannot read a text")
    ids = model.tokenizer.encode(text)[: min(LONGEST, model.config.max_seq_len)]
    if len(ids) < 2:
        raise UserError(f"there is nothing to attend to in {text!r}: give a text of two tokens at least")
    found: list[LayerMaps] = []

    def look(module: nn.Module, args: tuple) -> None:
        assert isinstance(module, Attention)
        x, mask, rope = (*args, None)[:3]
        found.append(_look(module, x, mask, rope, len(found) + 1))

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions:
        raise UserError("the blocks of this model have no attention")
    hooks = [module.register_forward_pre_hook(look) for module in attentions]
    was_training = model.training
    model.eval()
    try:
        model.hidden(torch.tensor([ids], device=model.embedding.weight.device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return Maps([model.tokenizer.decode([one]) for one in ids], found)


def _look(module: Attention, x: Tensor, mask: Mask, rope: Any, layer: int) -> LayerMaps:
    mixing = module.mixing
    if not hasattr(mixing, "matrix"):
        name = getattr(mixing, "own_part", type(mixing).__name__)
        raise UserError(f"{name} has no explicit form: give it a method matrix(q, k, mask)")
    q, k = module.queries_keys(module.query(x), module.key(x), rope)
    matrix, attention = mixing.matrix(q, k, mask)[0], attention_matrix(q, k, mask)[0]
    heads = len(attention)
    matrix = matrix.expand(heads, -1, -1)
    names = {name: getattr(mixing, name) for name in getattr(mixing, "initial_gains", {})}
    fixed = {name: getattr(mixing, name, None) for name in ("alpha", "beta", "gamma") if name not in names}
    numbers = {name: value for name, value in {**names, **fixed}.items() if value is not None}
    gains = {name: _by_head(value, heads) for name, value in numbers.items()}
    return LayerMaps(
        layer, matrix.cpu(), _terms(mixing, q, k, mask, matrix), gains, [entropy(one[None]) for one in attention]
    )


def _by_head(gain: Any, heads: int) -> list[float]:
    values = gain.flatten().tolist() if isinstance(gain, Tensor) else [float(gain)]
    return [round(value, 6) for value in (values if len(values) == heads else values[:1] * heads)]


def _terms(mixing: Any, q: Tensor, k: Tensor, mask: Mask, matrix: Tensor) -> dict[str, Tensor]:
    """What a matrix is the sum of, if that is so: a subclass may have changed the one and not the other."""
    if not hasattr(mixing, "terms"):
        return {}
    terms = {name: term.expand(1, *matrix.shape)[0] for name, term in mixing.terms(q, k, mask).items()}
    total = sum(terms.values(), torch.zeros_like(matrix))
    return {name: term.cpu() for name, term in terms.items()} if torch.allclose(total, matrix, atol=1e-5) else {}
