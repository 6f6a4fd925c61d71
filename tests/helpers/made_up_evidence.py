"""Metrics that nobody measured: for each experiment what the paper found, and worlds in which its claims are false."""

import math
from dataclasses import dataclass, field, fields
from functools import cache

from skipless.config.run import RunConfig
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.papers.simplifying.bounds import SIX
from skipless.experiments.scale import Scale
from skipless.experiments.timings import BLOCKS, SIZES, Timings
from skipless.tasks.glue_results import summarise

LAPTOP = Scale("laptop")


@dataclass
class Made:
    """A run as it might have been."""

    loss: float = 3.0
    gap: float = 0.0
    """How far the training loss is below the held-out one."""
    late: float = 0.0
    """How much higher the held-out loss is at the beginning; it goes to nothing at the end."""
    time: float = 1.0
    """Of a token."""
    ratios: dict[str, float] = field(default_factory=dict)
    """`value 1` → β/α at the end; the others have about `ratio`."""
    ratio: float = 0.01
    gains: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    """Column of GLUE → score."""
    scratch_scores: dict[str, float] = field(default_factory=dict)
    glue: dict | None = None
    scratch: dict | None = None


World = dict[str, Made]


def history(cfg: RunConfig, made: Made) -> History:
    """A history whose held-out losses fall, steeply at first, to the one that was asked for."""
    per_step = cfg.train.batch_size * cfg.data.seq_len
    steps = cfg.train.steps or math.ceil((cfg.train.tokens or 1000 * per_step) / per_step)
    records = []
    for tenth in range(11):
        step, drop = steps * tenth // 10, 4 * (1 - tenth / 10) ** 4
        where = {"step": step, "tokens": step * per_step, "seconds": 60.0 * tenth}
        if tenth:
            records.append({**where, "loss": made.loss - made.gap + drop, "gains": gains(cfg, made)})
        loss = made.loss + drop + made.late * (1 - tenth / 10)
        records.append({**where, "valid_loss": loss, "valid_perplexity": math.exp(loss)})
    tuned, random = (
        given or (results({column: [score] for column, score in scores.items()}) if scores else None)
        for given, scores in ((made.glue, made.scores), (made.scratch, made.scratch_scores))
    )
    return History(cfg, records, glue=tuned, scratch=random, token_time=made.time)


def gains(cfg: RunConfig, made: Made) -> dict:
    found = {}
    for layer in range(cfg.model.n_layer):
        for part in ("value", "projection"):
            found[f"blocks.{layer}.attention.{part}.alpha"] = 1.0
            usual = made.ratio * (0.6 + 0.8 * layer / cfg.model.n_layer)  # not all alike
            found[f"blocks.{layer}.attention.{part}.beta"] = made.ratios.get(f"{part} {layer + 1}", usual)
        for name, start in (("alpha", 1.0), ("beta", 1.0), ("gamma", 1.0)):
            value = made.gains.get(name, start)
            found[f"blocks.{layer}.attention.mixing.{name}"] = [0.9 * value, 1.1 * value]
        found[f"blocks.{layer}.beta_ff"] = made.gains.get("beta_ff", 0.1)
    return found


def results(scores: dict[str, list[float]]) -> dict:
    """The content of glue.json: column → a score for each seed."""
    tasks = {
        column: {"seeds": {str(seed): {"m": score / 100} for seed, score in enumerate(values)}}
        for column, values in scores.items()
    }
    return summarise({"tasks": tasks, "failures": {}})


def glue(*means: float) -> dict:
    """Results of a fine-tuning with a seed for each mean."""
    return results({"sst2": [mean + 1 for mean in means], "stsb": [mean - 1 for mean in means]})


@cache
def configs_of(id: str) -> dict[str, RunConfig]:
    return EXPERIMENTS[id].configs(LAPTOP)


def evidence(id: str, *worlds: World, labels: tuple[str, ...] | None = None) -> Evidence:
    """Seed number i, and round number i of the timing, live in world number i; of all labels, or of some."""
    seconds = {size: {block: [world.get(block, Made()).time for world in worlds] for block in BLOCKS} for size in SIZES}
    return Evidence(
        {
            label: {seed: history(cfg, world.get(label, Made())) for seed, world in enumerate(worlds)}
            for label, cfg in configs_of(id).items()
            if labels is None or label in labels
        },
        Timings(seconds),
    )


def blend(id: str, first: World, second: World, share: float) -> World:
    """A world on the way from one to another."""

    def between(a: object, b: object) -> object:
        if isinstance(a, dict) and isinstance(b, dict):
            return {key: between(a.get(key, b.get(key)), b.get(key, a.get(key))) for key in {**a, **b}}
        return a + share * (b - a) if isinstance(a, float | int) and isinstance(b, float | int) else a

    def made(label: str) -> Made:
        a, b = first.get(label, Made()), second.get(label, Made())
        if a.ratios or b.ratios:  # what one of them names, the other has as well
            names = {**a.ratios, **b.ratios}
            a, b = (Made(**{**vars(one), "ratios": {n: one.ratios.get(n, one.ratio) for n in names}}) for one in (a, b))
        if a.gains or b.gains:
            start = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0, "beta_ff": 0.1}
            a, b = (Made(**{**vars(one), "gains": {**start, **one.gains}}) for one in (a, b))
        return Made(**{one.name: between(getattr(a, one.name), getattr(b, one.name)) for one in fields(Made)})

    return {label: made(label) for label in {**configs_of(id), **dict.fromkeys(BLOCKS)}}


def of(pairs: dict[str, float], **more) -> World:
    return {label: Made(loss, **more) for label, loss in pairs.items()}


COLUMNS = ("cola", "sst2", "mrpc", "stsb", "rte")


def encoders(
    loss: dict[str, float] | None = None,
    score: dict[str, float] | None = None,
    time: dict[str, float] | None = None,
    tasks: dict[str, float] | None = None,
    learnt: float = 20.0,
) -> World:
    """Six encoders: scores of 70 and some, the simplified ones' also by task, random ones `learnt` points below."""
    found = {}
    for block in SIX:
        base = 70.0 + (score or {}).get(block, 0.0)
        more = (tasks or {}) if block in ("sas", "sas-p") else {}
        found[block] = Made(
            (loss or {}).get(block, 3.0),
            time=(time or PAPER_TIMES).get(block, 1.0),
            scores={column: base + more.get(column, 0.0) for column in COLUMNS},
            scratch_scores=dict.fromkeys(COLUMNS, 70.0 - learnt),
        )
    return found


def betas(names: tuple[str, ...] = ("0", "0.2", "1"), **inits: tuple[float, ...]) -> World:
    """Losses at each β."""
    rows = {init.replace("_", "-"): values for init, values in inits.items()}
    return {
        f"sas-{init}-{beta}": Made(loss)
        for init, values in rows.items()
        for beta, loss in zip(names, values, strict=True)
    }


def duality(rates: tuple[float, float], by_beta: tuple[float, float]) -> World:
    """Losses at factors of 0.2 and 1 on the rate of V and P, and at β of 0.2 and 1, for both W_init."""
    return {
        f"{init}, {how}{factor}": Made(loss)
        for init in ("identity", "orthogonal")
        for how, values in (("V/P rate × ", rates), ("β = ", by_beta))
        for factor, loss in zip(("0.2", "1"), values, strict=True)
    }


def depths(**losses: tuple[float, float]) -> World:
    """Losses of blocks, shallow and deep."""
    rows = {block.replace("_", "-"): pair for block, pair in losses.items()}
    return {
        f"{block}, {kind}": Made(loss)
        for block, pair in rows.items()
        for kind, loss in zip(("shallow", "deep"), pair, strict=True)
    }


def schedules(linear: float, cosine: float, late: float) -> World:
    found = {f"{block}, cosine": Made(cosine) for block in ("pre-ln", "sas", "sas-p")}
    return found | {f"{block}, linear": Made(linear, late=late) for block in ("pre-ln", "sas", "sas-p")}


PAPER_TIMES = {"v-skipinit": 1.05, "pre-ln": 1.0, "parallel": 0.95, "sas": 0.92, "sas-p": 0.86, "sas-p-nonorm": 0.83}
SLOW = {"v-skipinit": 0.8, "pre-ln": 0.9, "parallel": 1.0, "sas": 1.1, "sas-p": 1.2, "sas-p-nonorm": 1.3}


def timed(losses: dict[str, float], times: dict[str, float] | None = None) -> World:
    return {block: Made(loss, time=(times or PAPER_TIMES)[block]) for block, loss in losses.items()}


MATRICES = ("sas", "sas-v-skipinit-matrix", "sas-p", "sas-p-v-skipinit-matrix")
NO_SKIP = ("sas", "sas-no-mlp-skip", "sas-no-mlp-skip-0.2", "sas-no-mlp-skip-0.8")
IDENTITY = ("pre-ln", "pre-ln-identity", "pre-ln-identity-half", "sas-identity-0", "sas-dense-orthogonal")
FIRST = ("sas", "sas-identity-0", "sas-p", "sas-p-identity-first")
MLP_GAINS = tuple(f"sas-beta-ff-{gain}" for gain in ("0.03", "0.1", "0.3", "1"))
FOUR = ("pre-ln", "parallel", "sas", "sas-p")


def named(labels: tuple[str, ...], *losses: float) -> World:
    return of(dict(zip(labels, losses, strict=True)))


def gain_runs(sas: dict, sas_p: dict, orthogonal: float, pre_ln: float, shared: float, fixed: float) -> World:
    return {
        "sas-gains": Made(**sas),
        "sas-p-gains": Made(**sas_p),
        "sas-gains-orthogonal": Made(ratio=orthogonal),
        "pre-ln-gains": Made(ratio=pre_ln),
        "sas": Made(3.0),
        "sas-shared-gains": Made(shared),
        "sas-fixed-gains": Made(fixed),
    }


PAPER: dict[str, World] = {
    "fig2": {
        "pre-ln": Made(3.0, 0.03),
        "v-skipinit": Made(3.3, 0.03),
        "sas-dense-orthogonal": Made(3.25, 0.05),
    },
    "fig3": {**betas(identity=(3.0, 3.02, 3.2), orthogonal=(3.15, 3.1, 3.4)), "pre-ln": Made(3.0)},
    "fig4": {"sas-gains": Made(3.05, ratios={"value 1": 0.2}), "sas-identity-0": Made(3.0)},
    "fig5": timed(
        {"pre-ln": 3.0, "parallel": 3.0, "v-skipinit": 3.3, "sas": 2.99, "sas-p": 2.97, "sas-p-nonorm": 3.04}
    ),
    "fig6": depths(pre_ln=(3.1, 2.9), v_skipinit=(3.3, 3.5), sas=(3.1, 2.9), sas_p=(3.1, 2.9)),
    "fig7": timed({"pre-ln": 3.0, "parallel": 3.0, "sas": 3.0, "sas-p": 3.02, "sas-p-nonorm": 3.05, "v-skipinit": 3.4}),
    "tab1": encoders(),
    "tab2": encoders(tasks={"stsb": -2.5, "sst2": 0.5, "rte": 2.0, "cola": 1.0}),
    "fig8": of({"pre-ln": 3.0, "sas": 2.95, "sas-p": 3.0}),
    "vp-lr": duality((3.0, 3.2), (3.01, 3.25)),
    "schedule": schedules(3.0, 3.05, 1.0),
    "matrix": named(MATRICES, 3.0, 3.05, 3.0, 3.05),
    "mlp-gain": named(MLP_GAINS, 3.02, 3.0, 3.01, 3.2),
    "tied": betas(("0", "0.2"), identity=(3.0, 3.0), orthogonal=(3.21, 3.2), ll_tied=(3.15,) * 2, all_tied=(3.1,) * 2),
    "gains": gain_runs({"ratios": {"value 1": 0.1}}, {"ratios": {"value 1": 0.1}}, 0.02, 0.5, 3.02, 3.03),
    "preln-identity": named(IDENTITY, 3.0, 3.1, 3.08, 3.0, 3.2),
    "first-value": named(FIRST, 2.98, 3.0, 2.99, 3.0),
    "mlp-skipless": named(NO_SKIP, 3.0, 3.5, 3.6, 3.7),
    "languini": named(FOUR, 3.1, 3.1, 3.1, 3.11),
}
"""What the paper found: every claim holds."""

AGAINST: dict[str, list[World]] = {
    "fig2": [{"pre-ln": Made(3.0, 1.0), "v-skipinit": Made(3.0), "sas-dense-orthogonal": Made(2.9)}],
    "fig3": [
        {**betas(identity=(3.4, 3.2, 3.1), orthogonal=(3.0, 3.35, 3.4)), "pre-ln": Made(3.0)},
        {**betas(identity=(2.7, 2.7, 2.7), orthogonal=(3.0, 3.0, 3.4)), "pre-ln": Made(3.0)},
    ],
    "fig4": [{"sas-gains": Made(2.9, ratio=0.3, ratios={"value 1": 0.01}), "sas-identity-0": Made(3.0)}],
    "fig5": [
        timed({"pre-ln": 3.0, "parallel": 3.0, "v-skipinit": 3.0, "sas": 3.4, "sas-p": 3.4, "sas-p-nonorm": 3.8}, SLOW),
        timed({"pre-ln": 3.0, "parallel": 3.0, "v-skipinit": 3.3, "sas": 2.7, "sas-p": 2.7, "sas-p-nonorm": 2.6}),
    ],
    "fig6": [
        depths(pre_ln=(3.1, 3.3), v_skipinit=(3.3, 3.0), sas=(3.4, 3.7), sas_p=(3.4, 3.7)),
        depths(pre_ln=(3.1, 2.9), v_skipinit=(3.3, 3.5), sas=(2.6, 2.4), sas_p=(2.6, 2.4)),
    ],
    "fig7": [
        timed({"pre-ln": 3.0, "parallel": 3.0, "sas": 3.4, "sas-p": 3.4, "sas-p-nonorm": 3.5, "v-skipinit": 3.0}, SLOW),
        timed({"pre-ln": 3.0, "parallel": 3.0, "sas": 2.6, "sas-p": 2.6, "sas-p-nonorm": 3.0, "v-skipinit": 3.4}),
    ],
    "tab1": [
        encoders(score={"sas": -9, "sas-p": -9, "v-skipinit": -9}, time=SLOW),
        encoders(score={"sas": 9, "sas-p": 9, "v-skipinit": 9}),
    ],
    "tab2": [encoders(tasks={"stsb": -9.0, "sst2": -3.0, "rte": -3.0, "cola": -3.0}, score=dict.fromkeys(SIX, -30.0))],
    "fig8": [of({"pre-ln": 3.0, "sas": 3.4, "sas-p": 3.4})],
    "vp-lr": [duality((3.5, 3.2), (3.01, 3.25)), duality((2.5, 3.2), (3.01, 3.25))],
    "schedule": [schedules(3.12, 3.05, -1.0)],
    "matrix": [
        {**named(MATRICES, 3.1, 3.05, 3.1, 3.05), "sas": Made(3.1, late=0.5), "sas-p": Made(3.1, late=0.5)},
        named(MATRICES, 2.2, 3.05, 2.2, 3.05),
    ],
    "mlp-gain": [named(MLP_GAINS, 3.02, 3.4, 3.01, 3.0)],
    "tied": [
        betas(("0", "0.2"), identity=(3.4, 3.4), orthogonal=(3.0, 3.05), ll_tied=(3.1,) * 2, all_tied=(3.3,) * 2),
        betas(("0", "0.2"), identity=(2.5, 2.5), orthogonal=(3.21, 3.2), ll_tied=(2.8,) * 2, all_tied=(2.7,) * 2),
    ],
    "gains": [
        gain_runs(
            {"gains": {"alpha": 0.01, "beta": 0.01, "gamma": 0.01, "beta_ff": 0.001}, "ratio": 0.5},
            {"ratio": 0.4, "ratios": {"value 1": 0.01}},
            0.4,
            0.02,
            2.9,
            2.9,
        ),
        gain_runs({"ratios": {"value 1": 0.1}}, {"ratios": {"value 1": 0.1}}, 0.02, 0.5, 3.5, 3.5),
    ],
    "preln-identity": [named(IDENTITY, 3.2, 3.1, 3.08, 3.4, 3.2), named(IDENTITY, 3.0, 3.6, 3.6, 3.0, 3.2)],
    "first-value": [named(FIRST, 3.2, 3.0, 3.2, 3.0), named(FIRST, 2.7, 3.0, 2.7, 3.0)],
    "mlp-skipless": [named(NO_SKIP, 3.0, 3.0, 2.9, 2.9)],
    "languini": [named(FOUR, 3.1, 3.1, 3.6, 3.6), named(FOUR, 3.1, 3.1, 2.6, 2.6)],
}
"""Worlds in which claims are false: beyond each bound of each claim lies at least one."""

TUNED = "was tuned to pre-ln's learning rate, to half a step of the paper's grid (a factor of 1.8)"
ALWAYS = {
    "fig5": [
        "sas-p has about 13% fewer parameters than parallel, in the paper's decoder",
        *(f"{block} {TUNED}" for block in ("sas", "sas-p")),
    ],
    "tab1": [
        f"{block} has at least 15% fewer parameters than pre-ln, in the paper's encoder" for block in ("sas", "sas-p")
    ],
    "languini": ["sas has about 15% fewer parameters than parallel, in the paper's model"],
    "mlp-skipless": [
        "sas-no-mlp-skip was tuned to a learning rate an order of magnitude below that of sas (a sixth or less)"
    ],
}
"""Claims on parameters and tuned rates: they follow from the configurations, so measurements cannot make them false."""
