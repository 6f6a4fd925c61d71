"""The small parts of a model as ONNX nodes: matrices at 32, 8 or 4 bits, norms, weighted sums."""

import numpy as np
import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.interop.onnx_bits import pack
from skipless.interop.onnx_graph import MICROSOFT, Graph
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.kernels import plain_type
from skipless.nn.layers import Gain, ReparamLinear, RMSNorm, RMSPlusEps

Row = np.ndarray | float
"""A gain: a number, or (d,) one for each column."""

Term = tuple[Row | None, str]
"""A gain, and the name of what it weighs; None where the branch is not there."""

Linear = tuple[Tensor, Tensor | None]
"""A linear map: its (out, in) matrix and its bias."""

FLOAT, INT8, INT32, INT64 = 1, 3, 6, 7
"""ONNX's numbers of types, for `Cast`."""


class Parts:
    """What the nodes of a model are made with."""

    def __init__(self, options: OnnxOptions) -> None:
        self.graph = Graph()
        self.options = options
        self._tables: dict[int, list[str]] = {}

    # ------------------------------------------------------------------------------------------- matrices

    def product(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """x · weightᵀ + bias, for an (out, in) matrix."""
        graph, options = self.graph, self.options
        rows, n_inputs = weight.shape
        if options.bits == 32:
            y = graph.add("MatMul", x, graph.constant(array(weight).T, name="weight"))
            return y if bias is None else graph.add("Add", y, graph.constant(array(bias)))
        weights, scales, *zero_points = self._low_bits(weight)
        inputs = [x, weights, scales, *zero_points]
        if bias is not None:
            inputs += [""] * (5 - len(inputs)) + [graph.constant(array(bias))]
        attributes = {"K": n_inputs, "N": rows, "bits": options.bits, "block_size": options.block}
        # 4: the input goes in at 8 bits, in blocks with a scale of their own, as in llama.cpp
        return graph.add("MatMulNBits", *inputs, domain=MICROSOFT, accuracy_level=4, **attributes)

    def _low_bits(self, weight: Tensor, *, flat: bool = False) -> list[str]:
        """A matrix as `MatMulNBits` has it, or flat, (rows, bytes), as `GatherBlockQuantized` has it."""
        options = self.options
        packed = pack(weight, options.bits, options.block, symmetric=options.symmetric)
        rows, blocks = packed.scales.shape
        weights = packed.weights if flat else packed.weights.reshape(rows, blocks, -1)
        made = [self.graph.constant(weights, np.uint8, "weight"), self.graph.constant(packed.scales, name="scales")]
        if packed.zero_points is not None:
            made.append(self.graph.constant(packed.zero_points, np.uint8, "zeros"))
        return made

    def rows_of(self, weight: Tensor, ids: str) -> str:
        """Rows of a table: (V, d), (B, t) → (B, t, d)."""
        graph, options = self.graph, self.options
        if options.bits == 32:
            self._tables[weight.data_ptr()] = [graph.constant(array(weight), name="table")]
            return graph.add("Gather", self._tables[weight.data_ptr()][0], ids)
        table = self._tables[weight.data_ptr()] = self._low_bits(weight, flat=True)
        how = {"bits": options.bits, "block_size": options.block, "gather_axis": 0, "quantize_axis": 1}
        found = graph.add("GatherBlockQuantized", table[0], ids, *table[1:], domain=MICROSOFT, **how)
        if weight.shape[1] % options.block:  # the last block is only a part of one
            found = graph.add("Slice", found, self.ints(0), self.ints(weight.shape[1]), self.ints(2))
        return found

    def product_with_table(self, x: str, weight: Tensor) -> str:
        """x · weightᵀ for a matrix whose rows are looked up too: it is stored once."""
        graph, options, table = self.graph, self.options, self._tables.get(weight.data_ptr())
        if table is None:
            return self.product(x, weight)
        if options.bits == 32:
            return graph.add("FusedMatMul", x, table[0], domain=MICROSOFT, transB=1)
        rows, n_inputs = weight.shape
        shape = [rows, -(-n_inputs // options.block), options.block * options.bits // 8]
        weights = graph.add("Reshape", table[0], graph.constant(shape, np.int64))
        how = {"K": n_inputs, "N": rows, "bits": options.bits, "block_size": options.block}
        return graph.add("MatMulNBits", x, weights, *table[1:], domain=MICROSOFT, accuracy_level=4, **how)

    # ------------------------------------------------------------------------------------------ sums, norms

    def total_of(self, terms: list[Term]) -> str:
        """Σ gain·x over the terms that are there."""
        parts = [self.scaled(gain, name) for gain, name in terms if gain is not None]
        return parts[0] if len(parts) == 1 else self.graph.add("Sum", *parts)

    def scaled(self, gain: Row, x: str) -> str:
        """gain · x; a gain of 1 is no product."""
        if isinstance(gain, float) and gain == 1:
            return x
        return self.graph.add("Mul", x, self.graph.constant(np.atleast_1d(gain)))

    def norm(self, norm: nn.Module, x: str) -> str:
        """A norm over the last axis."""
        graph, kind = self.graph, plain_type(norm)
        if kind is nn.Identity:
            return x
        if kind is RMSNorm:
            assert isinstance(norm, RMSNorm)
            weight = graph.constant(array(norm.weight))
            return graph.add("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=norm.eps)
        if kind is RMSPlusEps:
            assert isinstance(norm, RMSPlusEps)
            size = graph.add("ReduceL2", x, self.ints(-1), keepdims=1)
            size = graph.add("Mul", size, graph.constant([norm.weight.numel() ** -0.5]))
            size = graph.add("Add", size, graph.constant([norm.eps]))
            return graph.add("Mul", graph.add("Div", x, size), graph.constant(array(norm.weight)))
        if kind is nn.LayerNorm:
            assert isinstance(norm, nn.LayerNorm)
            parts = [graph.constant(array(part)) for part in (norm.weight, norm.bias) if part is not None]
            return graph.add("LayerNormalization", x, *parts, axis=-1, epsilon=norm.eps)
        raise unknown_part(norm)

    # ----------------------------------------------------------------------------------------------- integers

    def number(self, value: int) -> str:
        """A scalar."""
        return self.graph.constant(value, np.int64)

    def ints(self, *values: int) -> str:
        """A list."""
        return self.graph.constant(list(values), np.int64)

    def size(self, x: str, axis: int) -> str:
        """The size of an axis, a scalar."""
        return self.graph.add("Gather", self.graph.add("Shape", x), self.number(axis))

    def count_to(self, end: str) -> str:
        """0, 1, … below a scalar."""
        return self.graph.add("Range", self.number(0), end, self.number(1))


def array(tensor: Tensor) -> np.ndarray:
    """A tensor's values in float32."""
    return tensor.detach().float().cpu().numpy()


def number_or_row(gain: Gain) -> Row | None:
    """A gain as a number, or as an array where it has several."""
    if isinstance(gain, Tensor):
        return array(gain).reshape(-1) if gain.numel() > 1 else float(gain.detach())
    return None if gain is None else float(gain)


def linear_map(part: object) -> Linear:
    """A value or a projection map as one matrix."""
    if isinstance(part, ReparamLinear) and plain_type(part) is ReparamLinear:
        with torch.no_grad():
            return part.matrix(), None
    if isinstance(part, nn.Linear) and type(part) is nn.Linear:
        return part.weight, part.bias
    raise unknown_part(part)


def unknown_part(part: object) -> UserError:
    """For a part that is not one of this package's."""
    return UserError(f"{type(part).__name__} cannot be written into a graph with a cache: use --cache none")
