"""What `skipless inspect` found."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from skipless.analysis.attention_maps import Maps
from skipless.analysis.inspection import Inspection
from skipless.analysis.units import number
from skipless.terminal.console import Console
from skipless.terminal.tables import show_table
from skipless.terminal.text import say

COLLAPSED = 0.99
"""Mean cosine similarity above which the tokens of a sequence can no longer be told apart."""


def show_inspections(found: Sequence[Inspection], *, batch_size: int, context: int, plot: Path | None) -> None:
    """Drawings, costs side by side, and the signal layer by layer."""
    console = Console()
    for one in found:
        console.print(Text(one.name, "bold"), soft_wrap=True)
        print(one.drawing)
        print(f" taken out: {', '.join(one.removed)}\n" if one.removed else "")
    show_table("Costs", ["", *(one.name for one in found)], _cost_rows(found, batch_size, context))
    if found[0].signal:
        _show_signal(found)
        for one in found:
            say(_verdict(one))
    if plot:
        print(f"plot: {plot}")


def show_maps(maps: Maps) -> None:
    """The gains of each layer, and how its attention is spread; means over heads."""
    names = list(dict.fromkeys(name for layer in maps.layers for name in layer.gains))
    rows = [
        [
            str(layer.layer),
            *(f"{statistics.fmean(layer.gains[name]):.3f}" if name in layer.gains else "–" for name in names),
            f"{statistics.fmean(layer.entropy):.3f}",
            f"{layer.matrix.diagonal(dim1=-2, dim2=-1).mean().item():.3f}",
        ]
        for layer in maps.layers
    ]
    say(f"{len(maps.tokens)} tokens: {' '.join(repr(token) for token in maps.tokens)}")
    show_table(
        "Mixing of each layer, means over heads", ["layer", *names, "entropy of A (nats)", "mean of the diagonal"], rows
    )


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


def _show_signal(found: Sequence[Inspection]) -> None:
    depth = max(len(one.signal) for one in found)
    shown = sorted({1, depth, *(1 + round(i * (depth - 1) / 8) for i in range(9))})
    rows = []
    for layer in shown:
        cells = [one.signal[layer - 1] for one in found]
        rows.append([str(layer), *(f"{c.activation:.3g} / {c.cosine:.3f} / {c.gradient:.3g}" for c in cells)])
    title = "Signal at initialisation: size / similarity of tokens / size of gradient against the last layer"
    show_table(title, ["layer", *(one.name for one in found)], rows)


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
            show_table(title, ["each device", "bytes", "how"], rows, prose=True)
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
