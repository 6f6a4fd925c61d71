"""A causal model as an ONNX graph that continues a cache: one graph reads prompts and decodes.

Its inputs:

    input_ids     (B, t) int64    new tokens, padded on the right
    past_lengths  (B,) int32      how many tokens each row remembers
    new_lengths   (B,) int32      how many of its new tokens are real
    logits_at     (B, n) int64    which of the new tokens logits are wanted for
    past_*                        what each layer remembers

and its outputs `logits` (B, n, V) and `present_*`, which may lie in the memory of `past_*`: then nothing is copied. By
the cache's mode, layer l remembers

    kv, kx   `key.l` and `value.l` (B, H, S, D); at 8 bits as int8, with a fixed step for each channel
    x        `input.l` (B, S, d); at 8 bits as int8, with `scale.l` (B, S, 1)
    all      with shaped attention `sum.l` (B, 1, d), the sum of the values so far

with S places, of which the first are taken. `skipless/runtime/decoder.py` runs such a graph.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.errors import UserError
from skipless.interop.onnx_attention import AttentionNodes
from skipless.interop.onnx_cache_steps import cache_steps
from skipless.interop.onnx_options import OnnxOptions
from skipless.interop.onnx_parts import FLOAT, Linear, Term, array, number_or_row, unknown_part
from skipless.nn.attention import Attention
from skipless.nn.blocks import ParallelBlock, SequentialBlock
from skipless.nn.cache import pick_mode
from skipless.nn.kernels import plain_type
from skipless.nn.layers import GLU, MLP, Gain, no_branch
from skipless.nn.model import CausalLM
from skipless.nn.positions import LearnedPositions, Positions, RotaryPositions, SinusoidalPositions, _angles


@torch.no_grad()
def decoder_graph(model: CausalLM, options: OnnxOptions) -> Any:
    """The model in ONNX's own form."""
    return _Decoder(model, options).model_proto()


class _Decoder(AttentionNodes):
    def __init__(self, model: CausalLM, options: OnnxOptions) -> None:
        super().__init__(model.config, options, pick_mode(model.config, options.cache))
        self.model = model
        if options.cache_bits == 8 and self.mode != "x":
            self.cache_steps = cache_steps(model)

    def model_proto(self) -> Any:
        """Embedding, blocks, and the head where it is wanted."""
        graph, model = self.graph, self.model
        if not model.reads_head():
            raise unknown_part(model.head)
        wanted = graph.input("logits_at", "int64", ["batch", "wanted"])
        x = self.norm(model.embedding_norm, self._placed(self.rows_of(model.embedding.weight, self.ids)))
        for layer, block in enumerate(model.blocks):
            x = self._block(block, x, layer)
        x = graph.add("GatherND", x, graph.add("Unsqueeze", wanted, self.ints(2)), batch_dims=1)
        logits = self.product_with_table(self.norm(model.norm, x), model.head_matrix())
        graph.add_many("Identity", ["logits"], logits)
        graph.output("logits", "float32", ["batch", "wanted", self.config.vocab_size])
        return graph.model()

    def _placed(self, x: str) -> str:
        """With what positions add."""
        graph, added = self.graph, self.model.positions
        if type(added) in (Positions, RotaryPositions):  # they act inside the attention
            return x
        if type(added) is LearnedPositions:
            return graph.add("Add", x, graph.add("Gather", graph.constant(array(added.weight)), self.inside))
        if type(added) is not SinusoidalPositions:
            raise unknown_part(added)
        rates = _angles(torch.ones(()), added.width)
        angles = graph.add("Cast", graph.add("Unsqueeze", self.positions, self.ints(2)), to=FLOAT)
        angles = graph.add("Mul", angles, graph.constant(array(rates)))  # (B, t, d / 2)
        waves = graph.add("Concat", graph.add("Sin", angles), graph.add("Cos", angles), axis=-1)
        scale = number_or_row(added.scale)
        assert scale is not None
        return graph.add("Add", x, self.scaled(scale, waves))

    def _block(self, block: nn.Module, x: str, layer: int) -> str:
        assert isinstance(block, ParallelBlock | SequentialBlock)
        for part, known in ((block.attention, (Attention,)), (block.mlp, (MLP, GLU))):
            if part is not no_branch and plain_type(part) not in known:
                raise unknown_part(part)
        if plain_type(block) is ParallelBlock:
            return self._parallel(block, x, layer)  # pyrefly: ignore
        if plain_type(block) is SequentialBlock:
            return self._sequential(block, x, layer)  # pyrefly: ignore
        raise unknown_part(block)

    def _parallel(self, block: ParallelBlock, x: str, layer: int) -> str:
        """Equation 7, with all maps of the norm's output as one product."""
        mha, mlp = block.attention, block.mlp
        h = self.norm(block.norm, x)
        maps: dict[str, Linear] = self.maps(mha) if isinstance(mha, Attention) else {}
        if isinstance(mlp, MLP | GLU):
            maps["up"] = (mlp.up.weight, mlp.up.bias)
        products = self._joint(h, maps)
        terms: list[Term] = [(number_or_row(block.alpha_comb), x)]
        if isinstance(mlp, MLP | GLU):
            terms.append((1.0, self._contract(mlp, products["up"], block.beta_ff)))
        if isinstance(mha, Attention):
            terms += self.attention(mha, h, products, layer, block.beta_sa)
        return self.total_of(terms)

    def _sequential(self, block: SequentialBlock, x: str, layer: int) -> str:
        """Equation 1, with queries, keys and values as one product."""
        mha, mlp = block.attention, block.mlp
        terms: list[Term] = [(number_or_row(block.alpha_sa), x)]
        if isinstance(mha, Attention):
            h = self.norm(block.norm_sa, x)
            terms += self.attention(mha, h, self._joint(h, self.maps(mha)), layer, block.beta_sa)
        x = self.norm(block.post_norm_sa, self.total_of(terms))
        terms = [(number_or_row(block.alpha_ff), x)]
        if isinstance(mlp, MLP | GLU):
            hidden = self.product(self.norm(block.norm_ff, x), mlp.up.weight, mlp.up.bias)
            terms.append((1.0, self._contract(mlp, hidden, block.beta_ff)))
        return self.norm(block.post_norm_ff, self.total_of(terms))

    def _joint(self, x: str, maps: dict[str, Linear]) -> dict[str, str]:
        """Several maps of one input as one product."""
        if not maps:
            return {}
        weight = torch.cat([matrix for matrix, _ in maps.values()])
        biases = [matrix.new_zeros(len(matrix)) if bias is None else bias for matrix, bias in maps.values()]
        some = any(bias is not None for _, bias in maps.values())
        whole = self.product(x, weight, torch.cat(biases) if some else None)
        if len(maps) == 1:
            return dict.fromkeys(maps, whole)
        widths = self.graph.constant([len(matrix) for matrix, _ in maps.values()], np.int64)
        return dict(zip(maps, self.graph.add_many("Split", len(maps), whole, widths, axis=-1), strict=True))

    def _contract(self, mlp: MLP | GLU, hidden: str, gain: Gain) -> str:
        """Everything after the first product, with the branch's gain in the last matrix."""
        graph = self.graph
        if plain_type(mlp) is GLU:
            hidden, gate = graph.add_many("Split", 2, hidden, axis=-1, num_outputs=2)
            hidden = graph.add("Mul", hidden, self._activation(gate))
        elif plain_type(mlp) is MLP:
            hidden = self._activation(hidden)
        else:
            raise unknown_part(mlp)
        factor = 1.0 if gain is None else gain
        bias = None if mlp.down.bias is None else mlp.down.bias * factor
        return self.product(hidden, mlp.down.weight * factor, bias)

    def _activation(self, x: str) -> str:
        graph, block = self.graph, self.config.block
        known: dict[str, Callable[[], str]] = {
            "relu": lambda: graph.add("Relu", x),
            "leaky-relu": lambda: graph.add("LeakyRelu", x, alpha=block.negative_slope),
            "gelu": lambda: graph.add("Gelu", x),
            "gelu-tanh": lambda: graph.add("Gelu", x, approximate="tanh"),
            "silu": lambda: graph.add("Mul", x, graph.add("Sigmoid", x)),
        }
        if not isinstance(block.activation, str) or block.activation not in known:
            raise UserError(f"activation {block.activation!r} cannot be written with a cache: use --cache none")
        return known[block.activation]()
