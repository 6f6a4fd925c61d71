"""Blocks of one's choice beside a reference: the runs, what they cost, and a verdict on each.

Runs are those that `reproduce` trains, found by their configuration. A block whose learning rate was tuned, by a sweep
whose file is given or in the rates that ship with the recipes, has that; every other block has the reference's, and the
page says which.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipless.analysis.costs import FLOAT, count_parameters, flops_per_token, training_memory
from skipless.analysis.drawing import draw, removed
from skipless.analysis.signal_propagation import measure_signal
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.experiments.claims import Claim, TimeClaim, at_equal_time, compare
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import Configs, Experiment
from skipless.experiments.outcome import BETTER, FAILS, HOLDS, Finding, Plot, Series, Verdict
from skipless.experiments.papers.simplifying.bounds import MATCH
from skipless.experiments.report.series import bar_series, loss_plot
from skipless.experiments.report.summary import different_data
from skipless.experiments.run_index import RunIndex, run_key, with_seed
from skipless.experiments.scale import Scale
from skipless.experiments.timings import Timings, training_step
from skipless.nn.cache import pick_mode

HERE = "here"
"""The size at which a comparison times its blocks: its own."""

STEPS = 4
"""Training steps that are timed together."""


@dataclass(frozen=True)
class Comparison:
    """Blocks, the first of which is the reference, at a scale."""

    blocks: tuple[str, ...]
    scale: Scale
    kind: str = "decoder"

    def __post_init__(self) -> None:
        if len(set(self.blocks)) < 2:
            raise UserError("a comparison needs two blocks at least, the reference first: pre-ln sas-p")

    @property
    def reference(self) -> str:
        """What the others are judged against."""
        return self.blocks[0]

    @property
    def others(self) -> list[str]:
        """Those that are judged."""
        return [block for block in dict.fromkeys(self.blocks) if block != self.reference]

    def configs(self) -> Configs:
        """The run of each block; a seed is added by whoever trains them."""
        return {block: self.scale.run_like(self.kind, block, self.reference) for block in dict.fromkeys(self.blocks)}

    def rates(self) -> dict[str, str]:
        """The learning rate of each block, and where it comes from."""
        if "train.lr" in self.scale.changes:
            return dict.fromkeys(dict.fromkeys(self.blocks), f"{self.scale.changes['train.lr']:g} (as given)")
        return {
            block: f"{cfg.train.lr:g} ({self.scale.rate_of(self.kind, block) or 'the reference’s'})"
            for block, cfg in self.configs().items()
        }

    def experiment(self) -> Experiment:
        """What `reproduce` can train."""
        return Experiment(
            "compare",
            f"{', '.join(self.others)} beside {self.reference}",
            self.paper(),
            lambda scale: self.configs(),
            lambda scale: self.claims(),
            lambda scale, evidence: self.plots(evidence),
            own=True,
        )

    def paper(self) -> str:
        """How it was done, in a sentence."""
        rates = "; ".join(f"{block} {rate}" for block, rate in self.rates().items())
        return f"Learning rates: {rates}. Everything else is the same for all, the order of the data included."

    # ------------------------------------------------------------------------------- claims

    def claims(self) -> list[Claim]:
        """Each block against the reference: per step, at equal run time, and by the time of a token."""
        return [claim for block in self.others for claim in self._claims(block)]

    def _claims(self, block: str) -> list[Claim]:
        ref, bound = self.reference, f"at most {MATCH:.0%} apart"
        per_step = f"{block} matches {ref} per step"
        per_time = f"{block} matches or beats {ref} at equal run time"
        return [
            compare(per_step, bound, block, ref, above=-MATCH, below=MATCH, better="low", own=True),
            replace(at_equal_time(per_time, f"at most {MATCH:.0%} above", block, ref, below=MATCH), own=True),
            TimeClaim(
                f"{block} takes less time for a training token than {ref}",
                "by the clock, in turns in one process",
                (block, ref),
                lambda seed: float("nan"),
                below=0,
                seed="round",
                size=HERE,
                own=True,
            ),
        ]

    def trained(self, evidence: Evidence) -> Configs:
        """The configurations with the vocabulary that the tokeniser really has, so that all compare."""
        sizes = [one.config.model.vocab_size for of in evidence.histories.values() for one in of.values()]
        return {
            block: cfg.override({"model.vocab_size": sizes[0] if sizes else cfg.data.vocab_size})
            for block, cfg in self.configs().items()
        }

    # -------------------------------------------------------------------------------- plots

    def plots(self, evidence: Evidence) -> list[Plot]:
        """Losses, costs, the signal at initialisation, outliers."""
        configs = self.trained(evidence)
        train = {"measure": "loss", "label": "training loss (nats per token)"}
        return [
            loss_plot(evidence, "loss", "Held-out loss"),
            loss_plot(evidence, "train-loss", "Training loss", **train),
            *cost_plots(configs, evidence.timings),
            *signal_plots(configs),
            *outlier_plots(evidence),
        ]

    # ------------------------------------------------------------------------------ judging

    def judge(self, index: RunIndex, seeds: int, timings: Timings, command: str) -> Finding:
        """What the runs that are there say."""
        histories: dict[str, dict[int, History]] = {}
        for block, cfg in self.configs().items():
            time = timings.seconds.get(HERE, {}).get(block)
            for seed in range(seeds):
                run = index.find(with_seed(cfg, seed))
                if run.exists:
                    one = replace(History.read(run), token_time=statistics.median(time) if time else None)
                    histories.setdefault(block, {})[seed] = one
        evidence, about = Evidence(histories, timings), self.experiment()
        verdicts = tuple(claim.judge(evidence) for claim in self.claims())
        return Finding(
            id=about.id,
            title=about.title,
            paper=about.paper,
            scale=self.scale.name,
            seeds=tuple(sorted({seed for block in histories for seed in evidence.finished(block)})),
            command=command,
            verdicts=verdicts,
            plots=tuple(plot for plot in self.plots(evidence) if plot.series),
            runs=evidence.runs(),
            note=self.note(),
            answer=self.answer(verdicts, self.trained(evidence)),
            own=True,
            warnings=different_data(evidence.runs()),
        )

    def note(self) -> str:
        """What each block does without."""
        found = {block: removed(cfg.model.block) for block, cfg in self.configs().items()}
        return " ".join(f"{block} does without {', '.join(parts)}." for block, parts in found.items() if parts)

    def drawings(self) -> dict[str, str]:
        """Each block as a flow drawing."""
        return {block: draw(cfg.model.block) for block, cfg in self.configs().items()}

    def answer(self, verdicts: Sequence[Verdict], configs: Configs) -> str:
        """The verdict on each block in a sentence."""
        sizes = {block: sum(count_parameters(cfg.model).values()) for block, cfg in configs.items()}
        per_step = [verdict for verdict in verdicts if verdict.claim.endswith("per step")]
        sentences = [
            self._sentence(block, verdict, sizes[block] / sizes[self.reference] - 1)
            for block, verdict in zip(self.others, per_step, strict=True)
        ]
        return " ".join(sentences)

    def _sentence(self, block: str, verdict: Verdict, more: float) -> str:
        size = (
            "as many parameters"
            if abs(more) < 5e-4
            else f"{abs(more):.1%} {'more' if more > 0 else 'fewer'} parameters"
        )
        if "mean" not in verdict.numbers:
            return f"{block}: no verdict yet, for {verdict.reason}."
        mean, low, high = (verdict.numbers[name] for name in ("mean", "low", "high"))
        found = {HOLDS: "matches", BETTER: "is better than", FAILS: "is behind"}.get(verdict.outcome)
        seeds = int(verdict.numbers["seeds"])
        apart = f"{mean:+.1%} in held-out loss [{low:+.1%}, {high:+.1%}], {seeds} seed{'s' * (seeds > 1)}"
        unclear = f"whether {block} matches {self.reference} cannot be said yet"
        said = f"{block} {found} {self.reference}" if found else unclear[0].upper() + unclear[1:]
        return f"{said} ({apart}) with {size}."


# ------------------------------------------------------------------------------------- costs


def cache_bytes(cfg: RunConfig) -> int:
    """Bytes of the smallest exact cache for one token of one sequence, in float32."""
    try:
        pick_mode(cfg.model, "x")
    except UserError:
        return 2 * cfg.model.d_model * cfg.model.n_layer * FLOAT
    return cfg.model.d_model * cfg.model.n_layer * FLOAT


def costs(cfg: RunConfig) -> dict[str, float]:
    """What a block costs at the size of its run."""
    rows, length = cfg.train.micro_rows, cfg.data.seq_len
    found: dict[str, float] = {
        "parameters": sum(count_parameters(cfg.model).values()),
        "training_flops": flops_per_token(cfg.model, length, head_share=cfg.predicted_share)["training"],
        "training_memory": training_memory(cfg.model, rows, causal=cfg.task == "causal", length=length)["total"],
    }
    return found | ({"cache": cache_bytes(cfg)} if cfg.task == "causal" else {})


TITLES = {
    "parameters": ("Parameters", "parameters", 1.0),
    "training_memory": ("Memory of a training step", "MB (float32, AdamW)", 1e6),
    "cache": ("Cache of decoding", "kB for a token, the smallest exact one", 1e3),
    "training_flops": ("Products of training", "MFLOP for a token", 1e6),
}


def cost_plots(configs: Mapping[str, RunConfig], timings: Timings) -> list[Plot]:
    """A bar for each block: parameters, memory, cache, products, and the time of a token by the clock."""
    found = {block: costs(cfg) for block, cfg in configs.items()}
    plots = [
        _bars(key, title, label, {block: [one[key] / unit] for block, one in found.items() if key in one})
        for key, (title, label, unit) in TITLES.items()
    ]
    times = timings.seconds.get(HERE, {})
    micro = {block: [1e6 * value for value in times[block]] for block in configs if block in times}
    return [*plots, _bars("token-time", "Time of a training token", "µs, measured here", micro)]


def _bars(key: str, title: str, label: str, bars: Mapping[str, Sequence[float]]) -> Plot:
    series = (replace(bar_series(block, "block", {block: values})) for block, values in bars.items())
    return Plot(key, title, label, {"block": ""}, tuple(one for one in series if one.y), kind="bars")


def signal_plots(configs: Mapping[str, RunConfig]) -> list[Plot]:
    """The signal at initialisation over the layers."""
    found = {
        block: measure_signal(cfg.model, causal=cfg.task == "causal", seed=cfg.train.seed)
        for block, cfg in configs.items()
    }
    kinds = {
        "cosine": ("Similarity of tokens at initialisation", "mean cosine; 1 is rank collapse", False),
        "gradient": ("Gradients at initialisation", "size against the last layer", True),
    }
    plots = []
    for key, (title, label, log) in kinds.items():
        series = tuple(
            Series(block, {"layer": tuple(one.layer for one in layers)}, tuple(getattr(one, key) for one in layers))
            for block, layers in found.items()
        )
        plots.append(Plot(f"signal-{key}", title, label, {"layer": "layer"}, series, log_y=log))
    return plots


def outlier_plots(evidence: Evidence) -> list[Plot]:
    """How heavy the tails of activations are, over training and over the layers at its end."""
    over_time, over_layers = [], []
    for block in evidence.histories:
        rows = [_kurtosis(one) for one in evidence.finished(block).values()]
        rows = [row for row in rows if row]
        if not rows:
            continue
        steps = sorted(set.intersection(*(set(row) for row in rows)))
        means = [[statistics.fmean(row[step]) for row in rows] for step in steps]
        over_time.append(_over(block, "steps", steps, means))
        last = [row[steps[-1]] for row in rows]
        over_layers.append(_over(block, "layer", range(1, len(last[0]) + 1), list(zip(*last, strict=True))))
    label = "kurtosis; 3 for a Gaussian"
    return [
        Plot("outliers", "Outliers over training, mean of the layers", label, {"steps": "steps"}, tuple(over_time)),
        Plot("outliers-layers", "Outliers at the end", label, {"layer": "layer"}, tuple(over_layers)),
    ]


def _over(name: str, axis: str, places: Sequence[int], values: Sequence[Sequence[float]]) -> Series:
    sd = tuple(statistics.stdev(row) for row in values) if values and len(values[0]) > 1 else None
    return Series(name, {axis: tuple(map(float, places))}, tuple(map(statistics.fmean, values)), sd)


def _kurtosis(history: History) -> dict[int, list[float]]:
    return {
        record["step"]: record["health"]["kurtosis"]
        for record in history.having("health")
        if isinstance(record["health"].get("kurtosis"), list) and None not in record["health"]["kurtosis"]
    }


# -------------------------------------------------------------------------------------- time


def time_tokens(comparison: Comparison, rounds: int, device: str = "auto") -> dict[str, Any]:
    """The time of a training token of each block, in turns in this process; what is written to `token-time.json`."""
    from skipless.distributed.devices import pick_device
    from skipless.storage.provenance import machine, versions
    from skipless.tasks.bench import interleave

    place, configs = pick_device(device), comparison.configs()
    steps = {block: training_step(cfg, place) for block, cfg in configs.items()}
    cases = {block: partial(_repeat, step) for block, (step, _) in steps.items()}
    found = interleave(cases, rounds, place)
    seconds = {block: [value / STEPS / steps[block][1] for value in values] for block, values in found.items()}
    return {"seconds": {HERE: seconds}, "keys": keys(configs), "machine": machine(), "versions": versions()}


def _repeat(step: Any) -> None:
    for _ in range(STEPS):
        step()


def keys(configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """What tells whether times that were measured before are of these blocks."""
    return {block: run_key(cfg) for block, cfg in configs.items()}
