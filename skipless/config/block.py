"""A block of the paper: one of two layouts with parts plugged in.

`BLOCKS` holds the paper's seven by name; every ablation of the appendix is `BLOCKS[name].replace(...)`, or on the
command line `name:key=value,...`.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from skipless.config.base import Config
from skipless.config.explain import explain
from skipless.config.overrides import is_gain_value, parse_overrides
from skipless.config.parts import Activation, MapKind, Mixing, Mlp, Norm, find_part
from skipless.errors import UserError, unknown


class GainConfig(Config):
    """A scalar weight on a branch. A bare number makes a fixed one; a gain fixed at 0 is no branch at all."""

    init: float | Literal["depth"] = Field(
        1.0, description="Initial value; `depth` is 0.1·√(18/L), the paper's O(1/√L) with 0.1 at 18 layers."
    )
    trainable: bool = Field(False, description="Whether the optimiser moves it (never with weight decay).")

    def at_depth(self, n_layer: int) -> float:
        """The initial value in a model of `n_layer` blocks."""
        return 0.1 * math.sqrt(18 / n_layer) if self.init == "depth" else self.init


def _gain(value: Any) -> Any:
    """Numbers become fixed gains."""
    return {"init": value} if is_gain_value(value) else value


def _no_zero(gain: GainConfig | None) -> GainConfig | None:
    """A gain fixed at zero is None: the branch is not there."""
    return None if gain is not None and gain.init == 0 and not gain.trainable else gain


Gain = Annotated[GainConfig | None, BeforeValidator(_gain), AfterValidator(_no_zero)]

FIXED = GainConfig(init=1.0)

TRAINED = GainConfig(init=1.0, trainable=True)

WInit = Literal["normal", "identity", "orthogonal", "last-layer-tied", "all-tied"]


class MapConfig(Config):
    """The value or the projection map of an attention sub-block: W^V or W^P."""

    kind: MapKind = Field(
        "dense", description="dense: a free matrix; reparam: α·W_init + β·ΔW (eq. 6); identity: nothing at all."
    )
    init: WInit = Field(
        "normal",
        description="W_init: Gaussian of std 0.02, identity, Haar orthogonal, or orthogonal with the projection tied "
        "to the value maps so that the product of all layers (last-layer-tied) or of each layer (all-tied) is I.",
    )
    alpha: Gain = Field(FIXED, description="eq. 6: weight of the fixed W_init.")
    beta: Gain = Field(FIXED, description="eq. 6: weight of the trainable ΔW, which starts at zero.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "reparam" and self.init == "normal":
            raise ValueError("a reparameterised map needs an init of identity, orthogonal, last-layer-tied or all-tied")
        if self.kind != "reparam" and (self.alpha, self.beta) != (FIXED, FIXED):
            raise ValueError(f"alpha and beta belong to kind 'reparam' (eq. 6), not to {self.kind!r}")
        if self.kind == "identity" and self.init not in ("normal", "identity"):
            raise ValueError(f"an identity map has no W_init, so init {self.init!r} means nothing here")
        if find_part("map", self.kind).plugin and self.init != "normal":
            raise ValueError(f"a map of your own has an initialisation of its own, so init {self.init!r} means nothing")
        if self.kind == "reparam" and self.alpha is None and self.beta is None:
            raise ValueError("a reparameterised map with alpha = beta = 0 passes no signal")
        return self


DENSE = MapConfig()

IDENTITY = MapConfig(kind="identity")


class BlockConfig(Config):
    """One transformer block: equation 1 (`sequential`) or equation 7 (`parallel`), with its parts."""

    layout: Literal["sequential", "parallel"] = Field("sequential", description="Equation 1 or equation 7.")
    norm: Norm = Field(
        "rmsnorm",
        description="Norm inside the block: rmsnorm, layernorm, none, or rms-plus-eps, which divides by rms + eps, as "
        "the authors' code does.",
    )
    norm_position: Literal["pre", "post"] = Field("pre", description="Norm on the branch, or after the sum.")
    norm_eps: float = Field(1e-8, gt=0, description="Epsilon of every norm.")

    mixing: Mixing = Field(
        "softmax",
        description="The attention matrix: softmax is A, v-skipinit αI + βA (eq. 4), shaped αI + βA − γC (eq. 5).",
    )
    alpha: Gain = Field(TRAINED, description="Weight of I in eq. 4 and 5.")
    beta: Gain = Field(TRAINED, description="Weight of A in eq. 4 and 5.")
    gamma: Gain = Field(TRAINED, description="Weight of C in eq. 5.")
    per_head_gains: bool = Field(True, description="One α, β, γ per head, or one per layer.")
    zero_query: bool = Field(False, description="Start W^Q at 0, so that A = C at the start.")
    qk_norm: bool = Field(False, description="Norm on the queries and the keys of each head.")
    qk_bias: bool = Field(False, description="Biases of the queries and the keys, where `bias` is off.")

    value: MapConfig = Field(DENSE, description="W^V.")
    projection: MapConfig = Field(DENSE, description="W^P.")
    first_value: MapConfig | None = Field(None, description="W^V of layer 1, where it differs from the others.")

    mlp: Mlp = Field("plain", description="plain: MLP; glu: gated linear unit (half the hidden width).")
    activation: Activation = Field("relu", description="Non-linearity: relu, leaky-relu, gelu, gelu-tanh, silu.")
    negative_slope: float = Field(0.01, ge=0, le=1, description="s of the leaky ReLU, max(x, s·x).")
    bias: bool = Field(False, description="Biases in the linear maps and the layer norms.")
    norm_bias: bool = Field(False, description="Biases of the layer norms alone, where `bias` is off.")

    alpha_sa: Gain = Field(FIXED, description="eq. 1: skip around the attention; 0 removes it.")
    beta_sa: Gain = Field(FIXED, description="eq. 1 and 7: weight of the attention branch.")
    alpha_ff: Gain = Field(FIXED, description="eq. 1: skip around the MLP; 0 removes it.")
    beta_ff: Gain = Field(FIXED, description="eq. 1 and 7: weight of the MLP branch.")
    alpha_comb: Gain = Field(None, description="eq. 7: the skip of the parallel block; 0 removes it.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layout == "parallel" and (self.alpha_sa or self.alpha_ff):
            raise ValueError("the parallel block (eq. 7) has one skip, alpha_comb: set alpha_sa=0 and alpha_ff=0")
        if self.layout == "sequential" and self.alpha_comb:
            raise ValueError(
                "alpha_comb belongs to the parallel block (eq. 7); the sequential one has alpha_sa, alpha_ff"
            )
        if self.layout == "parallel" and self.norm_position == "post":
            raise ValueError("norm_position 'post' is defined for the sequential layout only")
        if self.layout == "parallel" and not (self.beta_sa or self.beta_ff or self.alpha_comb):
            raise ValueError("a block with alpha_comb = beta_sa = beta_ff = 0 has no output")
        if self.layout == "sequential" and not ((self.alpha_sa or self.beta_sa) and (self.alpha_ff or self.beta_ff)):
            raise ValueError("a sub-block whose skip and branch are both 0 has no output")
        self._check_mixing()
        self._check_ties()
        return self

    def _check_mixing(self) -> None:
        if self.mixing == "softmax" and (self.alpha, self.beta, self.gamma) != (TRAINED, TRAINED, TRAINED):
            raise ValueError(
                "alpha, beta and gamma belong to mixing v-skipinit or shaped; the skips are alpha_sa, alpha_ff"
            )
        if self.mixing == "v-skipinit" and self.gamma != TRAINED:
            raise ValueError("gamma belongs to mixing 'shaped' (eq. 5); v-skipinit (eq. 4) has alpha and beta")
        own = find_part("mixing", self.mixing)
        strange = [name for name in ("alpha", "beta", "gamma") if name not in own.gains and self.is_set(name)]
        if own.plugin and strange:
            raise ValueError(
                f"{own.title} has no {', '.join(strange)}; what it has is set with {{name: {own.name}, …}}"
            )
        if self.beta is None:
            raise ValueError("without beta no token sees another, so there is no attention; beta=0 can be trainable")

    def is_set(self, gain: str) -> bool:
        """Whether one of the mixing's gains is other than by default."""
        return getattr(self, gain) != TRAINED

    def _check_ties(self) -> None:
        for name in ("value", "first_value"):
            part = getattr(self, name)
            if part is not None and part.init in ("last-layer-tied", "all-tied"):
                raise ValueError(
                    f"{name}.init cannot be {part.init!r}: it is the projection that is tied to the value map"
                )
        if self.projection.init in ("last-layer-tied", "all-tied"):
            values = [self.value] + ([self.first_value] if self.first_value else [])
            if any(value.init != "orthogonal" or value.alpha is None for value in values):
                raise ValueError(
                    f"projection.init {self.projection.init!r} needs value.init 'orthogonal' and its alpha"
                )


def _presets() -> dict[str, BlockConfig]:
    pre_ln = BlockConfig()
    parallel = BlockConfig(layout="parallel", alpha_sa=None, alpha_ff=None, alpha_comb=FIXED)
    depth_gain = GainConfig(init="depth", trainable=True)
    orthogonal = MapConfig(init="orthogonal")
    v_skipinit = pre_ln.replace(
        mixing="v-skipinit",
        beta=GainConfig(init=0.0, trainable=True),
        per_head_gains=False,
        zero_query=True,
        value=orthogonal,
        projection=orthogonal,
        alpha_sa=None,
        beta_sa=TRAINED,
        beta_ff=depth_gain,
    )
    sas = pre_ln.replace(
        mixing="shaped",
        zero_query=True,
        value=IDENTITY,
        projection=IDENTITY,
        first_value=MapConfig(kind="reparam", init="identity", alpha=TRAINED, beta=TRAINED),
        alpha_sa=None,
        beta_sa=TRAINED,
        beta_ff=depth_gain,
    )
    sas_p = sas.replace(layout="parallel", alpha_ff=None)
    return {
        "pre-ln": pre_ln,
        "post-ln": pre_ln.replace(norm_position="post"),
        "parallel": parallel,
        "v-skipinit": v_skipinit,
        "sas": sas,
        "sas-p": sas_p,
        "sas-p-nonorm": sas_p.replace(norm="none"),
    }


BLOCKS: dict[str, BlockConfig] = _presets()
"""The paper's blocks by name, and those of plugins."""


def parse_block(spec: str, parts: dict[str, Any] | None = None) -> BlockConfig:
    """A preset by name, with changes: `sas`, `pre-ln:alpha_sa=0`, `sas:value={kind: dense; init: orthogonal}`.

    Changes are separated by commas, so inside braces, which are YAML, a semicolon stands for the comma. `parts` are
    changes that a recipe makes to every block; what the name itself changes comes after them.
    """
    name, _, changes = spec.partition(":")
    if name not in BLOCKS:
        from skipless.config.plugins import load_installed

        load_installed()
    if name not in BLOCKS:
        raise unknown("block", name, BLOCKS)
    try:
        items = [item.replace(";", ",") for item in changes.split(",")] if changes else []
        return BLOCKS[name].override({**(parts or {}), **parse_overrides(items)})
    except ValidationError as error:
        raise UserError(f"block {spec!r}: {explain(error)}") from None
