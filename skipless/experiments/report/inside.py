"""What is inside trained models, for the page: outliers over training, gains over depth, mixing matrices of a text."""

import base64
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence

from skipless.analysis.attention_maps import attention_maps
from skipless.analysis.attention_plot import plot_maps
from skipless.errors import UserError
from skipless.experiments.outcome import Picture, Plot, Series
from skipless.experiments.report.axes import GAINS
from skipless.runs import Run, load


def outliers_of(run: Run) -> dict[int, list[float]]:
    """Step → kurtosis of each layer, as it was recorded in training."""
    healthy = {record["step"]: record["health"].get("kurtosis") for record in run.metrics() if record.get("health")}
    return {step: values for step, values in healthy.items() if isinstance(values, list) and values and all(values)}


def inside_plots(run: Run, number: int) -> Iterator[Plot]:
    """Kurtosis of each layer over training, and every gain over depth at the end."""
    outliers = outliers_of(run)
    layers = range(len(next(iter(outliers.values()), [])))
    series = tuple(
        Series(
            f"layer {layer + 1}",
            {"steps": tuple(map(float, outliers))},
            tuple(values[layer] for values in outliers.values()),
        )
        for layer in layers
    )
    label = "kurtosis; 3 for a Gaussian"
    yield Plot(f"outliers-{number}", f"Outliers of each layer, {run.name}", label, {"steps": "training steps"}, series)
    last = next((record["gains"] for record in reversed(list(run.metrics())) if record.get("gains")), {})
    yield Plot(
        f"depth-{number}",
        f"Gains over depth, {run.name}",
        "gain at the end",
        {"layer": "layer"},
        tuple(_gains_over_depth(last)),
    )


def _gains_over_depth(gains: Mapping[str, float | list[float]]) -> Iterator[Series]:
    """A line for each gain: mean and standard deviation over heads of each layer."""
    found: dict[str, dict[int, list[float]]] = {}
    for path, value in gains.items():
        pieces = path.split(".")
        values = value if isinstance(value, list) else [value]
        if pieces[0] == "blocks" and None not in values:
            found.setdefault(".".join(pieces[2:]), {})[int(pieces[1]) + 1] = values
    for name, layers in found.items():
        y = tuple(statistics.fmean(values) for values in layers.values())
        several = any(len(values) > 1 for values in layers.values())
        sd = tuple(statistics.pstdev(values) for values in layers.values()) if several else None
        yield Series(GAINS.get(name, name), {"layer": tuple(map(float, layers))}, y, sd)


def pictures(runs: Sequence[Run], text: str) -> list[Picture]:
    """The mixing matrices of each run for a text."""
    found = []
    for run in runs:
        try:
            maps = attention_maps(load(run.folder), text)
        except UserError as error:
            raise UserError(f"run {run.name!r}: {error}") from None
        file = io.BytesIO()
        plot_maps(maps, outliers_of(run), file)
        address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        found.append(Picture(f"Mixing matrices of {run.name} for {text!r}", address))
    return found
