"""The paper's figures and tables as experiments: which runs, which claims, which plots. `EXPERIMENTS` has them by id.

Tolerances, as shares of the other block's loss: what the paper calls a match is within `MATCH`; `clearly` slower is
beyond it; `slightly` better or worse is anything beyond 0. See docs/experiments.md.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipless.experiments.evidence import (
    Claim,
    Evidence,
    History,
    at_equal_time,
    bar_plot,
    bar_series,
    compare,
    final_ratios,
    gain_plot,
    loss_plot,
    ratio_plot,
    swept_plot,
    valid_loss,
)
from skipless.experiments.experiment import Configs, experiment
from skipless.experiments.outcome import OPEN, Plot, Verdict
from skipless.experiments.recipes import BETAS, MLP_GAINS, PROTOCOLS, Scale
from skipless.finetune import AVERAGE, scores, summarise
from skipless.inspect import count_parameters

MATCH = 0.02
"""A loss at most 2% above the other's is a match."""

MUCH = 0.05
"""A loss more than 5% above the other's is much slower."""

NEARLY_ALL = 0.9
"""The share of layers that the paper's `vast majority` is taken for."""

SMALL_RATIO = 0.05
"""The paper's threshold on β/α."""

SHARE, NUMBER = ".0%", ".3g"
"""How a quantity is written that is not the difference between two blocks."""


def decoders(*blocks: str) -> Callable[[Scale], Configs]:
    """Runs of the decoder with each block."""
    return lambda scale: {block: scale.decoder(block) for block in blocks}


def losses(key: str, title: str, first_axis: str = "steps") -> Callable[[Scale, Evidence], list[Plot]]:
    """The plot of held-out losses, and that of the training losses."""

    def plots(scale: Scale, evidence: Evidence) -> list[Plot]:
        train = loss_plot(evidence, f"{key}-train", title, first_axis, measure="loss", label="training loss")
        return [loss_plot(evidence, key, title, first_axis), train]

    return plots


def matches(first: str, second: str, paper: str, how: str = "per step") -> Claim:
    """The claim that one block's loss is at most `MATCH` above another's."""
    return compare(f"{first} matches or beats {second} {how}", paper, first, second, below=MATCH)


def beats(first: str, second: str, paper: str) -> Claim:
    """The claim that one loss is below another."""
    return compare(f"{first} ends lower than {second}", paper, first, second, below=0)


def clearly_behind(first: str, second: str, paper: str, by: float = MATCH) -> Claim:
    """The claim that one loss is above another by more than a match."""
    return compare(f"{first} is clearly behind {second}", paper, first, second, above=by)


# ------------------------------------------------------------------------- figures 2 to 4


@experiment(
    "fig2",
    "Attention without its skip trains slower",
    "Without the attention skip, V-SkipInit and Shaped Attention train clearly slower per step than Pre-LN; "
    "training and evaluation loss are nearly equal.",
    decoders("pre-ln", "v-skipinit", "sas-dense-orthogonal"),
    losses("fig2", "Loss of training speed without the attention skip"),
)
def _fig2(scale: Scale) -> list[Claim]:
    blocks = ("pre-ln", "v-skipinit", "sas-dense-orthogonal")

    def largest_gap(seed: Mapping[str, History]) -> float:
        return max(abs(seed[block].valid_loss / seed[block].train_loss - 1) for block in blocks)

    return [
        clearly_behind("v-skipinit", "pre-ln", "a significant loss of training speed per step"),
        clearly_behind("sas-dense-orthogonal", "pre-ln", "the same with Shaped Attention and orthogonal V and P"),
        Claim(
            "training and held-out loss are nearly equal (the largest gap of the three)",
            "a single-epoch regime with a minimal generalisation gap",
            blocks,
            largest_gap,
            below=MUCH,
        ),
    ]


def swept_betas(scale: Scale) -> tuple[float, ...]:
    """β_V = β_P that are trained at a scale; the laptop's few are enough for the claims."""
    return BETAS if scale.is_paper else (0.0, 0.2, 1.0)


def _fig3_configs(scale: Scale) -> Configs:
    names = [f"sas-{init}-{beta:g}" for init in ("identity", "orthogonal") for beta in swept_betas(scale)]
    return decoders("pre-ln", *names)(scale)


def _beta_plots(key: str, inits: Sequence[str]) -> Callable[[Scale, Evidence], list[Plot]]:
    def plots(scale: Scale, evidence: Evidence) -> list[Plot]:
        betas = swept_betas(scale)
        lines = {init: {beta: f"sas-{init}-{beta:g}" for beta in betas} for init in inits}
        lines["pre-ln"] = dict.fromkeys((betas[0], betas[-1]), "pre-ln")
        title = "Final loss over the weight of ΔW in W^V and W^P"
        return [
            swept_plot(evidence, key, title, "β_V = β_P", lines, log_x=False),
            loss_plot(evidence, f"{key}-curves", "Held-out loss"),
        ]

    return plots


def lower_on_average(text: str, paper: str, pairs: Iterable[tuple[str, str]]) -> Claim:
    """The claim that, on the mean over pairs of labels, the first one's loss is below the second's."""
    pairs = list(pairs)

    def quantity(seed: Mapping[str, History]) -> float:
        return statistics.fmean(seed[first].valid_loss / seed[second].valid_loss - 1 for first, second in pairs)

    labels = tuple(dict.fromkeys(label for pair in pairs for label in pair))
    return Claim(text, paper, labels, quantity, below=0, show=valid_loss)


@experiment(
    "fig3",
    "Small updates of W^V and W^P recover the speed",
    "Smaller β_V = β_P recover the speed that skipless attention lost; identity beats orthogonal W_init; identity with "
    "β = 0, no V and P at all, matches Pre-LN.",
    _fig3_configs,
    _beta_plots("fig3", ("identity", "orthogonal")),
)
def _fig3(scale: Scale) -> list[Claim]:
    pairs = [(f"sas-identity-{beta:g}", f"sas-orthogonal-{beta:g}") for beta in swept_betas(scale)]
    return [
        beats("sas-orthogonal-0.2", "sas-orthogonal-1", "smaller β restores much of the speed, orthogonal W_init"),
        beats("sas-identity-0", "sas-identity-1", "the same with identity W_init, down to β = 0"),
        lower_on_average("identity W_init beats orthogonal, mean over β", "a consistent improvement", pairs),
        matches("sas-identity-0", "pre-ln", "essentially matches the Pre-LN block"),
    ]


def small_share(label: str) -> Callable[[Mapping[str, History]], float]:
    """The share of value and projection maps whose |β/α| ends below the paper's threshold."""

    def quantity(seed: Mapping[str, History]) -> float:
        ratios = final_ratios(seed[label])
        return sum(ratio < SMALL_RATIO for ratio in ratios.values()) / len(ratios)

    return quantity


def shrinks(label: str, paper: str, least: float = NEARLY_ALL) -> Claim:
    """The claim that β/α goes to 0 in most maps."""
    text = f"{label}: β/α of V and P ends below {SMALL_RATIO} in at least {least:.0%} of the maps"
    return Claim(text, paper, (label,), small_share(label), above=least - 1e-9, one_seed=0.05, form=SHARE)


@experiment(
    "fig4",
    "Trained gains on W^V and W^P go to zero",
    "With α and β of V and P trained from 1 and 0.2, β/α goes to 0 in nearly all layers; only the first layer's value "
    "stays above 0.05; evaluation loss 1.194 against 1.178 with identity V and P.",
    decoders("sas-gains", "sas-identity-0"),
    lambda scale, evidence: [
        ratio_plot(evidence, "sas-gains", "fig4", "Residual-skip gain ratios of V and P"),
        loss_plot(evidence, "fig4-loss", "Held-out loss"),
    ],
)
def _fig4(scale: Scale) -> list[Claim]:
    def fallen(seed: Mapping[str, History]) -> float:
        ratios = final_ratios(seed["sas-gains"])
        return sum(ratio < 0.2 for ratio in ratios.values()) / len(ratios)

    def first_value_lead(seed: Mapping[str, History]) -> float:
        ratios = final_ratios(seed["sas-gains"])
        first = ratios.pop("value 1")
        return first - max(ratios.values())

    return [
        Claim(
            f"β/α of V and P ends below its start of 0.2 in at least {NEARLY_ALL:.0%} of the maps",
            "the ratios converge to 0 for the vast majority of layers",
            ("sas-gains",),
            fallen,
            above=NEARLY_ALL - 1e-9,
            one_seed=0.05,
            form=SHARE,
        ),
        shrinks("sas-gains", "only one ratio is above 0.05 at the end"),
        Claim(
            "layer 1's value keeps the largest β/α (its lead over the next)",
            "the first layer's value is the only ratio above 0.05",
            ("sas-gains",),
            first_value_lead,
            above=0,
            one_seed=0.01,
            form=NUMBER,
        ),
        compare(
            "trained V and P end higher than identity V and P",
            "1.194 against 1.178 (+1.4%)",
            "sas-gains",
            "sas-identity-0",
            above=0,
        ),
    ]


# ------------------------------------------------------------------- the blocks compared

SIX = ("pre-ln", "parallel", "v-skipinit", "sas", "sas-p", "sas-p-nonorm")


def token_time(history: History) -> float:
    """Seconds for each training token."""
    return history.token_time


def faster(first: str, second: str, paper: str) -> Claim:
    """The claim that a block takes less time for a token than another."""
    text = f"{first} takes less time for a training token than {second}"
    return compare(text, paper, first, second, measure=token_time, below=0)


@experiment(
    "fig5",
    "Six blocks over run time and over steps",
    "SAS and SAS-P match or beat Pre-LN in run time and per step; without norms the block matches in run time and is "
    "slightly worse per step.",
    decoders(*SIX),
    losses("fig5", "Training speed", "minutes"),
)
def _fig5(scale: Scale) -> list[Claim]:
    time = "in run time"
    return [
        matches("sas", "pre-ln", "per step, essentially matches Pre-LN"),
        matches("sas-p", "pre-ln", "per step, essentially matches Pre-LN"),
        at_equal_time(f"sas matches or beats pre-ln {time}", "slightly outperforms it", "sas", "pre-ln", below=MATCH),
        at_equal_time(f"sas-p matches or beats pre-ln {time}", "even faster than SAS", "sas-p", "pre-ln", below=MATCH),
        faster("sas-p", "pre-ln", "fewer products and one norm less: faster in run time"),
        matches("sas-p", "parallel", "matches the parallel block with 13% fewer parameters"),
        compare(
            "sas-p-nonorm is slightly worse than sas-p per step",
            "a slight degradation per iteration",
            "sas-p-nonorm",
            "sas-p",
            above=0,
        ),
        at_equal_time(
            f"sas-p-nonorm matches pre-ln {time}", "matches Pre-LN's speed", "sas-p-nonorm", "pre-ln", below=MATCH
        ),
    ]


FOUR = ("pre-ln", "v-skipinit", "sas", "sas-p")


def _fig6_configs(scale: Scale) -> Configs:
    return {f"{block}, {kind}": scale.run(kind, block) for block in FOUR for kind in ("shallow", "deep")}


@experiment(
    "fig6",
    "Depth",
    "From 18 to 72 layers (MLP of width 2d) Pre-LN, SAS and SAS-P improve; V-SkipInit gets worse.",
    _fig6_configs,
    losses("fig6", "Shallow and deep"),
)
def _fig6(scale: Scale) -> list[Claim]:
    def gap_growth(seed: Mapping[str, History]) -> float:
        shallow, deep = (
            seed[f"v-skipinit, {kind}"].valid_loss / seed[f"pre-ln, {kind}"].valid_loss for kind in ("shallow", "deep")
        )
        return deep - shallow

    improve = [
        compare(f"{block} improves with depth", "improves", f"{block}, deep", f"{block}, shallow", below=0)
        for block in ("pre-ln", "sas", "sas-p")
    ]
    labels = tuple(f"{block}, {kind}" for block in ("v-skipinit", "pre-ln") for kind in ("shallow", "deep"))
    return [
        *improve,
        compare(
            "v-skipinit gets worse with depth",
            "trains slower per update at 72 layers than at 18",
            "v-skipinit, deep",
            "v-skipinit, shallow",
            above=0,
        ),
        Claim(
            "the gap between v-skipinit and pre-ln grows with depth", "the gap increases", labels, gap_growth, above=0
        ),
    ]


# ------------------------------------------------------------------------------- BERT


def _encoders(*blocks: str) -> Callable[[Scale], Configs]:
    return lambda scale: {block: scale.run("encoder", block) for block in blocks}


@experiment(
    "fig7",
    "BERT: masked-language loss over run time and over steps",
    "The simplified blocks match Pre-LN within 24 hours on one GPU; V-SkipInit is clearly behind.",
    _encoders(*SIX),
    losses("fig7", "Masked language modelling", "minutes"),
)
def _fig7(scale: Scale) -> list[Claim]:
    how = "in masked-language loss"
    return [
        matches("sas", "pre-ln", "matches the pre-training speed", how),
        matches("sas-p", "pre-ln", "matches the pre-training speed", how),
        clearly_behind("v-skipinit", "pre-ln", "a significant loss of training speed"),
    ]


def parameters(history: History) -> float:
    """Trainable parameters."""
    return float(sum(count_parameters(history.config.model).values()))


def speed(history: History) -> float:
    """Training tokens a second."""
    return 1 / history.token_time


def glue_scores(histories: Iterable[History]) -> dict[str, list[float]]:
    """Column, the average first → the score of every fine-tuning of every pre-training."""
    found: dict[str, list[float]] = {}
    for one in histories:
        for column, of_seeds in (scores(one.glue) if one.glue else {}).items():
            found.setdefault(column, []).extend(of_seeds.values())
    return {column: values for column, values in found.items() if values}


def _glue_plots(evidence: Evidence) -> list[Plot]:
    found = {block: evidence.finished(block).values() for block in evidence.histories}
    averages = {block: glue_scores(histories).get(AVERAGE, []) for block, histories in found.items()}
    sizes = {block: [parameters(one) for one in list(histories)[:1]] for block, histories in found.items()}
    base = [speed(one) for one in found.get("pre-ln", ())]
    speeds = {
        block: [speed(one) / statistics.fmean(base) for one in histories] if base else []
        for block, histories in found.items()
    }
    return [
        bar_plot("tab1-glue", "GLUE", "mean score", averages),
        bar_plot("tab1-parameters", "Parameters", "trainable parameters", sizes),
        bar_plot("tab1-speed", "Speed", "training tokens in equal time, pre-ln = 1", speeds),
    ]


def _task_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    series = []
    for block in evidence.histories:
        found = list(evidence.finished(block).values())
        random = [replace(one, glue=one.scratch) for one in found]
        series += [
            replace(bar_series(name, "column", glue_scores(histories)), group=block)
            for name, histories in ((block, found), (f"{block}, from scratch", random))
        ]
    drawn = tuple(one for one in series if one.y)
    return [Plot("tab2", "GLUE by task", "score", {"column": ""}, drawn, kind="bars")]


def was_fine_tuned(history: History) -> bool:
    """Whether there is an average over tasks."""
    return history.glue is not None and history.glue["mean"] is not None


@dataclass(frozen=True)
class GlueClaim(Claim):
    """A claim on scores of fine-tuned models: runs that were not fine-tuned are as good as missing."""

    counts: Callable[[History], bool] = was_fine_tuned
    """Whether a run has what the claim is about."""
    by_fine_tuning: bool = True
    """Whether the seeds are those of the fine-tuning where there is one pre-training of each block."""
    column: str = AVERAGE
    """Whose seeds of fine-tuning those are: a task of its own may have more of them."""

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict on the seeds for which every label counts."""
        tuned = {
            label: {seed: one for seed, one in evidence.finished(label).items() if self.counts(one)}
            for label in self.labels
        }
        missing = [label for label, histories in tuned.items() if evidence.finished(label) and not histories]
        if missing:
            what = f"not all of the fine-tunings of {', '.join(missing)} are there; --glue-dir DIR makes them"
            return Verdict(self.text, self.paper, OPEN, what)
        columns = {label: {key for one in of.values() for key in _columns(one)} for label, of in tuned.items()}
        every = set[str]().union(*columns.values())
        partial = [label for label, its in columns.items() if its != every]
        if self.column == AVERAGE and partial:  # an average over fewer tasks is another average
            what = f"{', '.join(partial)} is not fine-tuned on all of {', '.join(sorted(every))} yet"
            return Verdict(self.text, self.paper, OPEN, what)
        if not self.by_fine_tuning or any(len(histories) != 1 for histories in tuned.values()):
            return super().judge(Evidence(tuned))
        fine = {label: self._fine_tunings(one) for label, (one,) in ((key, v.values()) for key, v in tuned.items())}
        return Claim.judge(replace(self, seed="fine-tuning seed"), Evidence(fine))

    def _fine_tunings(self, history: History) -> dict[int, History]:
        """The history with the scores of each seed of its fine-tuning alone, and with its random encoder's of that."""
        assert history.glue is not None
        seeds = {
            int(seed): replace(history, glue=_of_seed(history.glue, seed), scratch=_of_seed(history.scratch, seed))
            for seed in scores(history.glue)[self.column]
        }
        return {seed: one for seed, one in seeds.items() if self.counts(one)}


def _columns(history: History) -> Iterable[str]:
    """The columns of GLUE that a fine-tuning has so far."""
    return history.glue["tasks"] if history.glue else ()


def _of_seed(glue: Mapping[str, Any] | None, seed: str) -> Mapping[str, Any] | None:
    """The scores of one seed, in the tasks that have it."""
    if glue is None:
        return None
    having = {column: one["seeds"] for column, one in glue["tasks"].items() if seed in one["seeds"]}
    return summarise({**glue, "tasks": {column: {"seeds": {seed: seeds[seed]}} for column, seeds in having.items()}})


def glue_mean(history: History) -> float:
    """The mean over tasks, in points."""
    assert history.glue is not None
    return history.glue["mean"]


def task_differences(own: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, float]:
    """Column → how many points one fine-tuning is above another, where both have it."""
    mine, others = (glue["tasks"] if glue else {} for glue in (own, other))
    return {column: mine[column]["score_mean"] - others[column]["score_mean"] for column in mine if column in others}


def worst_task(first: str, second: str) -> Callable[[Mapping[str, History]], float]:
    """How many points the first model is above the second in the task where it is worst."""
    return lambda seed: min(task_differences(seed[first].glue, seed[second].glue).values())


HELPED = {"sst2": "SST-2", "stsb": "STS-B"}
"""Tasks that a small encoder learns from pre-training."""


def helps(block: str, column: str) -> GlueClaim:
    """That a pre-trained encoder is above a random one in a task."""

    def help_of(history: History) -> float | None:
        return task_differences(history.glue, history.scratch).get(column)

    return GlueClaim(
        f"pre-training helps {block} in {HELPED[column]} (points above a random encoder)",
        "(not measured there; a check of the recipe)",
        (block,),
        lambda seed: help_of(seed[block]),  # pyrefly: ignore
        above=0,
        one_seed=2.0,
        form=NUMBER,
        counts=lambda history: help_of(history) is not None,
        column=column,
    )


@experiment(
    "tab1",
    "BERT: GLUE, parameters, speed",
    "GLUE mean, parameters, speed: Pre-LN 78.9±.7, 120M, 1.00; Parallel 78.5±.6, 120M, 1.05; V-SkipInit 78.0±.3, 120M, "
    "0.95; SAS 78.4±.8, 101M, 1.09; SAS-P 78.3±.4, 101M, 1.16; SAS-P without norms —, 101M, 1.20.",
    _encoders(*SIX),
    lambda scale, evidence: _glue_plots(evidence),
    on_glue=True,
)
def _tab1(scale: Scale) -> list[Claim]:
    scores = {"sas": "78.4±.8 against 78.9±.7", "sas-p": "78.3±.4 against 78.9±.7"}
    speeds = {"sas": "1.09", "sas-p": "1.16", "sas-p-nonorm": "1.20"}
    share = 0.1 if scale.is_paper else 0.05  # in a small model the embedding, which stays, weighs more
    return [
        *(
            GlueClaim(
                f"{block} matches pre-ln on GLUE (points above it)",
                paper,
                (block, "pre-ln"),
                lambda seed, block=block: glue_mean(seed[block]) - glue_mean(seed["pre-ln"]),
                above=-1.5,
                one_seed=1.0,
                form=NUMBER,
                show=glue_mean,
            )
            for block, paper in scores.items()
        ),
        Claim(
            f"sas has at least {share:.0%} fewer parameters than pre-ln",
            "101M against 120M (16% fewer)",
            ("sas", "pre-ln"),
            lambda seed: parameters(seed["sas"]) / parameters(seed["pre-ln"]) - 1,
            below=-share,
            one_seed=0.0,
            show=parameters,
        ),
        *(faster(block, "pre-ln", f"speed {paper}") for block, paper in speeds.items()),
    ]


@experiment(
    "tab2",
    "BERT: GLUE per task",
    "The simplified blocks are within 3 points of Pre-LN in every task (STS-B is their worst: 84.7 and 85.2 against "
    "87.6) and above it in RTE and CoLA.",
    _encoders(*SIX),
    _task_plots,
    on_glue=True,
)
def _tab2(scale: Scale) -> list[Claim]:
    papers = {"sas": "−2.9, in STS-B", "sas-p": "−2.4, in STS-B"}
    worst = [
        GlueClaim(
            f"{block} is at most 4 points below pre-ln in its worst task",
            paper,
            (block, "pre-ln"),
            worst_task(block, "pre-ln"),
            above=-4,
            one_seed=2.0,
            form=NUMBER,
            by_fine_tuning=False,  # the worst of one seed alone would mostly be its worst luck
        )
        for block, paper in papers.items()
    ]
    return [*worst, *(helps(block, column) for block in PROTOCOLS[scale.name].baselines for column in HELPED)]


@experiment(
    "fig8",
    "Three times the tokens",
    "SAS and SAS-P go on matching or beating Pre-LN when trained on three times the tokens.",
    lambda scale: {block: scale.run("long", block) for block in ("pre-ln", "sas", "sas-p")},
    losses("fig8", "Longer training"),
)
def _fig8(scale: Scale) -> list[Claim]:
    return [matches(block, "pre-ln", "continues to match or outperform") for block in ("sas", "sas-p")]


# --------------------------------------------------------------------------- the appendix


def _vp_label(init: str, factor: float) -> str:
    return f"{init}, V/P rate × {factor:g}"


def _vp_lr_configs(scale: Scale) -> Configs:
    """At the learning rate of `sas`, as figure 3. A factor of 0 is β = 0, so that run is figure 3's."""
    runs, lr = {}, scale.decoder("sas").train.lr
    for init in ("identity", "orthogonal"):
        for factor in swept_betas(scale):
            fixed = scale.decoder(f"sas-{init}-0")
            free = (
                fixed
                if not factor
                else scale.decoder(f"sas-dense-{init}", {"train.vp_lr_factor": factor, "train.lr": lr})
            )
            runs[_vp_label(init, factor)] = free
    return {**_fig3_configs(scale), **runs}


def _vp_lr_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    factors = swept_betas(scale)
    lines = {f"rate, {init}": {f: _vp_label(init, f) for f in factors} for init in ("identity", "orthogonal")}
    lines |= {f"β, {init}": {f: f"sas-{init}-{f:g}" for f in factors} for init in ("identity", "orthogonal")}
    title = "Final loss over the factor on the rate of V and P, or over β"
    return [
        swept_plot(evidence, "vp-lr", title, "factor, or β_V = β_P", lines, log_x=False),
        loss_plot(evidence, "vp-lr-curves", "Held-out loss"),
    ]


@experiment(
    "vp-lr",
    "A smaller learning rate of W^V and W^P instead of β",
    "Scaling the learning rate of V and P down has the effect of a smaller β (SGD: factor β²; AdamW: factor β).",
    _vp_lr_configs,
    _vp_lr_plots,
)
def _vp_lr(scale: Scale) -> list[Claim]:
    def mean_distance(seed: Mapping[str, History]) -> float:
        pairs = [(_vp_label(init, 0.2), f"sas-{init}-0.2") for init in ("identity", "orthogonal")]
        return statistics.fmean(abs(seed[a].valid_loss / seed[b].valid_loss - 1) for a, b in pairs)

    labels = tuple(label for init in ("identity", "orthogonal") for label in (_vp_label(init, 0.2), f"sas-{init}-0.2"))
    paper = "a smaller rate of V and P improves the training speed, as a smaller β does"
    return [
        *(beats(_vp_label(init, 0.2), _vp_label(init, 1), paper) for init in ("identity", "orthogonal")),
        Claim(
            "a factor of 0.2 on the rate ends where β = 0.2 does (mean distance)",
            "the equivalent of figure 3",
            labels,
            mean_distance,
            below=MATCH,
            one_seed=0.01,
        ),
    ]


def _schedule_configs(scale: Scale) -> Configs:
    return {
        f"{block}, {schedule}": scale.decoder(block, {"train.schedule": schedule})
        for block in ("pre-ln", "sas", "sas-p")
        for schedule in ("linear", "cosine")
    }


@experiment(
    "schedule",
    "Linear or cosine decay of the learning rate",
    "Linear decay ends lower, for baseline and simplified blocks.",
    _schedule_configs,
    losses("schedule", "Learning-rate schedules"),
)
def _schedule(scale: Scale) -> list[Claim]:
    paper = "a better final performance"
    return [beats(f"{block}, linear", f"{block}, cosine", paper) for block in ("pre-ln", "sas", "sas-p")]


@experiment(
    "matrix",
    "Shaped Attention or V-SkipInit's matrix",
    "Shaped Attention is slightly better than V-SkipInit's matrix, in SAS and in SAS-P.",
    decoders("sas", "sas-v-skipinit-matrix", "sas-p", "sas-p-v-skipinit-matrix"),
    losses("matrix", "Attention matrices"),
)
def _matrix(scale: Scale) -> list[Claim]:
    paper = "a small but consistent gain throughout training"
    return [beats(block, f"{block}-v-skipinit-matrix", paper) for block in ("sas", "sas-p")]


def _mlp_gain_lines() -> dict[str, dict[float, str]]:
    return {"sas": {gain: f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS}}


@experiment(
    "mlp-gain",
    "Initial weight of the MLP's branch",
    "The final loss over the initial β_FF has a shallow optimum near 0.1.",
    decoders(*(f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS)),
    lambda scale, evidence: [
        swept_plot(evidence, "mlp-gain", "Final loss over initial β_FF", "β_FF", _mlp_gain_lines(), log_x=True),
        loss_plot(evidence, "mlp-gain-curves", "Held-out loss"),
    ],
)
def _mlp_gain(scale: Scale) -> list[Claim]:
    labels = tuple(f"sas-beta-ff-{gain:g}" for gain in MLP_GAINS)

    def against_best_other(seed: Mapping[str, History]) -> float:
        return seed["sas-beta-ff-0.1"].valid_loss / min(seed[label].valid_loss for label in labels) - 1

    def depth_of_optimum(seed: Mapping[str, History]) -> float:
        near = [seed[f"sas-beta-ff-{gain:g}"].valid_loss for gain in (0.03, 0.1, 0.3)]
        return max(near) / min(near) - 1

    return [
        Claim(
            "β_FF = 0.1 is within 1% of the best of all",
            "the optimum is near 0.1",
            labels,
            against_best_other,
            below=0.01,
            one_seed=0.005,
            show=valid_loss,
        ),
        beats("sas-beta-ff-0.1", "sas-beta-ff-1", "a large gain ends higher"),
        Claim(
            "the optimum is shallow: from 0.03 to 0.3 the loss changes by less than 5%",
            "the curve is flat around 0.1",
            labels[:3],
            depth_of_optimum,
            below=MUCH,
            show=valid_loss,
        ),
    ]


TIED = ("identity", "orthogonal", "ll-tied", "all-tied")


def tied_betas(scale: Scale) -> tuple[float, ...]:
    """β_V = β_P of `tied`: those of figure 3, at laptop scale the small ones."""
    return BETAS if scale.is_paper else (0.0, 0.2)


@experiment(
    "tied",
    "Orthogonal W_init tied over layers",
    "Tying the last layer, and more so all layers, closes part of the gap between orthogonal and identity W_init.",
    lambda scale: decoders(*(f"sas-{init}-{beta:g}" for init in TIED for beta in tied_betas(scale)))(scale),
    lambda scale, evidence: _beta_plots("tied", TIED)(scale, evidence),
)
def _tied(scale: Scale) -> list[Claim]:
    def pairs(first: str, second: str) -> list[tuple[str, str]]:
        return [(f"sas-{first}-{beta:g}", f"sas-{second}-{beta:g}") for beta in tied_betas(scale)]

    def lower(first: str, second: str, paper: str) -> Claim:
        return lower_on_average(f"{first} ends lower than {second}, mean over β", paper, pairs(first, second))

    return [
        lower("ll-tied", "orthogonal", "a slight improvement"),
        lower("all-tied", "ll-tied", "further improves performance"),
        lower("identity", "all-tied", "all-tied does not fully close the gap to identity"),
    ]


GAINS = {
    "attention.mixing.alpha": "α of I",
    "attention.mixing.beta": "β of A",
    "attention.mixing.gamma": "γ of C",
    "beta_ff": "β_FF of the MLP",
}


def _gain_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    trajectories = [
        gain_plot(evidence, "sas-gains", part, f"gains-{part.split('.')[-1]}", title) for part, title in GAINS.items()
    ]
    ratios = {
        "sas-p-gains": "Ratios of the parallel block",
        "sas-gains-orthogonal": "Ratios with orthogonal W_init",
        "pre-ln-gains": "Ratios of Pre-LN",
    }
    return [*trajectories, *(ratio_plot(evidence, block, f"gains-{block}", title) for block, title in ratios.items())]


def least_gain(part: str) -> Callable[[Mapping[str, History]], float]:
    """The smallest of a gain's layers at the end against its start: mean over heads of the size."""

    def quantity(seed: Mapping[str, History]) -> float:
        history = seed["sas-gains"]
        block = history.config.model.block
        start = block.beta_ff if part == "beta_ff" else getattr(block, part.split(".")[-1])
        assert start is not None
        layers = history.layers(part).values()
        return min(abs(statistics.fmean(values[-1][1])) for values in layers) / start.at_depth(len(layers))

    return quantity


@experiment(
    "gains",
    "Trajectories of the gains",
    "α, β, γ of Shaped Attention and β_FF do not go to 0; the ratios of V and P do in the parallel block and with "
    "orthogonal W_init; with the attention skip (Pre-LN) many grow.",
    decoders("sas-gains", "sas-p-gains", "sas-gains-orthogonal", "pre-ln-gains"),
    _gain_plots,
)
def _gains(scale: Scale) -> list[Claim]:
    kept = [
        Claim(
            f"{title} does not go to 0: in every layer it ends above a tenth of its start",
            "none of the scalar parameters converges to zero",
            ("sas-gains",),
            least_gain(part),
            above=0.1,
            one_seed=0.05,
            form=SHARE,
        )
        for part, title in GAINS.items()
    ]

    def mean_ratio(seed: Mapping[str, History]) -> float:
        return statistics.fmean(final_ratios(seed["pre-ln-gains"]).values())

    return [
        *kept,
        shrinks("sas-p-gains", "the vast majority converge to 0"),
        shrinks("sas-gains-orthogonal", "the vast majority, with slightly more outliers", 0.75),
        Claim(
            "with the attention skip the ratios of V and P grow: their mean ends above the start of 0.2",
            "many more ratios increase during training",
            ("pre-ln-gains",),
            mean_ratio,
            above=0.2,
            one_seed=0.02,
            form=NUMBER,
        ),
    ]


@experiment(
    "preln-identity",
    "Pre-LN with identity W^V and W^P",
    "Identity V and P slightly hurt Pre-LN, also with β_SA below 1, unlike the skipless block.",
    decoders("pre-ln", "pre-ln-identity", "pre-ln-identity-half", "sas-identity-0", "sas-dense-orthogonal"),
    losses("preln-identity", "Identity values and projections"),
)
def _preln_identity(scale: Scale) -> list[Claim]:
    return [
        beats("pre-ln", "pre-ln-identity", "identity V and P slightly hurt"),
        beats("pre-ln", "pre-ln-identity-half", "β_SA < 1 does not change the finding"),
        beats("sas-identity-0", "sas-dense-orthogonal", "without the skip identity V and P help"),
    ]


FIRST_VALUE = {"sas": "sas-identity-0", "sas-p": "sas-p-identity-first"}


@experiment(
    "first-value",
    "The first layer's W^V",
    "A trainable W^V in the first layer gives SAS and SAS-P a very small gain.",
    decoders(*FIRST_VALUE, *FIRST_VALUE.values()),
    losses("first-value", "Trainable or identity W^V in the first layer"),
)
def _first_value(scale: Scale) -> list[Claim]:
    paper = "a very small boost"
    gain = [beats(block, without, paper) for block, without in FIRST_VALUE.items()]
    small = [
        compare(f"the gain of {block} is small: at most {MATCH:.0%}", paper, block, without, above=-MATCH, below=MATCH)
        for block, without in FIRST_VALUE.items()
    ]
    return [*gain, *small]


@experiment(
    "mlp-skipless",
    "SAS without the MLP's skip",
    "Without the MLP's skip SAS trains much slower and needs a tenth of the learning rate; linearising ReLU (leaky, "
    "slope 0.2 or 0.8) does not help.",
    decoders("sas", "sas-no-mlp-skip", "sas-no-mlp-skip-0.2", "sas-no-mlp-skip-0.8"),
    losses("mlp-skipless", "Without the MLP's skip"),
)
def _mlp_skipless(scale: Scale) -> list[Claim]:
    variants = ("sas-no-mlp-skip", "sas-no-mlp-skip-0.2", "sas-no-mlp-skip-0.8")
    slower = [clearly_behind(variant, "sas", "trains significantly slower", MUCH) for variant in variants]
    paper = "linearising hurts rather than helps"
    return [*slower, *(compare(f"{v} ends no lower than ReLU", paper, v, variants[0], above=0) for v in variants[1:])]


# ------------------------------------------------------------------------------- books


def _books_plots(scale: Scale, evidence: Evidence) -> list[Plot]:
    title = "Perplexity on books"
    per_token = loss_plot(
        evidence, "languini", title, "minutes", measure="valid_perplexity", label="held-out perplexity per token"
    )
    found = {block: evidence.finished(block).values() for block in evidence.histories}
    per_byte = {block: [one.perplexity_per_byte for one in histories] for block, histories in found.items()}
    return [per_token, bar_plot("languini-bytes", title, "held-out perplexity per byte", per_byte)]


def perplexity(history: History) -> float:
    """Held-out perplexity per token."""
    return history.perplexity


def perplexity_per_byte(history: History) -> float:
    """Held-out perplexity per byte."""
    return history.perplexity_per_byte


@experiment(
    "languini",
    "Language modelling on books",
    "SAS and SAS-P match Pre-LN and Parallel in run time at 512 tokens with ALiBi; after 19K steps SAS has a "
    "perplexity of 22.37, Parallel 22.39, with 15% fewer parameters.",
    lambda scale: {block: scale.run("books", block) for block in ("pre-ln", "parallel", "sas", "sas-p")},
    _books_plots,
)
def _languini(scale: Scale) -> list[Claim]:
    time = "matches the default blocks in run time"
    return [
        compare(
            "sas has parallel's perplexity per token, or a lower one",
            "22.37 against 22.39",
            "sas",
            "parallel",
            measure=perplexity,
            below=MUCH,
        ),
        compare(
            "sas has parallel's perplexity per byte, or a lower one",
            "22.37 against 22.39 per token, with one tokeniser",
            "sas",
            "parallel",
            measure=perplexity_per_byte,
            below=MATCH,
        ),
        *(
            at_equal_time(f"{block} matches or beats pre-ln in run time", time, block, "pre-ln", below=MATCH)
            for block in ("sas", "sas-p")
        ),
    ]
