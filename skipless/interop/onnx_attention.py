"""Attention over a cache as ONNX nodes: over keys and values, or over inputs alone.

Shapes: B batch, H heads, D width of a head, d width, t new tokens, S places of the cache.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.interop.onnx_graph import MICROSOFT, Axes, Graph
from skipless.interop.onnx_options import OnnxOptions
from skipless.interop.onnx_parts import (
    FLOAT,
    INT8,
    INT32,
    INT64,
    Linear,
    Parts,
    Row,
    Term,
    array,
    linear_map,
    number_or_row,
    unknown_part,
)
from skipless.nn.attention import Attention
from skipless.nn.kernels import plain_type
from skipless.nn.layers import Gain, identity
from skipless.nn.masks import alibi_slopes
from skipless.nn.mixing import Shaped, Softmax, VSkipInit

ROTATED_WIDTH = 16
"""`GroupQueryAttention` rotates heads whose width is a multiple of this; others are rotated by nodes of their own."""

HEAD_WIDTH = 8
"""It takes heads whose width is a multiple of this; others are filled up with zeros."""


STEPS_AT = 12
"""Where it takes the steps of a cache at 8 bits."""


class AttentionNodes(Parts):
    """The attention of every layer, and what all layers share: where the new tokens stand."""

    cache_steps: Sequence[tuple[Tensor, Tensor]] = ()
    """Of each layer those of keys and of values, (H, D), where they are remembered at 8 bits."""

    def __init__(self, config: ModelConfig, options: OnnxOptions, mode: str) -> None:
        super().__init__(options)
        self.config, self.mode = config, mode
        graph = self.graph
        self.ids = graph.input("input_ids", "int64", ["batch", "new"])
        past = graph.input("past_lengths", "int32", ["batch"])
        new = graph.input("new_lengths", "int32", ["batch"])
        self.n_new = self.size(self.ids, 1)  # t
        self.steps = self.count_to(self.n_new)
        wide = graph.add("Unsqueeze", graph.add("Cast", past, to=INT64), self.ints(1))
        self.positions = graph.add("Add", wide, self.steps)  # (B, t)
        self.inside = graph.add("Min", self.positions, self.ints(config.max_seq_len - 1))
        """The same, where padding may not lie beyond the context."""
        self.last_places = graph.add("Sub", graph.add("Add", past, new), graph.constant([1], np.int32))  # (B,)
        self.end = graph.add("Add", graph.add("ReduceMax", wide, keepdims=0), self.n_new)
        last = graph.add("Sub", graph.add("Cast", new, to=INT64), self.ints(1))
        self.last_new = graph.add("Unsqueeze", last, self.ints(1, 2))  # (B, 1, 1): which new token is a row's last
        self._once: dict[str, str] = {}

    def once(self, name: str) -> str:
        """Something that all layers share, made when it is first asked for: the method of that name makes it."""
        if name not in self._once:
            self._once[name] = getattr(self, f"_{name}")()
        return self._once[name]

    def _split(self) -> str:
        """The shape (B, t, H, D)."""
        return self.ints(0, 0, self.config.n_head, self.config.d_head)

    def _join(self) -> str:
        """The shape (B, t, d)."""
        return self.ints(0, 0, self.config.d_model)

    def attention(self, mha: Attention, h: str, products: dict[str, str], layer: int, gain: Gain) -> list[Term]:
        """The terms whose sum is the attention branch of a block, from its input and what `maps` made of it."""
        values = products.get("value", h)
        if self.mode == "x":
            attended = self._attend_inputs(mha, h, products["query"], layer)
        else:
            attended = self._attend(mha, products["query"], products["key"], values, layer)
        mixed = self._mixed(mha.mixing, values, attended, layer)
        beta = 1.0 if gain is None else float(gain)  # a gain of a whole branch is one number
        if mha.projection is identity:
            return [(beta * row, name) for row, name in mixed]
        weight, bias = linear_map(mha.projection)
        out = self.product(self.total_of([*mixed]), weight * beta, None if bias is None else bias * beta)
        return [(1.0, out)]

    def maps(self, mha: Attention) -> dict[str, Linear]:
        """The linear maps of the attention's input. A cache of inputs makes no keys here."""
        found = {"query": linear_map(mha.query)}
        if self.mode != "x":
            found["key"] = linear_map(mha.key)
        if mha.value is not identity:
            found["value"] = linear_map(mha.value)
        return found

    # -------------------------------------------------------------------------------------------- the mixing

    def _mixed(self, mixing: nn.Module, values: str, attended: str, layer: int) -> list[tuple[Row, str]]:
        """α·V + β·A V − γ·C V as its terms."""
        kind = plain_type(mixing)
        if kind is Softmax:
            return [(1.0, attended)]
        if kind not in (VSkipInit, Shaped):
            raise unknown_part(mixing)
        assert isinstance(mixing, VSkipInit)
        gains: list[tuple[Gain, str]] = [(mixing.alpha, values), (mixing.beta, attended)]
        terms = [(self._by_column(gain), name) for gain, name in gains if gain is not None]
        if isinstance(mixing, Shaped) and mixing.gamma is not None:
            terms.append((-1.0 * self._by_column(mixing.gamma), self._mean(values, layer)))
        return terms

    def _by_column(self, gain: Gain) -> Row:
        """A gain of each head as one of each column."""
        value = number_or_row(gain)
        assert value is not None
        return np.repeat(value, self.config.d_head) if isinstance(value, np.ndarray) else value

    def _mean(self, values: str, layer: int) -> str:
        """C·V (B, t, d) from the sum so far, which is carried on to the last real token of each row."""
        graph, cfg = self.graph, self.config
        axes: Axes = ["batch", 1, cfg.d_model]
        total = graph.input(f"past_sum.{layer}", "float32", axes)
        if cfg.positions == "alibi":
            heads = graph.add("Transpose", graph.add("Reshape", values, self.once("split")), perm=[0, 2, 1, 3])
            heads = graph.add("MatMul", self.once("discounts"), heads)
            within = graph.add("Reshape", graph.add("Transpose", heads, perm=[0, 2, 1, 3]), self.once("join"))
            sums = graph.add("Add", within, graph.add("Mul", self.once("fading"), total))
        else:
            sums = graph.add("Add", graph.add("CumSum", values, self.number(1)), total)
        graph.add_many("GatherND", [f"present_sum.{layer}"], sums, self.last_new, batch_dims=1)
        graph.output(f"present_sum.{layer}", "float32", axes)
        return graph.add("Mul", sums, self.once("per_count"))

    def _per_count(self) -> str:
        """1 over the tokens so far, or over their discounts' sum under ALiBi: (B, t, 1 or d)."""
        graph, cfg = self.graph, self.config
        if cfg.positions != "alibi":
            count = graph.add("Cast", graph.add("Add", self.positions, self.ints(1)), to=FLOAT)
            return graph.add("Unsqueeze", graph.add("Reciprocal", count), self.ints(2))
        slopes = alibi_slopes(cfg.n_head).numpy().astype(np.float64)
        numbers = np.arange(1, cfg.max_seq_len + 1)[:, None]
        counts = (1 - np.exp(-slopes * numbers)) / (1 - np.exp(-slopes))
        return graph.add("Gather", graph.constant(np.repeat(1 / counts, cfg.d_head, axis=1)), self.inside)

    def _discounts(self) -> str:
        """e^(−m·(i − j)) among the new tokens, 0 where j comes after i: (H, t, t)."""
        graph = self.graph
        number = graph.add("Cast", graph.add("Unsqueeze", self.steps, self.ints(1)), to=FLOAT)  # (t, 1)
        apart = graph.add("Sub", number, graph.add("Transpose", number, perm=[1, 0]))
        earlier = graph.add("Cast", graph.add("GreaterOrEqual", apart, graph.constant([0.0])), to=FLOAT)
        # a later token's distance is negative and would grow without bound: it counts as 0 until it is masked
        distance = graph.add("Max", apart, graph.constant([0.0]))
        slopes = alibi_slopes(self.config.n_head).numpy()[:, None, None]
        return graph.add("Mul", graph.add("Exp", graph.add("Mul", distance, graph.constant(-slopes))), earlier)

    def _fading(self) -> str:
        """What is left of the sum so far at each new token, e^(−m·(i + 1)): (t, d)."""
        graph, cfg = self.graph, self.config
        number = graph.add("Cast", graph.add("Unsqueeze", self.steps, self.ints(1)), to=FLOAT)
        number = graph.add("Add", number, graph.constant([1.0]))
        by_column = np.repeat(alibi_slopes(cfg.n_head).numpy(), cfg.d_head)
        return graph.add("Exp", graph.add("Mul", number, graph.constant(-by_column)))

    def _bias(self) -> str:
        """ALiBi's −m·(i − j) over the tokens so far: (B, H, t, tokens)."""
        return self._alibi(self.end)

    def _alibi(self, places: str) -> str:
        graph = self.graph
        own = graph.add("Unsqueeze", self.positions, self.ints(1, 3))  # (B, 1, t, 1)
        apart = graph.add("Cast", graph.add("Sub", own, self.count_to(places)), to=FLOAT)
        return graph.add("Mul", apart, graph.constant(-alibi_slopes(self.config.n_head).numpy()[:, None, None]))

    # --------------------------------------------------------------------------------------- keys and values

    def _attend(self, mha: Attention, q: str, k: str, v: str, layer: int) -> str:
        """A·V (B, t, d) over keys and values, to which the new ones are added where they lie."""
        graph, cfg = self.graph, self.config
        q, k = self._head_norm(mha.query_norm, q), self._head_norm(mha.key_norm, k)
        width = -(-cfg.d_head // HEAD_WIDTH) * HEAD_WIDTH
        axes: Axes = ["batch", cfg.n_head, "places", width]
        kept = "float32" if self.options.cache_bits == 32 else "int8"
        past = [graph.input(f"past_{what}.{layer}", kept, axes) for what in ("key", "value")]
        more, rotates = [], cfg.positions == "rotary" and cfg.d_head % ROTATED_WIDTH == 0
        if rotates:
            more = [self.once("cosines"), self.once("sines")]
        elif cfg.positions == "rotary":
            q, k = self._rotated(q), self._rotated(k)
        elif cfg.positions == "alibi":
            more = ["", "", "", self.once("bias")]
        q, k, v = (self._resized(part, cfg.d_head, width) for part in (q, k, v))
        inputs = [q, k, v, *past, self.last_places, self.once("end32"), *more]
        how: dict[str, int | str] = {}
        if kept == "int8":
            inputs += [""] * (STEPS_AT - len(inputs)) + [
                self._steps_of(part, width) for part in self.cache_steps[layer]
            ]
            how = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        names = [graph.fresh("attended"), f"present_key.{layer}", f"present_value.{layer}"]
        how |= {"num_heads": cfg.n_head, "kv_num_heads": cfg.n_head, "do_rotary": int(rotates)}
        graph.add_many("GroupQueryAttention", names, *inputs, domain=MICROSOFT, scale=cfg.d_head**-0.5, **how)
        for name in names[1:]:
            graph.output(name, kept, axes)
        return self._resized(names[0], width, cfg.d_head)

    def _steps_of(self, steps: Tensor, width: int) -> str:
        """The steps of int8 for each channel of heads that may be wider than the model's."""
        filled = torch.ones(steps.shape[0], width)
        filled[:, : steps.shape[1]] = steps
        return self.graph.constant(array(filled).reshape(-1))

    def _resized(self, x: str, old: int, new: int) -> str:
        """Heads of another width: zeros are added behind each, which change no score, or taken away again."""
        if old == new:
            return x
        graph, heads = self.graph, self.config.n_head
        x = graph.add("Reshape", x, self.ints(0, 0, heads, old))
        x = graph.add("Pad", x, self.ints(*[0] * 7, new - old))  # a negative number takes away
        return graph.add("Reshape", x, self.ints(0, 0, heads * new))

    def _head_norm(self, norm: nn.Module, x: str) -> str:
        """The norm of each head's queries or keys, if there is one."""
        if isinstance(norm, nn.Identity):
            return x
        return self.graph.add(
            "Reshape", self.norm(norm, self.graph.add("Reshape", x, self.once("split"))), self.once("join")
        )

    def _rotated(self, x: str) -> str:
        """Queries or keys turned by their positions: dimension i of a head goes with dimension i + D / 2."""
        graph = self.graph
        heads = graph.add("Reshape", x, self.once("split"))
        a, b = graph.add_many("Split", 2, heads, axis=-1, num_outputs=2)
        cos, sin = self.once("cosines_here"), self.once("sines_here")  # (B, t, 1, D / 2)
        first = graph.add("Sub", graph.add("Mul", a, cos), graph.add("Mul", b, sin))
        second = graph.add("Add", graph.add("Mul", b, cos), graph.add("Mul", a, sin))
        return graph.add("Reshape", graph.add("Concat", first, second, axis=-1), self.once("join"))

    def _cosines_here(self) -> str:
        return self._here(self.once("cosines"))

    def _sines_here(self) -> str:
        return self._here(self.once("sines"))

    def _here(self, table: str) -> str:
        return self.graph.add("Unsqueeze", self.graph.add("Gather", table, self.inside), self.ints(2))

    def _end32(self) -> str:
        return self.graph.add("Cast", self.end, to=INT32)

    def _cosines(self) -> str:
        return self.graph.constant(self._angles().cos().numpy())

    def _sines(self) -> str:
        return self.graph.constant(self._angles().sin().numpy())

    def _angles(self) -> Tensor:
        """By which each pair of a head's dimensions is rotated, (T, D / 2)."""
        half = torch.arange(0, self.config.d_head, 2, dtype=torch.float32)
        rates = torch.exp(half * (-math.log(10_000.0) / self.config.d_head))
        return torch.arange(self.config.max_seq_len).float()[:, None] * rates

    # ------------------------------------------------------------------------------------------- inputs alone

    def _attend_inputs(self, mha: Attention, x: str, q: str, layer: int) -> str:
        """A·V (B, t, d) from inputs alone. For one new token W^K is absorbed into its query; for more, keys are made
        again. Both read W^K in float32, as a matrix for each head.
        """
        graph, cfg = self.graph, self.config
        inputs = self._remember_inputs(x, layer)
        if "seen" not in self._once:
            self._once["seen"] = self._seen(self.size(inputs, 1))
        seen = self._once["seen"]
        w_key, key_bias = linear_map(mha.key)
        by_head = graph.constant(array(w_key).reshape(cfg.n_head, cfg.d_head, cfg.d_model))
        queries = graph.add("Transpose", graph.add("Reshape", q, self.once("split")), perm=[0, 2, 1, 3])  # (B, H, t, D)
        queries = graph.add("Mul", queries, graph.constant([1 / math.sqrt(cfg.d_head)]))
        value = None if mha.value is identity else linear_map(mha.value)
        one, many = Graph(graph), Graph(graph)
        self._absorb(one, queries, inputs, seen, by_head, value)
        self._make_keys(many, queries, inputs, seen, by_head, key_bias, value)
        return graph.choose(self.once("is_one"), one, many)

    def _is_one(self) -> str:
        return self.graph.add("Equal", self.n_new, self.number(1))

    def _rows(self) -> str:
        """The row and the place of each new token, (B, t, 2)."""
        graph = self.graph
        rows = graph.add("Unsqueeze", self.count_to(self.size(self.ids, 0)), self.ints(1))
        rows = graph.add("Expand", rows, graph.add("Shape", self.positions))
        both = [graph.add("Unsqueeze", part, self.ints(2)) for part in (rows, self.positions)]
        return graph.add("Concat", *both, axis=2)

    def _remember_inputs(self, x: str, layer: int) -> str:
        """Write the new inputs behind those that are there; all S places, (B, S, d)."""
        graph, d = self.graph, self.config.d_model
        if self.options.cache_bits == 32:
            return self._written(f"input.{layer}", "float32", d, x)
        largest = graph.add("ReduceMax", graph.add("Abs", x), self.ints(2), keepdims=1)  # (B, t, 1)
        scale = graph.add("Max", graph.add("Mul", largest, graph.constant([1 / 127])), graph.constant([1e-30]))
        small = graph.add("Cast", graph.add("Round", graph.add("Div", x, scale)), to=INT8)
        kept = graph.add("Cast", self._written(f"input.{layer}", "int8", d, small), to=FLOAT)
        return graph.add("Mul", kept, self._written(f"scale.{layer}", "float32", 1, scale))

    def _written(self, name: str, dtype: str, width: int, new: str) -> str:
        graph, axes = self.graph, ["batch", "places", width]
        past = graph.input(f"past_{name}", dtype, axes)
        (present,) = graph.add_many("ScatterND", [f"present_{name}"], past, self.once("rows"), new)
        return graph.output(present, dtype, axes)

    def _seen(self, places: str) -> str:
        """M over all S places, (B, 1 or H, t, S)."""
        graph = self.graph
        own = graph.add("Unsqueeze", self.positions, self.ints(1, 3))  # (B, 1, t, 1)
        visible = graph.add("LessOrEqual", self.count_to(places), own)
        bias = self._alibi(places) if self.config.positions == "alibi" else graph.constant([0.0])
        return graph.add("Where", visible, bias, graph.constant([-np.inf]))

    def _absorb(self, graph: Graph, queries: str, inputs: str, seen: str, w_key: str, value: Linear | None) -> None:
        """Scores (q_h W^K_hᵀ)·x and mixtures A_h X for t = 1, each one product for all heads."""
        cfg = self.config
        heads, d = cfg.n_head, cfg.d_model
        absorbed = graph.add("Reshape", graph.add("MatMul", queries, w_key), graph.constant([0, heads, d], np.int64))
        scores = graph.add("FusedMatMul", absorbed, inputs, domain=MICROSOFT, transB=1)  # (B, H, S)
        weights = graph.add("Softmax", graph.add("Add", scores, graph.add("Squeeze", seen, self.ints(2))), axis=-1)
        whole = graph.add("MatMul", weights, inputs)  # (B, H, d): each head's mixture of all columns
        if value is None:  # of which a head has its own
            own = graph.constant(np.repeat(np.eye(heads), cfg.d_head, axis=1))
            mixed = graph.add("ReduceSum", graph.add("Mul", whole, own), self.ints(1), keepdims=1)
        else:
            weight, bias = value
            by_head = graph.constant(array(weight).reshape(heads, cfg.d_head, d).transpose(0, 2, 1))
            mixed = graph.add("MatMul", graph.add("Unsqueeze", whole, self.ints(2)), by_head)  # (B, H, 1, D)
            mixed = graph.add("Reshape", mixed, graph.constant([0, 1, d], np.int64))
            mixed = mixed if bias is None else graph.add("Add", mixed, graph.constant(array(bias)))
        graph.output(mixed, "float32", None)

    def _make_keys(
        self,
        graph: Graph,
        queries: str,
        inputs: str,
        seen: str,
        w_key: str,
        key_bias: Tensor | None,
        value: Linear | None,
    ) -> None:
        """Attention with the keys, and where there is W^V the values, of all inputs."""
        cfg = self.config
        keys = graph.add("Unsqueeze", inputs, self.ints(1))  # (B, 1, S, d)
        keys = graph.add("FusedMatMul", keys, w_key, domain=MICROSOFT, transB=1)  # (B, H, S, D)
        if key_bias is not None:
            keys = graph.add("Add", keys, graph.constant(array(key_bias).reshape(cfg.n_head, 1, cfg.d_head)))
        scores = graph.add("FusedMatMul", queries, keys, domain=MICROSOFT, transB=1)
        weights = graph.add("Softmax", graph.add("Add", scores, seen), axis=-1)
        values = inputs
        if value is not None:
            weight, bias = value
            values = graph.add("MatMul", inputs, graph.constant(array(weight).T))
            values = values if bias is None else graph.add("Add", values, graph.constant(array(bias)))
        values = graph.add("Transpose", graph.add("Reshape", values, self.once("split")), perm=[0, 2, 1, 3])
        mixed = graph.add("Transpose", graph.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        graph.output(graph.add("Reshape", mixed, self.once("join")), "float32", None)
