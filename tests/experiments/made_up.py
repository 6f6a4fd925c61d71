"""Metrics that nobody measured: for each experiment what the paper found, and worlds in which its claims are false."""

import math
from dataclasses import dataclass, field
from functools import cache

from skipless.config import RunConfig
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.papers.simplifying.bounds import SIX
from skipless.experiments.recipes import Scale
from skipless.finetune import summarise

LAPTOP = Scale("laptop")


@dataclass
class Made:
    """A run as it might have been."""

    loss: float = 3.0
    train: float | None = None
    seconds: float = 100.0
    ratios: dict[str, float] = field(default_factory=dict)
    """`value 1` → β/α at the end; the others have `ratio`."""
    ratio: float = 0.01
    gains: dict[str, float] = field(default_factory=dict)
    glue: dict | None = None
    scratch: dict | None = None


def history(cfg: RunConfig, made: Made) -> History:
    """A history whose losses fall on a line to the one that was asked for."""
    steps, seconds = cfg.train.steps or 1000, made.seconds
    train = made.train or made.loss
    per_step = cfg.train.batch_size * cfg.data.seq_len
    if cfg.train.minutes is not None:  # the faster one reads more
        seconds = 60 * cfg.train.minutes
        per_step *= seconds / made.seconds
    records = []
    for tenth in range(11):
        step, drop = steps * tenth // 10, (1 - tenth / 10) * 4
        where = {"step": step, "tokens": step * per_step, "seconds": seconds * tenth / 10}
        if tenth:
            records.append({**where, "loss": train + drop, "gains": gains(cfg, made)})
        loss = made.loss + drop
        bits = loss / math.log(2) / 3
        records.append({**where, "valid_loss": loss, "valid_perplexity": math.exp(loss), "valid_bits_per_byte": bits})
    return History(cfg, records, glue=made.glue, scratch=made.scratch)


def gains(cfg: RunConfig, made: Made) -> dict:
    found = {}
    for layer in range(cfg.model.n_layer):
        for part in ("value", "projection"):
            found[f"blocks.{layer}.attention.{part}.alpha"] = 1.0
            found[f"blocks.{layer}.attention.{part}.beta"] = made.ratios.get(f"{part} {layer + 1}", made.ratio)
        for name, start in (("alpha", 1.0), ("beta", 1.0), ("gamma", 1.0)):
            value = made.gains.get(name, start)
            found[f"blocks.{layer}.attention.mixing.{name}"] = [0.9 * value, 1.1 * value]
        found[f"blocks.{layer}.beta_ff"] = made.gains.get("beta_ff", 0.1)
    return found


@cache
def configs_of(id: str) -> dict[str, RunConfig]:
    return EXPERIMENTS[id].configs(LAPTOP)


def evidence(id: str, *worlds: dict[str, Made]) -> Evidence:
    """Seed number i lives in world number i."""
    configs = configs_of(id)
    return Evidence(
        {
            label: {seed: history(cfg, world.get(label, Made())) for seed, world in enumerate(worlds)}
            for label, cfg in configs.items()
        }
    )


def of(pairs: dict[str, float]) -> dict[str, Made]:
    return {label: Made(loss) for label, loss in pairs.items()}


def glue(*means: float, worst: float = 0.0) -> dict:
    """Results of a fine-tuning with a seed for each mean."""
    columns = {"sst2": 1.0, "stsb": -1.0 + worst}
    tasks = {
        column: {"seeds": {str(seed): {"m": (mean + more) / 100} for seed, mean in enumerate(means)}}
        for column, more in columns.items()
    }
    return summarise({"tasks": tasks, "failures": {}})


def encoders(loss: dict[str, float], score: dict[str, float], seconds: dict[str, float], worst: float = 0.0):
    return {
        block: Made(
            loss.get(block, 3.0),
            seconds=seconds.get(block, 100.0),
            glue=glue(score.get(block, 78.0), worst=worst if block.startswith("sas") else 0.0),
            scratch=glue(60.0),
        )
        for block in SIX
    }


def betas(**inits: tuple[float, float, float]) -> dict[str, Made]:
    """Losses at β of 0, 0.2 and 1."""
    rows = {init.replace("_", "-"): values for init, values in inits.items()}
    return {
        f"sas-{init}-{beta}": Made(loss)
        for init, values in rows.items()
        for beta, loss in zip(("0", "0.2", "1"), values, strict=True)
    }


def rates(init: str, values: tuple[float, float, float]) -> dict[str, Made]:
    return {f"{init}, V/P rate × {f}": Made(loss) for f, loss in zip(("0", "0.2", "1"), values, strict=True)}


FIG3 = betas(identity=(3.0, 3.02, 3.2), orthogonal=(3.15, 3.1, 3.4))
FIG3_AGAINST = {**betas(identity=(3.4, 3.2, 3.1), orthogonal=(3.0, 3.2, 3.0)), "pre-ln": Made(2.8)}
FOUR_TIMES_TWO = [f"{block}, {kind}" for block in ("pre-ln", "sas", "sas-p") for kind in ("shallow", "deep")]

PAPER: dict[str, dict[str, Made]] = {
    "fig2": {
        "pre-ln": Made(3.0, 2.97),
        "v-skipinit": Made(3.3, 3.27),
        "sas-dense-orthogonal": Made(3.25, 3.2),
    },
    "fig3": {**FIG3, "pre-ln": Made(3.0)},
    "fig4": {"sas-gains": Made(3.05, ratios={"value 1": 0.2, "projection 3": 0.02}), "sas-identity-0": Made(3.0)},
    "fig5": {
        **of({"pre-ln": 3.0, "parallel": 3.0, "v-skipinit": 3.3}),
        "sas": Made(2.98, seconds=90),
        "sas-p": Made(2.99, seconds=85),
        "sas-p-nonorm": Made(3.05, seconds=80),
    },
    "fig6": {
        **{label: Made(2.9 if label.endswith("deep") else 3.1) for label in FOUR_TIMES_TWO},
        **of({"v-skipinit, shallow": 3.3, "v-skipinit, deep": 3.5}),
    },
    "fig7": of({"pre-ln": 3.0, "sas": 3.0, "sas-p": 3.02, "v-skipinit": 3.4}),
    "tab1": encoders({}, {}, {"sas": 92, "sas-p": 86, "sas-p-nonorm": 83}),
    "tab2": encoders({}, {}, {}, worst=-1.0),
    "fig8": of({"pre-ln": 3.0, "sas": 2.95, "sas-p": 3.0}),
    "vp-lr": {
        **FIG3,
        **rates("identity", (3.0, 3.01, 3.2)),
        **rates("orthogonal", (3.15, 3.11, 3.4)),
    },
    "schedule": of(
        {f"{b}, {s}": 3.0 + 0.05 * (s == "cosine") for b in ("pre-ln", "sas", "sas-p") for s in ("linear", "cosine")}
    ),
    "matrix": of({"sas": 3.0, "sas-v-skipinit-matrix": 3.05, "sas-p": 3.0, "sas-p-v-skipinit-matrix": 3.05}),
    "mlp-gain": of({"sas-beta-ff-0.03": 3.02, "sas-beta-ff-0.1": 3.0, "sas-beta-ff-0.3": 3.01, "sas-beta-ff-1": 3.2}),
    "tied": betas(identity=(3.0, 3.0, 3.0), orthogonal=(3.2, 3.2, 3.2), ll_tied=(3.15,) * 3, all_tied=(3.1,) * 3),
    "gains": {"pre-ln-gains": Made(ratio=0.5)},
    "preln-identity": of(
        {
            "pre-ln": 3.0,
            "pre-ln-identity": 3.1,
            "pre-ln-identity-half": 3.08,
            "sas-identity-0": 3.0,
            "sas-dense-orthogonal": 3.2,
        }
    ),
    "first-value": of({"sas": 2.98, "sas-identity-0": 3.0, "sas-p": 2.99, "sas-p-identity-first": 3.0}),
    "mlp-skipless": of({"sas": 3.0, "sas-no-mlp-skip": 3.5, "sas-no-mlp-skip-0.2": 3.6, "sas-no-mlp-skip-0.8": 3.7}),
    "languini": of({"pre-ln": 3.1, "parallel": 3.1, "sas": 3.09, "sas-p": 3.1}),
}
"""What the paper found: every claim holds."""

AGAINST: dict[str, list[dict[str, Made]]] = {
    "fig2": [{"pre-ln": Made(3.0, 2.0), "v-skipinit": Made(3.0), "sas-dense-orthogonal": Made(2.9)}],
    "fig3": [FIG3_AGAINST],
    "fig4": [{"sas-gains": Made(2.9, ratio=0.3, ratios={"value 1": 0.1}), "sas-identity-0": Made(3.0)}],
    "fig5": [
        {
            **of({"pre-ln": 3.0, "parallel": 3.0, "v-skipinit": 3.0}),
            "sas": Made(3.4, seconds=120),
            "sas-p": Made(3.4, seconds=120),
            "sas-p-nonorm": Made(3.3, seconds=130),
        }
    ],
    "fig6": [
        {
            **{label: Made(3.3 if label.endswith("deep") else 3.1) for label in FOUR_TIMES_TWO},
            **of({"v-skipinit, shallow": 3.3, "v-skipinit, deep": 3.0}),
        }
    ],
    "fig7": [of({"pre-ln": 3.0, "sas": 3.4, "sas-p": 3.4, "v-skipinit": 3.0})],
    "tab1": [encoders({}, {"sas": 70, "sas-p": 71}, {"sas": 120, "sas-p": 120, "sas-p-nonorm": 120})],
    "tab2": [encoders({}, {}, {}, worst=-9.0), encoders({}, dict.fromkeys(SIX, 55.0), {})],
    "fig8": [of({"pre-ln": 3.0, "sas": 3.4, "sas-p": 3.4})],
    "vp-lr": [
        {
            **FIG3,
            **rates("identity", (3.0, 3.5, 3.2)),
            **rates("orthogonal", (3.15, 3.6, 3.4)),
        }
    ],
    "schedule": [
        of(
            {
                f"{b}, {s}": 3.0 + 0.05 * (s == "linear")
                for b in ("pre-ln", "sas", "sas-p")
                for s in ("linear", "cosine")
            }
        )
    ],
    "matrix": [of({"sas": 3.1, "sas-v-skipinit-matrix": 3.05, "sas-p": 3.1, "sas-p-v-skipinit-matrix": 3.05})],
    "mlp-gain": [of({"sas-beta-ff-0.03": 3.02, "sas-beta-ff-0.1": 3.4, "sas-beta-ff-0.3": 3.01, "sas-beta-ff-1": 3.0})],
    "tied": [betas(identity=(3.3, 3.3, 3.3), orthogonal=(3.0,) * 3, ll_tied=(3.1,) * 3, all_tied=(3.2,) * 3)],
    "gains": [
        {
            "sas-gains": Made(gains={"alpha": 0.01, "beta": 0.01, "gamma": 0.01, "beta_ff": 0.001}),
            "sas-p-gains": Made(ratio=0.4),
            "sas-gains-orthogonal": Made(ratio=0.4),
            "pre-ln-gains": Made(ratio=0.02),
        }
    ],
    "preln-identity": [
        of(
            {
                "pre-ln": 3.2,
                "pre-ln-identity": 3.1,
                "pre-ln-identity-half": 3.08,
                "sas-identity-0": 3.4,
                "sas-dense-orthogonal": 3.2,
            }
        )
    ],
    "first-value": [of({"sas": 3.2, "sas-identity-0": 3.0, "sas-p": 3.2, "sas-p-identity-first": 3.0})],
    "mlp-skipless": [of({"sas": 3.0, "sas-no-mlp-skip": 3.0, "sas-no-mlp-skip-0.2": 2.9, "sas-no-mlp-skip-0.8": 2.9})],
    "languini": [of({"pre-ln": 3.1, "parallel": 3.1, "sas": 3.6, "sas-p": 3.6})],
}
"""Worlds in which claims are false: each claim in at least one."""

ALWAYS = {"tab1": ["sas has at least 5% fewer parameters than pre-ln"]}
"""Claims that follow from the configurations and so cannot be made false by measurements."""
