"""Configurations: frozen, checked when made, unknown keys refused, JSON in and out.

Nothing here imports torch, so that the command line can check its input before it loads anything heavy.

A block of the paper is a `BlockConfig`: one of two layouts with parts plugged in. `BLOCKS` holds the paper's seven by
name; every ablation of the appendix is `BLOCKS[name].replace(...)`, or on the command line `name:key=value,...`.
"""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from skipless.errors import UserError, did_you_mean, unknown


class Config(BaseModel):
    """A frozen pydantic model that refuses unknown keys and not-a-numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one; numbers for gains as in `override`."""
        return self.override(changes)

    def override(self, changes: dict[str, Any]) -> Self:
        """A copy with fields changed by dotted name: `{"block.beta_ff.init": 0.2, "n_layer": 12}`.

        A bare number given to a gain that is there changes its value and leaves it trainable or fixed as it was.
        """
        tree = self.model_dump()
        for path, value in changes.items():
            _set(tree, path, value)
        return type(self).model_validate(tree)

    def merge(self, changes: dict[str, Any]) -> Self:
        """A copy with the values of a nested mapping, such as a file, laid over it."""
        return type(self).model_validate(_merged(self.model_dump(), changes))


def _merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {**tree, **{key: _laid_over(tree.get(key), value) for key, value in changes.items()}}


def _laid_over(old: Any, new: Any) -> Any:
    """A new value for an old one: mappings are merged, and a bare number for a gain that is there changes its value."""
    if isinstance(old, dict) and isinstance(new, dict):
        return _merged(old, new)
    if isinstance(old, dict) and "trainable" in old and _is_gain_value(new):
        return {**old, "init": new}
    return new


def _is_gain_value(value: Any) -> bool:
    """Whether something can be the `init` of a gain: a number, also written as text, or `depth`."""
    if isinstance(value, bool):
        return False
    try:
        return value == "depth" or math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for depth, name in enumerate(parents):
        if name not in tree:
            raise unknown("key", ".".join(parents[: depth + 1]), tree)
        if not isinstance(tree[name], dict):
            raise UserError(
                f"key {path!r}: {'.'.join(parents[: depth + 1])!r} holds {tree[name]!r}, which has no parts"
            )
        tree = tree[name]
    if last not in tree and tree:
        raise unknown("key", path, [".".join([*parents, known]) for known in tree])
    tree[last] = _laid_over(tree.get(last), value) if not isinstance(value, dict) else value


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be Unicode, and this holds half a character") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]


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
    return {"init": value} if _is_gain_value(value) else value


def _no_zero(gain: GainConfig | None) -> GainConfig | None:
    """A gain fixed at zero is None: the branch is not there."""
    return None if gain is not None and gain.init == 0 and not gain.trainable else gain


Gain = Annotated[GainConfig | None, BeforeValidator(_gain), AfterValidator(_no_zero)]

FIXED = GainConfig(init=1.0)
TRAINED = GainConfig(init=1.0, trainable=True)

WInit = Literal["normal", "identity", "orthogonal", "last-layer-tied", "all-tied"]


class MapConfig(Config):
    """The value or the projection map of an attention sub-block: W^V or W^P."""

    kind: Literal["dense", "reparam", "identity"] = Field(
        "dense", description="A free matrix; α·W_init + β·ΔW (eq. 6); or nothing at all."
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
        if self.kind == "reparam" and self.alpha is None and self.beta is None:
            raise ValueError("a reparameterised map with alpha = beta = 0 passes no signal")
        return self


DENSE = MapConfig()
IDENTITY = MapConfig(kind="identity")


class BlockConfig(Config):
    """One transformer block: equation 1 (`sequential`) or equation 7 (`parallel`), with its parts."""

    layout: Literal["sequential", "parallel"] = Field("sequential", description="Equation 1 or equation 7.")
    norm: Literal["rmsnorm", "rms-plus-eps", "layernorm", "none"] = Field(
        "rmsnorm", description="Norm inside the block; rms-plus-eps divides by rms + eps, as the authors' code does."
    )
    norm_position: Literal["pre", "post"] = Field("pre", description="Norm on the branch, or after the sum.")
    norm_eps: float = Field(1e-8, gt=0, description="Epsilon of every norm.")

    mixing: Literal["softmax", "v-skipinit", "shaped"] = Field(
        "softmax", description="The attention matrix: A; αI + βA (eq. 4); αI + βA − γC (eq. 5)."
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

    mlp: Literal["plain", "glu"] = Field("plain", description="MLP, or gated linear unit (half the hidden width).")
    activation: Literal["relu", "leaky-relu", "gelu", "gelu-tanh", "silu"] = Field("relu", description="Non-linearity.")
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
        if self.beta is None:
            raise ValueError("without beta no token sees another, so there is no attention; beta=0 can be trainable")

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
"""The paper's blocks by name."""


def parse_block(spec: str, parts: dict[str, Any] | None = None) -> BlockConfig:
    """A preset by name, with changes: `sas`, `pre-ln:alpha_sa=0`, `sas:value={kind: dense; init: orthogonal}`.

    Changes are separated by commas, so inside braces, which are YAML, a semicolon stands for the comma. `parts` are
    changes that a recipe makes to every block; what the name itself changes comes after them.
    """
    name, _, changes = spec.partition(":")
    if name not in BLOCKS:
        raise unknown("block", name, BLOCKS)
    try:
        items = [item.replace(";", ",") for item in changes.split(",")] if changes else []
        return BLOCKS[name].override({**(parts or {}), **parse_overrides(items)})
    except ValidationError as error:
        raise UserError(f"block {spec!r}: {explain(error)}") from None


YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What PyYAML raises: for a date that does not exist, say, not an error of its own."""


def parse_overrides(items: list[str]) -> dict[str, Any]:
    """`["n_layer=12", "block.beta_ff.init=0.2"]` → `{"n_layer": 12, ...}`, with values read as YAML."""
    changes: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"expected key=value, got {item!r}")
        try:
            changes[key.strip()] = yaml.safe_load(text)
        except YAML_ERRORS:
            raise UserError(f"{item!r}: the value is not valid YAML") from None
    return changes


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except YAML_ERRORS:
        raise UserError(f"{str(path)!r} is neither YAML nor JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} must hold keys and values, not {type(content).__name__}")
    return content


def explain(error: ValidationError) -> str:
    """One line for a validation error: each key, what was wrong with it, what is allowed, what is near."""
    return "; ".join(_explain_one(detail, error.title) for detail in error.errors())


def _explain_one(detail: Any, title: str) -> str:
    # pydantic puts the tags of unions into the path; only keys and indices help a reader
    key = ".".join(str(part) for part in detail["loc"] if not str(part).endswith("Config") and str(part) not in _TAGS)
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message else message
    if detail["type"] == "extra_forbidden":
        known = _fields(title, detail["loc"][:-1])
        message = f"unknown key{did_you_mean(str(detail['loc'][-1]), known)}"
    elif detail["type"] == "literal_error":
        choices = [choice.strip("' ") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        message = f"{detail['input']!r} is not one of {', '.join(choices)}{did_you_mean(str(detail['input']), choices)}"
    elif detail["type"] != "value_error" and not isinstance(detail["input"], dict):
        message = f"{message}, got {detail['input']!r}"
    return f"{key}: {message}" if key else message


_TAGS = {"float", "int", "str", "literal['depth']", "function-before[_gain(), nullable[GainConfig]]"}


def _fields(title: str, path: tuple[Any, ...]) -> list[str]:
    """The names a configuration knows at a path, for the nearest-name hint."""
    model: Any = next((kind for kind in _all_configs(Config) if kind.__name__ == title), None)
    for part in path:
        if model is not None and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next((kind for kind in kinds if issubclass(kind, Config)), None)
    return list(model.model_fields) if model is not None else []


def _all_configs(base: type[Config]) -> list[type[Config]]:
    return [base, *(kind for sub in base.__subclasses__() for kind in _all_configs(sub))]


class ModelConfig(Config):
    """A stack of blocks between an embedding and a head."""

    block: BlockConfig = Field(BLOCKS["pre-ln"], description="A preset's name, a variant of one, or a BlockConfig.")
    n_layer: int = Field(12, ge=1, le=10_000, description="L: number of blocks.")
    d_model: int = Field(128, ge=1, le=1_000_000, description="d: width.")
    n_head: int = Field(4, ge=1, description="H: attention heads; divides the width.")
    d_ff: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Width of the MLP; 4·d_model if not given. A GLU halves it after the gate.",
    )
    vocab_size: int = Field(4096, ge=1, le=10_000_000, description="Words of the vocabulary.")
    max_seq_len: int = Field(128, ge=1, le=10_000_000, description="T: the longest sequence the model takes.")
    positions: Literal["sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary"] = Field(
        "sinusoidal",
        description="Added sinusoids of the embedding's size; the same with a trainable scale from 1/√d; added "
        "trainable vectors; a bias on the scores that grows with distance; rotation of queries and keys.",
    )
    embedding_norm: bool | None = Field(
        None, description="Norm after the embedding; by default only where the blocks have none."
    )
    outer_norm: Literal["rmsnorm", "layernorm"] | None = Field(
        None, description="Norm after the embedding and after the last block; by default the blocks', or rmsnorm."
    )
    tie_embeddings: bool = Field(True, description="The head's matrix is the embedding's.")
    dropout: float = Field(0.0, ge=0, lt=1, description="After the embedding, the attention and the MLP.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of every Gaussian weight.")

    @field_validator("block", mode="before")
    @classmethod
    def _named_block(cls, block: Any) -> Any:
        return parse_block(block) if isinstance(block, str) else block

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.d_model % self.n_head:
            divisors = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            near = ", ".join(map(str, sorted(sorted(divisors, key=lambda h: abs(h - self.n_head))[:3])))
            raise ValueError(f"n_head {self.n_head} does not divide d_model {self.d_model}; near: {near}")
        if self.positions == "rotary" and self.d_head % 2:
            raise ValueError(f"rotary positions need an even width per head; d_model / n_head is {self.d_head}")
        if self.positions in ("sinusoidal", "scaled-sinusoidal") and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, got {self.d_model}")
        if self.block.mlp == "glu" and self.ff_width % 2:
            raise ValueError(f"a GLU halves d_ff after the gate, so d_ff must be even, got {self.ff_width}")
        return self

    @property
    def d_head(self) -> int:
        """d_k = d / H."""
        return self.d_model // self.n_head

    @property
    def ff_width(self) -> int:
        """Width of the MLP's first product."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def normalises_embedding(self) -> bool:
        """Whether the signal is brought to size 1 before the first block."""
        return self.block.norm == "none" if self.embedding_norm is None else self.embedding_norm


class DataConfig(Config):
    """A corpus: where its text comes from, how it is tokenised, and how the tokens are cut into rows."""

    source: Text = Field(
        "python-stdlib",
        description="`python-stdlib`, `files:GLOB`, `jsonl:PATH#field` (also .gz, .zst), or "
        "`hf:DATASET[:config][@split]#field`.",
    )
    valid_source: Text | None = Field(
        None, description="A source of held-out text; if not given, a part of the source's documents is held out."
    )
    valid_fraction: float = Field(
        0.02, ge=0, lt=1, description="Share of the documents that is held out, chosen by their content."
    )
    tokenizer: Text = Field(
        "bpe",
        min_length=1,
        description="`bpe` (byte-level) or `wordpiece`, trained on the corpus; the path of a tokenizer.json or of "
        "BERT's vocab.txt; or a name on the Hugging Face hub.",
    )
    vocab_size: int = Field(
        4096, ge=1, le=10_000_000, description="Size of a trained vocabulary; a small corpus may give fewer."
    )
    lowercase: bool = Field(False, description="Whether a trained tokeniser lowers the case of the text.")
    tokenizer_bytes: int = Field(
        64 * 2**20, ge=1, description="How many bytes of the training text the tokeniser is trained on."
    )
    packing: Literal["stream", "chunks"] = Field(
        "stream",
        description="`stream`: documents one after another with an end-of-text token between them; `chunks`: windows "
        "of exactly seq_len tokens of one document, the rest dropped, as CodeParrot was prepared.",
    )
    seq_len: int = Field(128, ge=1, le=10_000_000, description="T: tokens in a sequence.")
    max_documents: int | None = Field(None, ge=1, description="Read at most this many distinct documents of a source.")
    max_bytes: int | None = Field(
        None, ge=1, description="Read no further in a source once its distinct documents have this many bytes."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        smallest = {"bpe": 257, "wordpiece": 64}.get(self.tokenizer, 1)
        if self.vocab_size < smallest:
            reason = "256 bytes and an end-of-text token" if self.tokenizer == "bpe" else "special tokens and letters"
            raise ValueError(f"vocab_size {self.vocab_size} is too small for {reason}: at least {smallest}")
        if self.packing == "chunks" and self.seq_len < 2:
            raise ValueError("packing 'chunks' has inputs and targets inside a row, so seq_len must be at least 2")
        return self


class TrainConfig(Config):
    """How a model is trained. Exactly one of `steps`, `tokens` and `minutes` is the budget."""

    steps: int | None = Field(2000, ge=1, description="Budget in optimiser steps.")
    tokens: int | None = Field(None, ge=1, description="Budget in training tokens.")
    minutes: float | None = Field(None, gt=0, description="Budget in minutes of training, evaluation not counted.")

    batch_size: int = Field(8, ge=1, le=10_000_000, description="Sequences in a step.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences in memory at a time; gradients are accumulated.")
    batch_ramp: float = Field(
        0.0, ge=0, le=1, description="Share of the budget over which the batch grows from a micro-batch to batch_size."
    )

    optimizer: Literal["adamw", "muon", "sgd"] = Field(
        "adamw", description="AdamW; Muon for the matrices inside the blocks with AdamW for the rest; or plain SGD."
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    vp_lr_factor: float = Field(1.0, ge=0, description="Factor on the learning rate of W^V and W^P.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's averaging factors.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.1, ge=0, description="On matrices and embeddings; never on gains, norms, biases.")
    clip: float | None = Field(1.0, gt=0, description="Largest norm of the gradient.")

    schedule: Literal["linear", "cosine", "triangle", "constant"] = Field(
        "linear", description="Learning rate after the warm-up: a line or half a cosine to zero, or constant."
    )
    warmup: float | None = Field(
        None, ge=0, description="Share of the budget below 1, else steps; by default 0.05, and 0.75 for `triangle`."
    )
    warmup_from: float = Field(0.0, ge=0, le=1, description="Where the warm-up begins, as a share of the peak.")

    mask_share: float = Field(0.25, gt=0, lt=1, description="Masked language models: share of the tokens masked.")

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 on a CPU."
    )
    device: Text = Field("auto", description="auto: an accelerator if there is one.")
    compile: Literal["off", "block", "model"] = Field("off", description="What torch.compile is given.")

    eval_every: int = Field(200, ge=0, description="Steps between evaluations; 0: only at the end.")
    eval_rows: int = Field(256, ge=1, description="Held-out sequences in an evaluation during training.")
    tuning_rows: int = Field(
        0, ge=0, description="Other held-out sequences, whose loss (`tuning_loss`) hyper-parameters are chosen by."
    )
    sample_every: int = Field(500, ge=0, description="Steps between text samples; 0: none.")
    sample_prompt: Text = Field("def ", description="What the samples begin with.")
    save_every: int = Field(500, ge=1, description="Steps between checkpoints.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept, besides the best.")
    log_every: int = Field(10, ge=1, description="Steps between lines of metrics.")
    gains_every: int = Field(50, ge=0, description="Steps between records of all gains; 0: none.")
    health_every: int = Field(
        0, ge=0, description="Steps between records of kurtosis, attention entropy and token similarity; 0: none."
    )
    seed: int = Field(
        0, ge=0, le=2**62, description="Of the weights, the order of the data, masks, dropout and samples."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(budget is not None for budget in (self.steps, self.tokens, self.minutes)) != 1:
            raise ValueError("give exactly one budget: steps, tokens or minutes (set the others to null)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}")
        if self.warmup is not None and self.warmup >= 1 and self.steps is None:
            raise ValueError("a warm-up in steps needs a budget in steps; give a share below 1")
        if self.warmup is not None and self.steps is not None and self.warmup >= 1 and self.warmup > self.steps:
            raise ValueError(f"a warm-up of {self.warmup:g} steps is longer than the training of {self.steps}")
        return self

    @property
    def micro_rows(self) -> int:
        """Sequences in memory at a time."""
        return self.micro_batch or self.batch_size

    @property
    def warmup_share(self) -> float:
        """The warm-up as a share of the budget."""
        if self.warmup is None:
            return 0.75 if self.schedule == "triangle" else 0.05
        return self.warmup / self.steps if self.warmup >= 1 and self.steps else self.warmup


class ParallelConfig(Config):
    """How several processes share a training, as torchrun starts them. One process alone needs none of it.

    It changes speed and memory, not the training, so it is no part of what makes two runs the same.
    """

    kind: Literal["ddp", "fsdp"] = Field(
        "ddp", description="Each process has the whole model (DDP), or a share of every tensor (FSDP2)."
    )
    replicas: int = Field(
        1, ge=1, description="fsdp: copies of the sharded model; processes / replicas of them share one (hybrid)."
    )
    reshard: bool = Field(
        True, description="fsdp: let a gathered block go after its forward pass and gather it again for the backward."
    )
    reduce: Literal["fp32", "bf16"] = Field("fp32", description="Type in which gradients are added up.")
    shard_accumulated: bool = Field(
        False,
        description="fsdp: add up each micro-batch's gradients across processes, so that none holds them whole; "
        "by default that is done once a step.",
    )
    checkpoint: Literal["whole", "sharded"] = Field(
        "whole", description="Tensors gathered into one file, or for fsdp each process's shares in a file of its own."
    )
    timeout: float = Field(600.0, gt=0, description="Seconds after which a process that does not answer ends the run.")

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "ddp" and (self.replicas > 1 or self.checkpoint == "sharded" or self.shard_accumulated):
            raise ValueError("replicas, shard_accumulated and checkpoint 'sharded' belong to kind 'fsdp'")
        return self


class RunConfig(Config):
    """Everything that makes a run what it is, and how it is spread over processes."""

    task: Literal["causal", "masked"] = Field("causal", description="Next-token or masked-token prediction.")
    model: ModelConfig = Field(ModelConfig(), description="The model; its vocabulary is the tokeniser's.")
    data: DataConfig = Field(DataConfig(), description="The corpus.")
    train: TrainConfig = Field(TrainConfig(), description="The training.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="How processes share it; `ddp` or `fsdp` will do.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} is longer than model.max_seq_len {self.model.max_seq_len}"
            )
        if self.task == "masked" and self.data.packing == "chunks":
            raise ValueError("packing 'chunks' is for causal models; a masked one needs packing 'stream'")
        if self.parallel.kind == "fsdp" and self.train.compile == "model":
            raise ValueError(
                "train.compile 'model' cannot go with parallel 'fsdp', which gathers block by block: 'block'"
            )
        return self

    @property
    def predicted_share(self) -> float:
        """Share of the tokens at which the model has something to predict, and so computes its head."""
        return self.train.mask_share if self.task == "masked" else 1.0

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of the configuration: equal ones are the same run."""
        return hashlib.sha256(self.model_dump_json(exclude={"parallel"}).encode()).hexdigest()[:8]


class FinetuneConfig(Config):
    """How a pre-trained encoder is fine-tuned on a task: the paper's protocol, the same for every task."""

    epochs: int = Field(5, ge=1, description="Passes over the training rows.")
    batch_size: int = Field(32, ge=1, description="Sequences in a step.")
    lr: float = Field(1.5e-4, gt=0, description="Peak learning rate.")
    warmup: float = Field(0.1, ge=0, lt=1, description="Share of the steps; after it, half a cosine to zero.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's averaging factors.")
    eps: float = Field(1e-6, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="On matrices and embeddings.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    dropout: float = Field(0.1, ge=0, lt=1, description="After the embedding, the attention, the MLP and the pooler.")
    seq_len: int = Field(128, ge=4, description="Longest input; both sentences are cut to fit.")
    rows: PositiveInt | dict[str, PositiveInt] | None = Field(
        None,
        description="Train on this many rows, drawn by each seed, of every task or of those named; all if not given.",
    )
    head_only: bool = Field(False, description="Train pooler and classifier on an encoder that stays as it is.")
    from_scratch: bool = Field(False, description="Begin with a random encoder instead of the pre-trained one.")

    def rows_of(self, task: str) -> int | None:
        """How many rows of a task are trained on at most."""
        return self.rows.get(task) if isinstance(self.rows, dict) else self.rows

    def training(self, steps: int, seed: int) -> TrainConfig:
        """The same as the configuration of a training of `steps` steps."""
        return TrainConfig(
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            clip=self.clip,
            schedule="cosine",
            warmup=self.warmup,
            seed=seed,
        )


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted names of what differs between two configurations of a kind, with both values."""

    def flatten(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path: tree}
        parts = (flatten(value, f"{path}.{key}" if path else key) for key, value in tree.items())
        return {key: value for part in parts for key, value in part.items()}

    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key), after.get(key)) for key in keys}
