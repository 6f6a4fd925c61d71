"""The figures and tables of the README, written from the files that they come from.

`python -m tools.site readme` takes every run that the archive has by then, names them in docs/figures/readme.json, and
writes what stands between the marks of the README. A test does the same from the named runs and compares.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from skipless.analysis.costs import count_parameters
from skipless.analysis.drawing import removed
from skipless.analysis.picture import block_picture
from skipless.analysis.units import number
from skipless.config.block import BLOCKS
from skipless.config.model import ModelConfig
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.claims import interval, relative
from skipless.experiments.evidence import Evidence
from skipless.experiments.outcome import Plot
from skipless.experiments.report.draw import draw, to_csv
from skipless.experiments.report.series import loss_plot
from tools.site import DOCS, ROOT, speeds
from tools.site.findings import LAPTOP, decoders
from tools.site.gallery import paper_size
from tools.site.markdown import table

README = ROOT / "README.md"
FIGURES = DOCS / "figures"
FACTS = FIGURES / "readme.json"
DEMO = FIGURES / "demo.json"
SHOWN = ("pre-ln", "sas-p")
CAPTIONS = {"pre-ln": "the standard block", "sas-p": "the simplified block"}


def write() -> None:
    """Figures, facts and the parts of the README, from what there is now."""
    FIGURES.mkdir(exist_ok=True)
    names = sorted(run.name for run in decoders().runs())
    FACTS.write_text(json.dumps({"runs": names}, indent=2) + "\n", encoding="utf-8")
    for dark in (False, True):
        look = "dark" if dark else "light"
        (FIGURES / f"blocks-{look}.svg").write_text(picture(dark=dark), encoding="utf-8")
        draw(losses(evidence()), FIGURES / f"losses-{look}.svg", ["steps"], dark=dark)
    (FIGURES / "losses.csv").write_text(to_csv(losses(evidence())), encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")


def picture(*, dark: bool) -> str:
    """The standard block and the simplified one."""
    return block_picture({name: BLOCKS[name] for name in SHOWN}, dark=dark, captions=CAPTIONS)


def filled(text: str) -> str:
    """The README with what stands between its marks written anew."""
    found = evidence()
    for name, part in {
        "losses": caption(found),
        "blocks": blocks(found),
        "speed": speed_table(),
        "demo": demo(),
    }.items():
        start, end = f"<!-- {name}: written by `make readme` -->\n", f"<!-- end of {name} -->\n"
        before, mark, rest = text.partition(start)
        if not mark or end not in rest:
            raise ValueError(f"the README has no place for {name}: {start.strip()} … {end.strip()}")
        text = before + start + part + end + rest.partition(end)[2]
    return text


def evidence() -> Evidence:
    """The runs that the README is about, by name."""
    named = set(json.loads(FACTS.read_text(encoding="utf-8"))["runs"])
    found = decoders()
    kept = {
        label: {seed: one for seed, one in histories.items() if one.run is not None and one.run.name in named}
        for label, histories in found.histories.items()
    }
    if missing := named - {one.run.name for of in kept.values() for one in of.values() if one.run}:
        raise ValueError(f"docs/figures/readme.json names runs that the archive does not have: {sorted(missing)}")
    return Evidence({label: of for label, of in kept.items() if of}, found.timings)


# ---------------------------------------------------------------------------------- parts


def losses(found: Evidence) -> Plot:
    """Held-out losses of the standard block and the simplified one."""
    return loss_plot(found, "losses", "Held-out loss on Python code", "steps", labels=SHOWN)


def caption(found: Evidence) -> str:
    """The sentence of truth under the figure."""
    rows = found.by_seed(SHOWN)
    model, train = (getattr(found.histories["pre-ln"][min(rows)].config, part) for part in ("model", "train"))
    ends = {name: statistics.fmean(row[name].valid_loss for row in rows.values()) for name in SHOWN}
    more = ends["sas-p"] / ends["pre-ln"] - 1
    seeds = "one seed" if len(rows) == 1 else f"the mean of {len(rows)} seeds"
    return (
        f"*Decoders of {model.n_layer} layers and width {model.d_model}, {train.steps:,} steps, each block at its own best "
        f"learning rate, {seeds}. At the end `pre-ln` has a loss of {ends['pre-ln']:.3f} and `sas-p` one of "
        f"{ends['sas-p']:.3f}: {abs(more):.1%} {'more' if more > 0 else 'less'}, with "
        f"{-_share('sas-p', model):.0%} fewer parameters. This is a small model; what happens at the paper's size was not "
        "tried here.*\n"
    )


def _share(block: str, like: ModelConfig) -> float:
    """How many more parameters a model has with a block than with the standard one."""
    sizes = [like.override({"block": BLOCKS[name].model_dump()}) for name in (block, "pre-ln")]
    mine, standard = (sum(count_parameters(size).values()) for size in sizes)
    return mine / standard - 1


def blocks(found: Evidence) -> str:
    """What each block leaves out, what it costs, what came out."""
    rows = [
        [f"`{name}`", ", ".join(removed(block)) or "nothing", _parameters(name), _speed(name), _loss(name, found)]
        for name, block in BLOCKS.items()
    ]
    return table(["block", "leaves out", "parameters", "training speed", "loss"], rows)


def _parameters(name: str) -> str:
    size = paper_size("pre-ln")
    if name == "pre-ln":
        return number(sum(count_parameters(size).values()))
    share = _share(name, size)
    return f"{share:+.1%}".replace("-", "−") if abs(share) >= 0.0005 else "the same"


def _speed(name: str) -> str:
    found = speeds.of_block(name)
    return "1" if name == "pre-ln" else f"{found.text} ×" if found else "not measured"


def _loss(name: str, found: Evidence) -> str:
    if name == "pre-ln":
        return f"{statistics.fmean(one.valid_loss for one in found.finished(name).values()):.3f}"
    if name not in EXPERIMENTS["fig5"].configs(LAPTOP):
        return "in no experiment"
    rows = found.by_seed((name, "pre-ln"))
    if not rows:
        return "not trained yet"
    values = [relative(name, "pre-ln")(row) for row in rows.values()]
    mean, low, high = interval(values, 0.0)
    seeds = "1 seed" if len(values) == 1 else f"{low:+.1%} to {high:+.1%}, {len(values)} seeds"
    return f"{mean:+.1%} ({seeds})".replace("-", "−")


def speed_table() -> str:
    """Speed against the alternatives, our own standard block among them."""
    cases = {
        "forward and backward of two blocks: `pre-ln`": ("T=128: pre-ln", "HF GPT-2", ""),
        "the same: `sas`": ("T=128: sas", "HF GPT-2", "pre-ln"),
        "the same: `sas-p`": ("T=128: sas-p", "HF GPT-2", "pre-ln"),
        "the same: `sas-p-nonorm`": ("T=128: sas-p-nonorm", "HF GPT-2", "pre-ln"),
        "training step, 18 layers, 50,000 words: `sas-p`": ("training step: sas-p", "HF GPT-2", ""),
        "its peak memory": ("training step: sas-p, peak memory", "HF GPT-2", ""),
        "`generate`, 128 tokens after 512: `sas-p`": ("decoding: sas-p (kx)", "HF GPT-2 (static)", "pre-ln (kv)"),
    }
    rows = [[title, *(_measured(case, other) for other in others)] for title, (case, *others) in cases.items()]
    return table(["width 768, float32", "times Hugging Face's GPT-2", "times our own `pre-ln`"], rows)


def _measured(case: str, against: str) -> str:
    if not against:
        return "–"
    found = speeds.speed(case, against)
    if found is None:
        raise ValueError(f"{case} against {against} was not measured in every run")
    return found.text


def demo() -> str:
    """The table with which `make demo` ends."""
    rows = json.loads(DEMO.read_text(encoding="utf-8"))["runs"]
    lines = [[f"`{row['name']}`", f"{row['parameters'] / 1e6:.2f}M", f"{row['valid_loss']:.2f}"] for row in rows]
    return table(["run", "parameters", "held-out loss"], lines)


def keep_demo(reported: Path, runs: Iterable[str] = ("demo-pre-ln", "demo-sas-p")) -> None:
    """Keep what `skipless report … --json` said of the demo."""
    content = json.loads(reported.read_text(encoding="utf-8"))
    kept = [{key: row[key] for key in ("name", "parameters", "steps", "valid_loss")} for row in content["runs"]]
    assert [row["name"] for row in kept] == list(runs)
    DEMO.write_text(json.dumps({"runs": kept}, indent=2) + "\n", encoding="utf-8")
