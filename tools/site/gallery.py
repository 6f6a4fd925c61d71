"""The gallery: a page for each block, made from its configuration and from what was measured."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from skipless.analysis.costs import count_parameters, flops_per_token, training_memory
from skipless.analysis.drawing import removed
from skipless.analysis.picture import block_picture
from skipless.analysis.signal_propagation import Layer, measure_signal
from skipless.analysis.units import number
from skipless.config.base import differences
from skipless.config.block import BLOCKS, BlockConfig, parse_block
from skipless.config.model import ModelConfig
from skipless.experiments.outcome import Plot, Series
from skipless.experiments.report.draw import draw
from skipless.experiments.report.verdicts import LOOKS, Row
from skipless.nn.cache import pick_mode
from skipless.recipes import recipe
from tools.site import speeds
from tools.site.equation import equation
from tools.site.findings import NOT_YET, is_judged, said_of
from tools.site.markdown import cell, table, themed

ABOUT = {
    "pre-ln": "The standard block since GPT-2: a norm before each sub-block, a skip around it.",
    "post-ln": "The block of the first transformer: the norm comes after the sum.",
    "parallel": "Attention and MLP side by side, as in GPT-J and PaLM: one norm, one skip.",
    "v-skipinit": "Attention without its skip, made trainable by moving the skip inside (He et al., 2023). The paper's "
    "starting point: it trains, and it trains slower than `pre-ln`.",
    "sas": "The Simplified Attention Sub-block: Shaped Attention without a skip, W^V or W^P. The MLP keeps its skip.",
    "sas-p": "The paper's simplest block with a norm: `sas` with attention and MLP side by side, which makes the last "
    "skip unnecessary.",
    "sas-p-nonorm": "`sas-p` without its norm. The norms after the embedding and after the last block stay.",
}
"""What each block is, in a sentence or two."""

COLLAPSING = "pre-ln:alpha_sa=0"
DEPTH = 36
"""Layers in which the signal is measured."""

SIGNALS = {
    "cosine": ("Similarity of tokens (1 is rank collapse)", "mean cosine similarity", False),
    "activation": ("Size of activations", "root mean square", True),
    "gradient": ("Size of gradients, against the last layer", "root mean square, relative", True),
}


def write(folder: Path) -> None:
    """Write the pages and their pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if set(ABOUT) != set(BLOCKS):
        raise ValueError(f"the gallery tells of {sorted(ABOUT)}, and the blocks are {sorted(BLOCKS)}")
    for name, block in BLOCKS.items():
        for dark in (False, True):
            path = folder / f"{name}-{'dark' if dark else 'light'}.svg"
            path.write_text(block_picture({name: block}, dark=dark, named=False), encoding="utf-8")
        _draw_signal(name, folder)
        (folder / f"{name}.md").write_text(block_page(name), encoding="utf-8")
    (folder / "index.md").write_text(overview(), encoding="utf-8")


def overview() -> str:
    """All blocks side by side."""
    head = "# The blocks\n\nTwo equations with different parts plugged in ([line by line](../equations.md)).\n"
    cards = []
    for name in BLOCKS:
        picture = themed(f"The block {name}", name, "svg").replace("\n", "\n    ").rstrip()
        cards.append(f"-   **[`{name}`]({name}.md)**\n\n    {picture}\n\n    {ABOUT[name]}\n")
    rows = [
        [f"[`{name}`]({name}.md)", ", ".join(removed(block)) or "nothing", *_short_costs(name)]
        for name, block in BLOCKS.items()
    ]
    columns = ["block", "leaves out", "parameters", "training speed"]
    note = (
        "\nParameters at the paper's size (18 layers of width 768, a vocabulary of 50,000). Training speed is that "
        "of two blocks of width 768 on two cores, against `pre-ln` ([how it was measured](../notes/performance.md)).\n"
    )
    grid = '<div class="grid cards blocks" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"
    return "\n".join([head, grid, table(columns, rows), note])


def _short_costs(name: str) -> list[str]:
    mine, standard = (sum(count_parameters(paper_size(block)).values()) for block in (name, "pre-ln"))
    share = f" ({mine / standard - 1:+.1%})".replace("-", "−") if name != "pre-ln" else ""
    found = speeds.of_block(name)
    return [f"{number(mine)}{share}", "1" if name == "pre-ln" else found.text if found else "not measured"]


def paper_size(block: str) -> ModelConfig:
    """The paper's decoder with a block."""
    return recipe("codeparrot", block).model


# --------------------------------------------------------------------------------- a page


def block_page(name: str) -> str:
    """Drawing, equation, configuration, cost, signal, verdicts, use."""
    block = BLOCKS[name]
    gone = ", ".join(removed(block))
    parts = [
        f"# {name}\n\n{ABOUT[name]}\n",
        f"**Left out:** {gone}.\n" if gone else "",
        themed(f"The block {name}", name, "svg"),
        f"## Equation\n\n{equation(block)}\n\n[The same line by line](../equations.md), beside the code.\n",
        _use(name),
        _configuration(name, block),
        f"## Cost\n\n{_costs(name)}",
        _signal_section(name),
        _verdicts(name),
    ]
    return "\n".join(part for part in parts if part)


def use(name: str) -> str:
    """Five lines that train a block once."""
    return (
        "import torch\nimport skipless\n\n"
        f'cfg = skipless.ModelConfig(block="{name}", n_layer=4, d_model=64, n_head=4, vocab_size=256, max_seq_len=64)\n'
        "model = skipless.CausalLM(cfg)\n"
        "ids = torch.randint(256, (8, 65))\n"
        "model.loss(ids[:, :-1], ids[:, 1:]).backward()\n"
    )


def _use(name: str) -> str:
    command = f"skipless train --block {name} --name {name}\nskipless inspect {name} --plot signal.png"
    return f"## Use\n\n```python\n{use(name)}```\n\n```sh\n{command}\n```\n"


def _configuration(name: str, block: BlockConfig) -> str:
    text = "## Configuration\n\n"
    if name != "pre-ln":
        rows = [[f"`{key}`", _value(old), _value(new)] for key, (old, new) in _changes(block).items()]
        text += f"What differs from `pre-ln`:\n\n{table(['key', '`pre-ln`', f'`{name}`'], rows)}\n"
    whole = yaml.safe_dump(block.model_dump(), sort_keys=False, allow_unicode=True)
    inside = "".join(f"    {line}\n" for line in f"```yaml\n{whole}```".splitlines())
    return f'{text}??? note "All keys"\n\n{inside}\n[What each of them means](../configuration.md#blockconfig).\n'


def _changes(block: BlockConfig) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ from the standard block's, whole parts as one."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in differences(BLOCKS["pre-ln"], block):
        top = key.split(".")[0]
        found[top] = getattr(BLOCKS["pre-ln"], top), getattr(block, top)
    return found


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if hasattr(value, "init") and hasattr(value, "trainable"):
        return (
            f"{value.init if value.init == 'depth' else f'{value.init:g}'}, {'trained' if value.trainable else 'fixed'}"
        )
    if hasattr(value, "kind"):
        return f"`{value.kind}`" + (f", {value.init}" if value.init != "normal" else "")
    return f"`{value}`"


def _costs(name: str) -> str:
    """A table against the standard block."""
    names = ["pre-ln", name] if name != "pre-ln" else [name]
    sizes = [paper_size(one) for one in names]
    rows = [
        ["parameters", *(number(sum(count_parameters(size).values())) for size in sizes)],
        ["operations for a token, forward", *(number(flops_per_token(size)["forward"]) for size in sizes)],
        ["memory to train 8 sequences", *(f"{training_memory(size, 8)['total'] / 1e9:.2f} GB" for size in sizes)],
        ["smallest exact cache, a token", *(f"{_cache_bytes(size) / 1e3:.1f} kB" for size in sizes)],
    ]
    found = speeds.of_block(name)
    if name != "pre-ln":
        rows.append(["training speed", "1", found.text if found else "not measured"])
    text = table(["", *(f"`{one}`" for one in names)], rows)
    return text + (
        "\nAt the paper's size: 18 layers of width 768, 12 heads, a vocabulary of 50,000, 128 tokens, float32. "
        "Everything but the speed follows from the configuration. The speed was measured: forward and backward of "
        "two blocks on two cores, in the runs of [`benchmarks/speed.py`](../notes/performance.md).\n"
    )


def _cache_bytes(cfg: ModelConfig) -> int:
    """Of a token in all layers, in float32."""
    half = cfg.block.value.kind == "identity" and pick_mode(cfg, "x") == "x"
    return 4 * (1 if half else 2) * cfg.d_model * cfg.n_layer


# --------------------------------------------------------------------------------- signal


@cache
def _signal(spec: str) -> tuple[Layer, ...]:
    cfg = ModelConfig(block=parse_block(spec), n_layer=DEPTH, d_model=128, n_head=4, vocab_size=256, max_seq_len=64)
    return tuple(measure_signal(cfg))


def _draw_signal(name: str, folder: Path) -> None:
    shown = dict.fromkeys([name, "pre-ln", COLLAPSING])
    names = {COLLAPSING: "pre-ln, its attention skip removed"}
    for key, (title, label, log) in SIGNALS.items():
        series = [
            Series(
                names.get(spec, spec),
                {"layer": tuple(float(one.layer) for one in _signal(spec))},
                tuple(getattr(one, key) for one in _signal(spec)),
                group=names.get(spec, spec),
            )
            for spec in shown
        ]
        plot = Plot(f"{name}-{key}", title, label, {"layer": "layer"}, tuple(series), log_y=log)
        for dark in (False, True):
            path = folder / f"{name}-{key}-{'dark' if dark else 'light'}.svg"
            draw(plot, path, ["layer"], dark=dark)


def _signal_section(name: str) -> str:
    pictures = "\n".join(themed(title, f"{name}-{key}", "svg") for key, (title, _, _) in SIGNALS.items())
    return (
        "## Signal at initialisation\n\n"
        f"One forward and one backward pass of {DEPTH} layers of width 128 on random tokens, "
        f'before any training.\n\n<div class="plots" markdown>\n\n{pictures}\n</div>\n\n```sh\n'
        f"skipless inspect {' '.join(dict.fromkeys([name, 'pre-ln', COLLAPSING]))} -L {DEPTH} -d 128 -H 4 "
        "--set vocab_size=256 --set max_seq_len=64 --plot signal.png\n```\n"
    )


# ------------------------------------------------------------------------------- verdicts


def _verdicts(name: str) -> str:
    said = said_of(name)
    if not said:
        return "## What came out\n\nNo experiment makes a claim about this block.\n"
    rows = []
    for one in said:
        row = Row(one.verdict, one.experiment.own or one.verdict.own)
        judged = is_judged(one.verdict)
        outcome = f"{LOOKS[one.verdict.outcome]['sign']} {one.verdict.outcome}" if judged else NOT_YET
        measured = f"{row.measured} {row.interval}{' assumed' if row.assumed else ''}" if judged else "–"
        link = f"[`{one.experiment.id}`](../results/{one.experiment.id}.md)"
        rows.append([link, cell(one.verdict.claim), outcome, cell(measured), row.seeds or "–"])
    head = "## What came out\n\nClaims about this block, at laptop scale ([how they are judged](../experiments.md)):\n"
    return f"{head}\n{table(['experiment', 'claim', 'verdict', 'measured', 'seeds'], rows)}"
