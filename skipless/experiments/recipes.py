"""Recipes: functions that return a `RunConfig`, derived from one another; the appendix's blocks; the tuned rates.

A `Scale` makes the runs of an experiment: at `laptop` scale minutes each on two cores, at `paper` scale the paper's own
settings. What was tuned for a recipe and a block stands in `rates.json`, in the form that `skipless sweep` writes.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from skipless.config import (
    BLOCKS,
    FIXED,
    TRAINED,
    BlockConfig,
    DataConfig,
    GainConfig,
    MapConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    WInit,
    load_yaml,
    parse_block,
)
from skipless.errors import UserError, unknown

# ------------------------------------------------------------------ the appendix's blocks

BETAS = (0.0, 0.1, 0.2, 0.5, 1.0)
"""β_V = β_P of figure 3."""

MLP_GAINS = (0.03, 0.1, 0.3, 1.0)
"""Initial β_FF of `mlp-gain`."""


def _with_maps(base: str, value: MapConfig, projection: MapConfig | None = None) -> BlockConfig:
    return BLOCKS[base].replace(value=value, projection=projection or value, first_value=None)


def _reparam(init: WInit, beta: float) -> MapConfig:
    return MapConfig(kind="reparam", init=init, beta=GainConfig(init=beta))


def _reparameterised() -> dict[str, BlockConfig]:
    """Figure 3 and `tied`: `sas` with V and P of equation 6, α = 1 and β fixed. Identity and β = 0 is no V and P."""
    blocks = {"sas-identity-0": BLOCKS["sas"].replace(first_value=None)}
    for beta in BETAS:
        orthogonal = _reparam("orthogonal", beta)
        if beta:
            blocks[f"sas-identity-{beta:g}"] = _with_maps("sas", _reparam("identity", beta))
        blocks[f"sas-orthogonal-{beta:g}"] = _with_maps("sas", orthogonal)
        blocks[f"sas-ll-tied-{beta:g}"] = _with_maps("sas", orthogonal, _reparam("last-layer-tied", beta))
        blocks[f"sas-all-tied-{beta:g}"] = _with_maps("sas", orthogonal, _reparam("all-tied", beta))
    return blocks


def _trainable_gains(base: str, init: WInit) -> BlockConfig:
    """Figure 4 and `gains`: α_V = α_P from 1 and β_V = β_P from 0.2, all of them trained."""
    gains = {"alpha": GainConfig(init=1.0, trainable=True), "beta": GainConfig(init=0.2, trainable=True)}
    return _with_maps(base, MapConfig(kind="reparam", init=init, **gains))


def _variants() -> dict[str, BlockConfig]:
    sas, sas_p, pre_ln = BLOCKS["sas"], BLOCKS["sas-p"], BLOCKS["pre-ln"]
    v_skipinit = {"mixing": "v-skipinit", "beta": GainConfig(init=0.0, trainable=True)}
    identity = MapConfig(kind="identity")
    return {
        "sas-dense-orthogonal": _with_maps("sas", MapConfig(init="orthogonal")),
        "sas-dense-identity": _with_maps("sas", MapConfig(init="identity")),
        **_reparameterised(),
        "sas-gains": _trainable_gains("sas", "identity"),
        "sas-p-gains": _trainable_gains("sas-p", "identity"),
        "sas-gains-orthogonal": _trainable_gains("sas", "orthogonal"),
        "pre-ln-gains": _trainable_gains("pre-ln", "identity"),
        "sas-v-skipinit-matrix": sas.replace(**v_skipinit),
        "sas-p-v-skipinit-matrix": sas_p.replace(**v_skipinit),
        "sas-p-identity-first": sas_p.replace(first_value=None),
        "sas-shared-gains": sas.replace(per_head_gains=False),
        "sas-fixed-gains": sas.replace(beta_sa=FIXED, beta_ff=GainConfig(init="depth")),
        "pre-ln-identity": pre_ln.replace(value=identity, projection=identity),
        "pre-ln-identity-half": pre_ln.replace(value=identity, projection=identity, beta_sa=0.5),
        "sas-no-mlp-skip": sas.replace(alpha_ff=None),
        "sas-no-mlp-skip-0.2": sas.replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.2),
        "sas-no-mlp-skip-0.8": sas.replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.8),
        **{f"sas-beta-ff-{gain:g}": sas.replace(beta_ff=gain) for gain in MLP_GAINS},
    }


VARIANTS: dict[str, BlockConfig] = _variants()
"""The blocks of the experiments that are not presets, by name; each is a preset with other parts."""


def find_block(name: str) -> BlockConfig:
    """A variant of the experiments by its name, or else whatever `parse_block` knows."""
    return VARIANTS[name] if name in VARIANTS else parse_block(name)


def block_name(block: BlockConfig) -> str:
    """The name of a block that has one, else that of the preset it is nearest to: for the names of folders."""
    named = {**BLOCKS, **VARIANTS}
    exact = next((name for name, known in named.items() if known == block), None)
    if exact:
        return exact
    fields = BlockConfig.model_fields
    changed = {name: sum(getattr(known, f) != getattr(block, f) for f in fields) for name, known in BLOCKS.items()}
    return f"{min(changed, key=lambda name: changed[name])}-like"


# ------------------------------------------------------------------------------ laptop


def laptop(block: str = "sas-p") -> RunConfig:
    """Real Python code on two cores in minutes: 12 layers of width 128 on the standard library's source.

    The embedding is normalised before the first block, which makes Pre-LN as strong as it gets at this size (the
    experiment `baseline`). To a block without a skip it makes no difference: its own norm does the same.
    """
    return RunConfig(
        model=ModelConfig(
            block=find_block(block),
            n_layer=12,
            d_model=128,
            n_head=4,
            vocab_size=4096,
            max_seq_len=128,
            embedding_norm=True,
        ),
        data=DataConfig(source="python-stdlib", vocab_size=4096, seq_len=128),
        train=TrainConfig(steps=2000, batch_size=8, lr=2e-3),
    )


def demo(block: str = "sas-p") -> RunConfig:
    """A shorter and shallower `laptop`, for two runs within about five minutes."""
    changes = {"model.n_layer": 6, "train.steps": 1000, "train.sample_every": 500, "train.eval_every": 100}
    return laptop(block).override(changes)


def smoke(block: str = "sas-p") -> RunConfig:
    """Seconds: shows that everything runs, learns next to nothing."""
    changes = {"model.n_layer": 2, "model.d_model": 32, "train.steps": 20, "train.eval_every": 10, "train.eval_rows": 8}
    return laptop(block).override({**changes, "data.max_bytes": 2_000_000, "data.vocab_size": 512})


def study(block: str = "sas-p") -> RunConfig:
    """What the experiments train at laptop scale: narrow, for there are many. Their other recipes derive from it."""
    length, vocabulary = 64, 2048
    return laptop(block).override(
        {
            "data.source": "corpus:code",
            "model.n_layer": 12,
            "model.d_model": 64,
            "model.n_head": 4,
            "model.max_seq_len": length,
            "model.vocab_size": vocabulary,
            "data.seq_len": length,
            "data.vocab_size": vocabulary,
            "train.steps": 2000,
            "train.batch_size": 16,
            "train.eval_every": 200,
            "train.eval_rows": 256,
            "train.tuning_rows": 256,
            "train.sample_every": 0,
            "train.save_every": 500,
            "train.keep_last": 1,
            "train.log_every": 20,
            "train.gains_every": 100,
            "train.health_every": 500,
        }
    )


def study_long(block: str = "sas-p") -> RunConfig:
    """`study` on three times the tokens (figure 8)."""
    base = study(block)
    assert base.train.steps is not None
    return base.override({"train.steps": 3 * base.train.steps})


def study_shallow(block: str = "sas-p") -> RunConfig:
    """The shallower of the two depths of figure 6."""
    return _narrow(study(block))


def study_deep(block: str = "sas-p") -> RunConfig:
    """`study_shallow` with 48 layers."""
    return _narrow(study_shallow(block).override({"model.n_layer": 48}))


def _narrow(cfg: RunConfig) -> RunConfig:
    """Figure 6: an MLP of width 2d and, in skipless blocks, twice the β_FF: 0.2 at 18 layers, 0.1 at 72."""
    changes: dict[str, Any] = {"model.d_ff": 2 * cfg.model.d_model}
    if is_skipless(cfg.model.block):
        changes["model.block.beta_ff"] = round(0.2 * math.sqrt(18 / cfg.model.n_layer), 4)
    return cfg.override(changes)


def is_skipless(block: BlockConfig) -> bool:
    """Whether the attention has no skip around it, so that the MLP's branch is weighted down."""
    return block.alpha_sa is None and block.alpha_comb is None


def study_books(block: str = "sas-p") -> RunConfig:
    """`languini` at laptop scale."""
    length = 512
    return study(block).override(
        {
            **_LANGUINI_PARTS,
            "data.source": "corpus:books",
            "model.max_seq_len": length,
            "data.seq_len": length,
            "train.batch_size": 4,
            "train.eval_rows": 64,
            "train.tuning_rows": 64,
        }
    )


# ------------------------------------------------------------------------------- paper


def codeparrot(block: str = "sas-p") -> RunConfig:
    """The paper's decoder on CodeParrot: 18 layers of width 768, 43,000 steps of 128 sequences of 128 tokens."""
    return RunConfig(
        model=ModelConfig(
            block=find_block(block), n_layer=18, d_model=768, n_head=12, d_ff=3072, vocab_size=50_000, max_seq_len=128
        ),
        data=DataConfig(
            source="corpus:codeparrot",
            valid_source="corpus:codeparrot-valid",
            tokenizer="huggingface-course/code-search-net-tokenizer",
            vocab_size=50_000,
            packing="chunks",
            seq_len=128,
        ),
        train=TrainConfig(
            steps=43_000,
            batch_size=128,
            micro_batch=32,
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            clip=1.0,
            schedule="linear",
            warmup=0.05,
            eval_every=1000,
            eval_rows=4096,
            sample_every=5000,
            save_every=1000,
            log_every=50,
        ),
    )


def codeparrot_long(block: str = "sas-p") -> RunConfig:
    """`codeparrot` for 120,000 steps, 2B tokens (figure 8)."""
    return codeparrot(block).override({"train.steps": 120_000})


def codeparrot_shallow(block: str = "sas-p") -> RunConfig:
    """`codeparrot` with an MLP of width 2d (figure 6)."""
    return _narrow(codeparrot(block))


def codeparrot_deep(block: str = "sas-p") -> RunConfig:
    """`codeparrot_shallow` with 72 layers (figure 6)."""
    return _narrow(codeparrot(block).override({"model.n_layer": 72}))


def codeparrot_authors(block: str = "sas-p") -> RunConfig:
    """`codeparrot` as the authors' released code has it, where that differs from the paper's text.

    Learned positions for 1,024 tokens, biases of queries and keys, RMSNorm as x / (rms + 1e-5), a LayerNorm with a
    bias at the end, a trainable α_FF in SAS. What their script calls Value-SkipInit is shaped attention with dense
    orthogonal V and P. Without norms, their first block keeps a LayerNorm on its input: the normalised embedding here.
    """
    name = "sas-dense-orthogonal" if block == "v-skipinit" else block
    own = find_block(name)
    parts: dict[str, Any] = {"qk_bias": True, "norm_eps": 1e-5, "norm_bias": True}
    if own.norm != "none":
        parts["norm"] = "rms-plus-eps"
    if own.layout == "sequential" and is_skipless(own) and own.alpha_ff is not None:
        parts["alpha_ff"] = TRAINED
    return codeparrot(name).override(
        {
            "model.block": own.replace(**parts).model_dump(),
            "model.positions": "learned",
            "model.max_seq_len": 1024,
            "model.outer_norm": "layernorm",
        }
    )


BERT_PEAK_LR = {"sas": 3e-3, "sas-p": 3e-3, "sas-p-nonorm": 2e-3}
"""The paper's peak learning rates where it tuned them; crammed BERT's own 1e-3 for the blocks with all their parts."""


LAPTOP_BERT_PEAK_LR = {"sas": 6e-3, "sas-p": 6e-3, "sas-p-nonorm": 4e-3}
"""Those of the laptop size: half of the simplified blocks' for the others."""


def bert_block(spec: str, n_layer: int) -> BlockConfig:
    """A block with crammed BERT's parts: GLU with GELU, LayerNorm with a bias, eps 1e-12; β_FF 0.05 in simplified ones.

    0.05 is the paper's value at 16 layers; at other depths it goes with 1/√L, as the paper's O(1/√L) has it.
    """
    name = spec.partition(":")[0]
    parts: dict[str, Any] = {"mlp": "glu", "activation": "gelu", "norm_eps": 1e-12, "norm_bias": True}
    if not name.endswith("nonorm"):
        parts["norm"] = "layernorm"
    if name.startswith("sas"):
        parts["beta_ff"] = 0.05 * math.sqrt(16 / n_layer)
    return parse_block(spec, parts) if spec not in VARIANTS else VARIANTS[spec].replace(**parts)


def crammed_bert(block: str = "sas-p") -> RunConfig:
    """The paper's encoder: 16 layers of width 768, masked language modelling on the Pile for 24 hours of one GPU."""
    return RunConfig(
        task="masked",
        model=ModelConfig(
            block=bert_block(block, 16),
            n_layer=16,
            d_model=768,
            n_head=12,
            d_ff=3072,
            vocab_size=32_768,
            max_seq_len=128,
            positions="scaled-sinusoidal",
            embedding_norm=True,
            outer_norm="layernorm",
        ),
        data=DataConfig(
            source="corpus:pile",
            max_bytes=24_000_000_000,  # 5B tokens, more than 24 hours of the paper's GPU could read
            valid_fraction=0.001,
            tokenizer="wordpiece",
            lowercase=True,
            vocab_size=32_768,
            seq_len=128,
        ),
        train=TrainConfig(
            steps=None,
            minutes=24 * 60,
            batch_size=8192,
            micro_batch=64,
            batch_ramp=0.6,
            lr=BERT_PEAK_LR.get(block.partition(":")[0], 1e-3),
            betas=(0.9, 0.98),
            eps=1e-12,
            weight_decay=0.1,
            clip=0.5,
            schedule="triangle",
            warmup_from=0.25,
            mask_share=0.25,
            eval_every=200,
            eval_rows=4096,
            sample_every=0,
            save_every=200,
        ),
    )


_LANGUINI_PARTS = {"model.positions": "alibi", "model.block.activation": "gelu", "train.sample_prompt": "The "}


def languini(block: str = "sas-p") -> RunConfig:
    """The paper's decoder on books: 12 layers of width 768, ALiBi, GELU, 19,000 steps of 128 sequences of 512 tokens.

    Languini's own books can no longer be had: say where others are with `--corpus books=…`.
    """
    return codeparrot(block).override(
        {
            **_LANGUINI_PARTS,
            "model.n_layer": 12,
            "model.max_seq_len": 512,
            "model.vocab_size": 16_384,
            "data": DataConfig(source="corpus:books", vocab_size=16_384, seq_len=512).model_dump(),
            "train.steps": 19_000,
            "train.warmup": 500,
            "train.micro_batch": 16,
            "train.lr": 3e-3 if block.startswith("sas") else 1e-3,
        }
    )


def crammed_bert_laptop(block: str = "sas-p") -> RunConfig:
    """`crammed-bert` for a quarter of an hour of one core: 4 layers of width 128, 8,192 words, 8 million tokens.

    The budget is in tokens, the same for every block: minutes on a machine that does other things measure nothing.

    Weights are 0.02·√(768/128) at first, so that a block of this width does to its input what the paper's does. With
    rotary positions: of sinusoids, with or without a scale, so short a training learns little (docs/bert.md).
    """
    changes = {
        "model.block": bert_block(block, 4).model_dump(),
        "model.n_layer": 4,
        "model.d_model": 128,
        "model.n_head": 4,
        "model.d_ff": 512,
        "model.vocab_size": 8192,
        "model.positions": "rotary",
        "model.init_std": 0.05,
        "data.source": "corpus:wiki",
        "data.max_bytes": 80_000_000,
        "data.valid_fraction": 0.02,
        "data.vocab_size": 8192,
        "train.minutes": None,
        "train.tokens": 8_000_000,
        "train.lr": LAPTOP_BERT_PEAK_LR.get(block.partition(":")[0], 3e-3),
        "train.batch_size": 16,
        "train.micro_batch": 8,
        "train.eval_rows": 256,
        "train.tuning_rows": 256,
        "train.health_every": 500,
        "train.gains_every": 200,
        "train.log_every": 20,
    }
    return crammed_bert(block).override(changes)


RECIPES: dict[str, Callable[[str], RunConfig]] = {
    "laptop": laptop,
    "demo": demo,
    "smoke": smoke,
    "study": study,
    "study-long": study_long,
    "study-shallow": study_shallow,
    "study-deep": study_deep,
    "crammed-bert-laptop": crammed_bert_laptop,
    "study-books": study_books,
    "codeparrot": codeparrot,
    "codeparrot-long": codeparrot_long,
    "codeparrot-shallow": codeparrot_shallow,
    "codeparrot-deep": codeparrot_deep,
    "codeparrot-authors": codeparrot_authors,
    "crammed-bert": crammed_bert,
    "languini": languini,
}


# ------------------------------------------------------------------------------- rates

Rates = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Recipe → block → dotted key → value."""


@cache
def packaged_rates() -> Rates:
    """What was tuned here, and what the paper says it tuned."""
    return json.loads(files("skipless.experiments").joinpath("rates.json").read_text(encoding="utf-8"))


def load_rates(path: Path) -> Rates:
    """A file that `skipless sweep` wrote."""
    table = load_yaml(path)
    for name, blocks in table.items():
        if name not in RECIPES:
            raise unknown(f"recipe in {str(path)!r}", name, RECIPES)
        if not isinstance(blocks, dict) or not all(isinstance(values, dict) for values in blocks.values()):
            raise UserError(f"{str(path)!r} must hold recipe → block → key → value, as `skipless sweep` writes it")
    return table


def tuned(name: str, block: str, rates: Rates | None = None) -> dict[str, Any]:
    """The tuned keys of a recipe and a block.

    What is not listed has the values of what its name begins with: `sas:beta_ff=0.2` and `sas-gains` those of `sas`,
    `study-long` those of `study`.
    """
    table = {recipe: dict(blocks) for recipe, blocks in packaged_rates().items()}
    for recipe, blocks in (rates or {}).items():
        table[recipe] = {**table.get(recipe, {}), **blocks}
    found: dict[str, Any] = {}
    for blocks in _from_general_to_own(table, name):
        found |= next(reversed(_from_general_to_own(blocks, block)), {})
    return found


Value = TypeVar("Value")


def _from_general_to_own(table: Mapping[str, Value], name: str) -> list[Value]:
    """The entries of a name and of all that it begins with up to a hyphen or a colon, its own last."""
    matching = [key for key in table if name == key or (name.startswith(key) and name[len(key)] in "-:")]
    return [table[key] for key in sorted(matching, key=len)]


def recipe(name: str, block: str, rates: Rates | None = None) -> RunConfig:
    """The recipe of a name, for a block, with what was tuned for the two."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](block).override(tuned(name, block, rates))


# ------------------------------------------------------------------------------ scales

SCALES: dict[str, dict[str, str]] = {
    "laptop": {
        "decoder": "study",
        "long": "study-long",
        "shallow": "study-shallow",
        "deep": "study-deep",
        "encoder": "crammed-bert-laptop",
        "books": "study-books",
    },
    "paper": {
        "decoder": "codeparrot",
        "long": "codeparrot-long",
        "shallow": "codeparrot-shallow",
        "deep": "codeparrot-deep",
        "encoder": "crammed-bert",
        "books": "languini",
    },
}
"""The recipe of each kind of run that the experiments need."""


@dataclass(frozen=True)
class Protocol:
    """How encoders are fine-tuned on GLUE, in the options of `skipless finetune`."""

    tasks: str = "all"
    options: tuple[str, ...] = ()
    seeds: int = 3
    baselines: tuple[str, ...] = ()
    """Blocks of which a random encoder is fine-tuned as well, with one seed."""
    once: tuple[str, ...] = ()
    """Blocks that are fine-tuned with one seed, as no claim is about their scores."""
    more: tuple[tuple[str, int], ...] = ()
    """Tasks in which the baselines and what they are for have more seeds: those that claims are about."""


PROTOCOLS = {
    "laptop": Protocol(
        tasks="cola,sst2,mrpc,stsb,rte",
        options=("--rows", "sst2=1000", "--set", "lr=1e-3"),
        baselines=("pre-ln", "sas", "sas-p"),
        once=("parallel", "v-skipinit", "sas-p-nonorm"),
        more=(("stsb", 3), ("sst2", 16)),
    ),
    "paper": Protocol(),
}
"""Of each scale."""


@dataclass(frozen=True)
class Scale:
    """Makes the runs of an experiment."""

    name: str
    rates: Rates | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that are set in every run, whatever the recipe says."""

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise unknown("scale", self.name, SCALES)

    @property
    def is_paper(self) -> bool:
        """Whether this is the paper's own scale."""
        return self.name == "paper"

    def run(self, kind: str, block: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """A run of a kind with a block, and with keys changed by their dotted names."""
        cfg = recipe(SCALES[self.name][kind], block, self.rates)
        changed = {**(changes or {}), **self.changes}
        budgets = ("train.steps", "train.tokens", "train.minutes")
        if any(budget in changed for budget in budgets):  # it takes the place of the recipe's, whichever that is
            changed = {**dict.fromkeys(budgets), **changed}
        return cfg.override(changed)

    def decoder(self, block: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """The decoder that most experiments train."""
        return self.run("decoder", block, changes)
