"""Tables and plots for people."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from skipless.config import BLOCKS
from skipless.errors import MissingExtra, UserError
from skipless.inspect import Inspection

if TYPE_CHECKING:
    from skipless.bench import Row
    from skipless.data import Corpus
    from skipless.evaluate import Evaluation
    from skipless.experiments.outcome import Finding
    from skipless.experiments.report import Summary
    from skipless.experiments.sweep import Point
    from skipless.harness import Scores
    from skipless.runs import Run

COLLAPSED = 0.99
"""Mean cosine similarity above which the tokens of a sequence can no longer be told apart."""

PLOT_FORMATS = (".png", ".svg", ".pdf")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which people with any colour vision can tell apart."""

BLOCK_COLOURS = {
    "pre-ln": "#000000",
    "sas": "#0072B2",
    "sas-p": "#D55E00",
    "sas-p-nonorm": "#009E73",
    "v-skipinit": "#CC79A7",
    "parallel": "#56B4E9",
    "post-ln": "#E69F00",
}
"""A block has the same colour wherever it is drawn."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""Eight for seven colours: no pair of the two comes again before the 57th."""


def block_in(name: str) -> str | None:
    """The block that a name begins with, up to a comma: `sas-p, 3 seeds` is of `sas-p`."""
    first = name.split(",", 1)[0].strip().lower()
    return first if first in BLOCKS else None


def group_colours(groups: Iterable[str]) -> dict[str, str]:
    """A colour for each: a block's own, and for what is no block one that none of these blocks has."""
    names = {group: block_in(group) or group for group in groups}
    taken = {BLOCK_COLOURS[name] for name in names.values() if name in BLOCK_COLOURS}
    free = [colour for colour in COLOURS if colour not in taken] or COLOURS
    others = dict.fromkeys(name for name in names.values() if name not in BLOCK_COLOURS)
    colours = {**BLOCK_COLOURS, **{name: free[position % len(free)] for position, name in enumerate(others)}}
    return {group: colours[name] for group, name in names.items()}


def number(value: float, unit: str = "") -> str:
    """`146M`, `3.2G`: three digits and a power of a thousand."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if abs(value) >= 0.9995 * size:  # what rounds up to the next unit belongs to it
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    out = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD)
    for position, name in enumerate(head):
        out.add_column(name, justify="left" if position == 0 else "right", overflow="fold", min_width=len(name))
    for row in rows:
        out.add_row(*row)
    return out


def show_inspections(found: Sequence[Inspection], *, batch_size: int, context: int, plot: Path | None) -> None:
    """Drawings, costs side by side, and the signal layer by layer."""
    console = Console()
    for one in found:
        console.print(one.name, style="bold", highlight=False)
        print(one.drawing)
        print(f" taken out: {', '.join(one.removed)}\n" if one.removed else "")
    console.print(table("Costs", ["", *(one.name for one in found)], _cost_rows(found, batch_size, context)))
    if found[0].signal:
        console.print(_signal_table(found))
        for one in found:
            console.print(_verdict(one), highlight=False)
    if plot:
        console.print(f"plot: {plot}", highlight=False)


def _cost_rows(found: Sequence[Inspection], batch_size: int, context: int) -> list[list[str]]:
    first = found[0].total_parameters
    rows = [["parameters", *(number(one.total_parameters) for one in found)]]
    rows.append(["  against the first", *(f"{one.total_parameters / first - 1:+.1%}" for one in found)])
    parts = list(dict.fromkeys(part for one in found for part in one.parameters))
    rows += [[f"  {part}", *(number(one.parameters.get(part, 0)) for one in found)] for part in parts]
    rows += [
        [f"FLOPs per token, {key}", *(number(one.flops_per_token[key]) for one in found)]
        for key in ("forward", "training")
    ]
    rows.append([f"training memory, batch {batch_size}", *(number(one.training_memory["total"], "B") for one in found)])
    parts = [part for part in found[0].training_memory if part != "total"]
    rows += [[f"  {part}", *(number(one.training_memory[part], "B") for one in found)] for part in parts]
    rows.append([f"decoding memory, {context} tokens", *(number(one.decoding_memory["total"], "B") for one in found)])
    rows.append(["  cache of keys and values", *(number(one.decoding_memory["cache"], "B") for one in found)])
    return rows


def _signal_table(found: Sequence[Inspection]) -> Table:
    depth = max(len(one.signal) for one in found)
    shown = sorted({1, depth, *(1 + round(i * (depth - 1) / 8) for i in range(9))})
    rows = []
    for layer in shown:
        cells = [one.signal[layer - 1] for one in found]
        rows.append([str(layer), *(f"{c.activation:.3g} / {c.cosine:.3f} / {c.gradient:.3g}" for c in cells)])
    title = "Signal at initialisation: size / similarity of tokens / size of gradient against the last layer"
    return table(title, ["layer", *(one.name for one in found)], rows)


def _verdict(one: Inspection) -> str:
    last = one.signal[-1]
    dead = [layer.layer for layer in one.signal if not 0 < layer.weight_gradient < float("inf")]
    if last.cosine != last.cosine:
        return f"{one.name}: a sequence of one token shows no similarity"
    if last.cosine > COLLAPSED:
        return (
            f"{one.name}: rank collapse (tokens of the last layer have a mean cosine similarity of {last.cosine:.4f})"
        )
    if dead:
        return f"{one.name}: no finite gradient in layer {', '.join(map(str, dead))}"
    return f"{one.name}: healthy (similarity {last.cosine:.3f} in the last layer, a gradient in every layer)"


def show_plans(found: Sequence[Inspection], *, batch_size: int, device_memory: int | None) -> None:
    """What each of many devices needs and sends, with the arithmetic, and whether it fits."""
    for one in found:
        for plan in one.plans:
            rows = [*_plan_rows(plan.memory, plan.arithmetic), ["", "", ""]]
            sent = _plan_rows(plan.communication, plan.arithmetic)
            rows += [["sent in a step" if name == "total" else name, size, how] for name, size, how in sent]
            title = f"{one.name}, {plan.kind} on {plan.devices} devices: a batch of {batch_size}, float32, AdamW"
            out = table(title, ["each device", "bytes", "how"], rows)
            out.columns[2].justify = "left"
            Console().print(out)
            if device_memory is not None:
                print(f"{one.name}, {plan.kind}: {_fit(plan.memory['total'], device_memory)}\n")


def _plan_rows(parts: dict[str, int], arithmetic: dict[str, str]) -> list[list[str]]:
    return [
        [name if name == "total" else f"  {name}", number(size, "B"), arithmetic.get(name, "")]
        for name, size in parts.items()
        if size or name == "total"
    ]


def _fit(needed: int, there: int) -> str:
    what = "fits" if needed <= there else "does not fit"
    return f"{what}: {number(needed, 'B')} of {number(there, 'B')} ({needed / there:.0%})"


def show_summaries(summaries: Sequence["Summary"]) -> None:
    """Runs side by side."""
    head = ["run", "params", "steps", "tokens", "train", "valid", "bits", "tok/s", "time"]
    rows = [
        [
            one.name if one.name == one.block else f"{one.name} ({one.block})",  # a column more is too much for 80
            number(one.parameters),
            f"{one.steps:,}",
            number(one.tokens),
            _figure(one.train_loss, 3),
            _figure(one.valid_loss, 4),
            _figure(one.valid_bits_per_byte, 3),
            f"{one.tokens_per_second:,.0f}",
            clock(one.seconds),
        ]
        for one in summaries
    ]
    Console().print(table("Runs: training and held-out loss in nats per token, held-out bits per byte", head, rows))


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def show_glue(name: str, results: dict[str, Any]) -> None:
    """The paper's table 2: the average and each task, mean ± deviation over the seeds."""
    tasks = results["tasks"]
    seeds = max((len(one["seeds"]) for one in tasks.values()), default=0)
    cells = [_with_deviation(results["mean"], results["sd"])]
    cells += [_with_deviation(one["score_mean"], one["score_sd"]) for one in tasks.values()]
    failed = {task: found for task, found in results["failures"].items() if found}
    title = f"GLUE, dev sets: 100 × mean of the official metrics, mean ± sd over {seeds} seed{'s' * (seeds != 1)}"
    head = ["", "GLUE", *tasks, *(f"{task} failed" for task in failed)]
    Console().print(table(title, head, [[name, *cells, *(f"seed {', '.join(found)}" for found in failed.values())]]))
    for task, data in results["data"].items():
        if data["rows"] < data["of"]:
            print(f"{task}: trained on {data['rows']:,} of {data['of']:,} rows, drawn at random once")


def _with_deviation(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def show_samples(runs: Sequence["Run"]) -> None:
    """The last sample of each run."""
    console = Console()
    for run in runs:
        last = (list(run.samples()) or [None])[-1]
        if last:
            console.print(f"{run.name}, step {last['step']}:", style="bold", highlight=False)
            print(last["text"] + "\n")


def show_evaluation(name: str, source: str, result: "Evaluation") -> None:
    """Loss, perplexity, bits per byte."""
    rows = [
        ["loss", f"{result.loss:.4f}"],
        ["perplexity", f"{result.perplexity:,.2f}"],
        ["bits per byte", _figure(result.bits_per_byte, 4)],
        ["sequences", f"{result.sequences:,}"],
        ["predicted tokens", f"{result.tokens:,}"],
    ]
    Console().print(table(f"{name} on {source}", ["", ""], rows))


def show_scores(name: str, scores: "Scores") -> None:
    """Metrics of tasks, with their standard errors."""
    rows = []
    for task, values in scores.items():
        for metric, value in values.items():
            if "_stderr" not in metric:
                error = values.get(f"{metric}_stderr")
                rows.append([task, metric, f"{value:.4f}", "" if error is None else f"± {error:.4f}"])
    Console().print(table(name, ["task", "metric", "value", "standard error"], rows))


def show_corpus(corpus: "Corpus", rows: int = 0) -> None:
    """Counts of a prepared corpus, and a few of its sequences."""
    splits = corpus.info["splits"]
    keys = list(next(iter(splits.values())))
    lines = [[key, *(f"{split[key]:,}" for split in splits.values())] for key in keys]
    Console().print(table(str(corpus.path), ["", *splits], lines))
    for row in corpus.train.batch(0, 0, rows) if rows else []:
        print(f"{'─' * 40}\n{corpus.tokenizer.decode(row.tolist(), keep_special=True)}")


def show_rehearsal(outcome: dict[str, Any]) -> None:
    """What a training would cost."""
    import yaml

    print(yaml.safe_dump(outcome["config"], sort_keys=False, allow_unicode=True))
    rows = [
        ["parameters", number(outcome["parameters"])],
        ["memory, estimated", number(outcome["memory"]["total"], "B")],
        ["tokens in the training set", number(outcome["train_tokens"])],
        ["loss of one step", f"{outcome['loss']:.4f}"],
        ["time of a step", f"{outcome['step_seconds']:.3g} s"],
        ["tokens/s", f"{outcome['tokens_per_second']:,.0f}"],
        ["time of the training", clock(outcome["total_seconds"])],
    ]
    Console().print(table("Dry run: one step, nothing kept", ["", ""], rows))


def show_bench(what: str, rows: Sequence["Row"]) -> None:
    """Times, and how many times faster than each reference."""
    references = list(dict.fromkeys(reference for row in rows for reference in row.speedup))
    lines = []
    for row in rows:
        ratios = [row.speedup.get(reference) for reference in references]
        cells = ["" if r is None else f"{r[0]:.2f} ({r[1]:.2f}–{r[2]:.2f})" for r in ratios]
        share = "" if row.peak_share is None else f"{row.peak_share:.0%}"
        memory = "" if row.peak_bytes is None else number(row.peak_bytes, "B")
        lines.append([row.name, f"{row.milliseconds:,.1f}", share, memory, *cells])
    head = [what, "ms", "of peak", "memory", *(f"× {reference}" for reference in references)]
    kept = [i for i in range(len(head)) if i < 2 or any(line[i] for line in lines)]
    lines = [[line[i] for i in kept] for line in lines]
    title = "Medians; how many times as fast as each reference, with quartiles"
    Console().print(table(title, [head[i] for i in kept], lines))


def show_growth(found: dict[str, Any], *, quiet: bool, plot: Path | None) -> None:
    """Time and memory over the sequence length and the depth."""
    for axis, title in (("length", "one layer"), ("depth", "blocks at 128 tokens")):
        points = zip(found[axis]["x"], found[axis]["seconds"], found[axis]["peak_bytes"], strict=True)
        lines = [[f"{x:,}", f"{1e3 * seconds:,.1f}", number(size, "B")] for x, seconds, size in points]
        if not quiet:
            Console().print(table(f"{found['block']}, {title}, forward and backward", [axis, "ms", "memory"], lines))
            slopes = [found[axis][f"{what}_slope"] for what in ("time", "memory")]
            print(
                "slopes in log-log: " + ", ".join("–" if s is None else f"{s:.2f}" for s in slopes) + " (time, memory)"
            )
    if plot:
        _plot_growth(found, plot)


def _plot_growth(found: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for row, axis in zip(axes, ("length", "depth"), strict=True):
        for place, (key, label, unit) in zip(
            row, (("seconds", "milliseconds", 1e3), ("peak_bytes", "peak memory (MB)", 1e-6)), strict=True
        ):
            fit = found[axis]["time_slope" if key == "seconds" else "memory_slope"]
            name = f"{found['block']}, slope {'–' if fit is None else f'{fit:.2f}'}"
            place.plot(found[axis]["x"], [unit * y for y in found[axis][key]], marker="o", color=COLOURS[0], label=name)
            for scale, ticks in ((place.set_xscale, place.xaxis), (place.set_yscale, place.yaxis)):
                scale("log", base=2)
                ticks.set_major_formatter("{x:,g}")
            place.set(xlabel={"length": "tokens in the sequence", "depth": "layers"}[axis], ylabel=label)
            place.grid(alpha=0.3)
            place.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_bench(what: str, rows: Sequence["Row"], path: Path) -> None:
    """Speed against the first reference, as bars with quartiles."""
    plt = pyplot()
    reference = next(iter(rows[0].speedup))
    ratios = [row.speedup[reference] for row in rows]
    figure, axis = plt.subplots(figsize=(7, 0.5 * len(rows) + 1.5), layout="constrained")
    names = [row.name for row in rows]
    spread = [[max(0.0, r[0] - r[1]) for r in ratios], [max(0.0, r[2] - r[0]) for r in ratios]]
    axis.barh(names, [r[0] for r in ratios], xerr=spread, color=COLOURS[0], ecolor="grey")
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xlabel=f"times as fast as {reference}", title=what)
    axis.invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)


OUTCOME_STYLES = {"holds": "green", "differs (better)": "cyan", "does not hold": "red", "not decidable": "yellow"}


def show_findings(findings: Sequence["Finding"]) -> None:
    """What came out of each, and every claim with its verdict, and why."""
    console = Console()
    for finding in findings:
        seeds = ", ".join(map(str, finding.seeds)) or "none finished"
        console.print(
            f"\n[bold]{finding.id}[/bold]  {finding.title}  ({finding.scale} scale, seeds: {seeds})", highlight=False
        )
        show_warnings(finding.warnings)
        if finding.answer:
            console.print(escape(finding.answer), style="bold", highlight=False)
        console.print(f"{'' if finding.own else 'The paper: '}{escape(finding.paper)}", highlight=False)
        for verdict in finding.verdicts:
            style = OUTCOME_STYLES[verdict.outcome]
            console.print(f"  [{style}]{verdict.outcome:>16}[/{style}]  {verdict.claim}", highlight=False)
            console.print(Padding(escape(verdict.reason), (0, 0, 0, 20)), style="dim", highlight=False)
    pairs = [(finding.own or verdict.own, verdict) for finding in findings for verdict in finding.verdicts]
    for whose, of in (("claims of the paper", False), ("checks of our own", True)):
        counted = Counter[str](verdict.outcome for own, verdict in pairs if own == of)
        if counted:
            counts = ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOME_STYLES)
            console.print(f"\n{counted.total()} {whose}: {counts}", highlight=False)


def show_warnings(warnings: Sequence[str]) -> None:
    """What should be known before anything is compared."""
    for warning in warnings:
        Console().print(f"[bold yellow]warning:[/bold yellow] {escape(warning)}", highlight=False)


def show_left(left: Sequence[str], failed: Mapping[str, str]) -> None:
    """Runs that are not finished, and why."""
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    waiting = [name for name in left if name not in failed]
    if waiting:
        print(f"not finished: {len(waiting)} runs; the same command goes on with them")


def show_experiments(rows: Sequence[Mapping[str, Any]]) -> None:
    """Of each experiment its cost at each scale, what the paper found, and what came out here."""
    console = Console()
    console.print(
        "Runs, and hours:minutes:seconds for one seed if nothing is there yet: laptop on this machine, paper on a GPU "
        "that sustains 30 TFLOP/s. Experiments share runs.",
        highlight=False,
    )
    for row in rows:
        costs = [f"{name} {at['runs']} runs {clock(at['seconds'])}" for name, at in row["scales"].items() if at["runs"]]
        console.print(f"\n[bold]{row['id']}[/bold]  {row['title']}  [dim]({'; '.join(costs)})[/dim]", highlight=False)
        found = row["came_out"]
        lines = {} if row["own"] else {"paper": row["paper"]}
        lines |= {"asks": row["paper"]} if row["own"] else {}
        lines["here"] = _came_out(found) if found else "not run yet"
        for name, text in lines.items():
            console.print(Padding(escape(f"{name}: {text}"), (0, 0, 0, 2)), highlight=False)


def _came_out(found: Mapping[str, Any]) -> str:
    from skipless.experiments.outcome import in_words

    counts = [in_words(found["paper"]), in_words(found["own"]) + " of our own checks" if found["own"] else ""]
    return ". ".join(part.rstrip(".") for part in (found["answer"], "; ".join(filter(None, counts))) if part)


def show_timings(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """The time of a training token of each block at each size: pre-ln's, and the others' against it."""
    blocks = list(next(iter(seconds.values())))
    rows = []
    for size, times in seconds.items():
        medians = {block: statistics.median(times[block]) for block in blocks}
        base = medians[blocks[0]]
        rows.append([size, f"{1e6 * base:.4g}", *(f"{medians[block] / base:.3f}" for block in blocks[1:])])
    title = "Time of a training token, whole steps in turn: µs, and against pre-ln"
    Console().print(table(title, ["size", f"{blocks[0]}, µs", *blocks[1:]], rows))


def show_sweep(points: Sequence["Point"]) -> None:
    """Every point of a sweep, the best of each block marked."""
    keys = list(dict.fromkeys(key for point in points for key in point.values))
    losses: dict[str, float] = {}
    for point in points:
        if point.state == "complete" and point.loss is not None:
            losses[point.block] = min(point.loss, losses.get(point.block, point.loss))
    rows = []
    for point in sorted(points, key=lambda point: point.block):
        best = " ←" if point.state == "complete" and point.loss == losses.get(point.block) else ""
        outcome = _figure(point.loss, 4) + best if point.state == "complete" else point.state
        values = (point.values.get(key) for key in keys)
        rows.append([point.block, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values), outcome])
    Console().print(table("Sweep", ["block", *keys, "held-out loss"], rows))


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ------------------------------------------------------------------------------ plots


def check_plot(path: Path) -> None:
    """Raise before anything is computed where the plot could not be written."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise UserError(f"cannot draw into {str(path)!r}: the ending must be one of {', '.join(PLOT_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot draw into {str(path)!r}: there is no folder {str(path.absolute().parent)!r}")
    pyplot()


def pyplot() -> Any:
    """matplotlib.pyplot without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "drawing a plot") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_signal(found: Sequence[Inspection], path: Path) -> None:
    """Size of the activations, similarity of the tokens and size of the gradients over the layers."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    titles = {
        "activation": "size of activations (RMS)",
        "cosine": "cosine similarity of tokens",
        "gradient": "size of gradients, against the last layer",
    }
    colours = group_colours(one.name for one in found)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for position, one in enumerate(found):
            axis.plot(
                [layer.layer for layer in one.signal],
                [getattr(layer, key) for layer in one.signal],
                color=colours[one.name],
                marker=MARKS[position % len(MARKS)],
                markevery=max(1, len(one.signal) // 9),
                label=one.name,
            )
        axis.set(title=title, xlabel="layer", yscale="linear" if key == "cosine" else "log")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(None, 1.05)
    axes[1].axhline(1, color="grey", linestyle=":", label="rank collapse")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
