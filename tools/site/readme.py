"""The figures and tables of the README, written from the files that they come from.

`python -m tools.site readme` takes every run that the archive has by then, names them in docs/figures/readme.json, and
writes what stands between the marks of the README. A test does the same from the named runs and compares; what the
README says of the claims, which are about every run, it compares with the archive.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skipless.analysis.costs import count_parameters
from skipless.analysis.drawing import removed
from skipless.analysis.picture import block_picture
from skipless.analysis.units import number
from skipless.config.block import BLOCKS
from skipless.config.model import ModelConfig
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.claims import interval, relative
from skipless.experiments.evidence import Evidence
from skipless.experiments.outcome import OPEN, Plot, count, in_words
from skipless.experiments.papers.simplifying.bounds import MATCH
from skipless.experiments.report.draw import draw, to_csv
from skipless.experiments.report.series import loss_plot
from skipless.experiments.report.verdicts import is_own
from tools.site import DOCS, ROOT, speeds
from tools.site.findings import LAPTOP, SEEDS, decoders, findings, is_judged, status
from tools.site.gallery import paper_size
from tools.site.markdown import table

README = ROOT / "README.md"
FIGURES = DOCS / "figures"
FACTS = FIGURES / "readme.json"
DEMO = FIGURES / "demo.json"
PUBLISHED = ROOT / "skipless" / "experiments" / "published.json"
SHOWN = ("pre-ln", "sas-p")
CAPTIONS = {"pre-ln": "the standard block", "sas-p": "the simplified block"}


def write() -> None:
    """Figures, facts and the parts of the README, from what there is now."""
    FIGURES.mkdir(exist_ok=True)
    names = sorted(run.name for run in decoders().runs())
    FACTS.write_text(json.dumps({"runs": names, "claims": claims()}, indent=2) + "\n", encoding="utf-8")
    for dark in (False, True):
        look = "dark" if dark else "light"
        (FIGURES / f"blocks-{look}.svg").write_text(picture(dark=dark), encoding="utf-8")
        draw(losses(evidence()), FIGURES / f"losses-{look}.svg", ["steps"], dark=dark)
    (FIGURES / "losses.csv").write_text(to_csv(losses(evidence())), encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    PUBLISHED.write_text(json.dumps(came_out(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def came_out() -> dict[str, dict[str, str]]:
    """What came out of each experiment that has runs in the archive, for `skipless reproduce --list`."""
    told = {name: {"answer": finding.answer, "status": status(finding)} for name, finding in findings().items()}
    return {name: one for name, one in told.items() if findings()[name].runs}


def picture(*, dark: bool) -> str:
    """The standard block and the simplified one."""
    return block_picture({name: BLOCKS[name] for name in SHOWN}, dark=dark, captions=CAPTIONS)


def filled(text: str) -> str:
    """The README with what stands between its marks written anew."""
    found = evidence()
    for name, part in {
        "losses": caption(found),
        "blocks": blocks(found),
        "claims": verdicts(),
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
    speed = speeds.of_block("sas-p")
    assert speed is not None
    return (
        f"**Size**: in the paper's decoder, 18 layers of width 768, `sas-p` has "
        f"{-_share('sas-p', paper_size('pre-ln')):.1%} fewer parameters than `pre-ln`. **Speed**: two such layers "
        f"train {speed.text} times as fast on two CPU cores; at width 64 there is "
        f"[little gain](docs/notes/performance.md#narrow-models). **Quality**: the plot shows our own runs, {seeds}, "
        f"of {model.n_layer} layers of width {model.d_model} on Python code, each block at its best learning rate. "
        f"After {train.steps:,} steps the held-out loss is {ends['pre-ln']:.3f} nats a token for `pre-ln` and "
        f"{ends['sas-p']:.3f} for `sas-p`, {abs(more):.1%} {'higher' if more > 0 else 'lower'}"
        f"{_nearness(abs(more), len(rows))}.\n"
    )


def _nearness(apart: float, seeds: int) -> str:
    """How a difference of losses is to be read."""
    if seeds == 1:
        return ", which with one seed may be chance"
    return f": {'within' if apart <= MATCH else 'beyond'} the {MATCH:.0%} up to which we say that blocks match"


def _share(block: str, like: ModelConfig) -> float:
    """How many more parameters a model has with a block than with the standard one."""
    sizes = [like.override({"block": BLOCKS[name].model_dump()}) for name in (block, "pre-ln")]
    mine, standard = (sum(count_parameters(size).values()) for size in sizes)
    return mine / standard - 1


def blocks(found: Evidence) -> str:
    """What each block leaves out, what it costs, what came out."""
    alone = all(len(found.by_seed((name, "pre-ln"))) <= 1 for name in BLOCKS)
    rows = [
        [f"`{name}`", _without(name), _parameters(name), _speed(name), _loss(name, found, told=alone)]
        for name in BLOCKS
    ]
    return table(["block", "against `pre-ln`", "parameters", "speed", "loss (one seed)" if alone else "loss"], rows)


STANDARD = {"pre-ln": "the standard block", "post-ln": "norms after, as in 2017"}


def _without(name: str) -> str:
    """What a block does without; that the first layer has a W^V is told below the table."""
    gone = [part.removesuffix(" (except in layer 1)") for part in removed(BLOCKS[name])]
    beside = "sequential sub-blocks" in gone
    short = {"both skips": "skips", "one skip": "second skip"}
    without = "no " + _or([short.get(part, part) for part in gone if part != "sequential sub-blocks"])
    return STANDARD.get(name) or ("parallel; " if beside else "") + without


def _or(parts: list[str]) -> str:
    """`a, b or c`."""
    return " or ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def _parameters(name: str) -> str:
    size = paper_size("pre-ln")
    if name == "pre-ln":
        return number(sum(count_parameters(size).values()))
    share = _share(name, size)
    return f"{share:+.1%}".replace("-", "−") if abs(share) >= 0.0005 else "the same"


def _speed(name: str) -> str:
    found = speeds.of_block(name)
    return "1" if name == "pre-ln" else f"{found.text} ×" if found else "–"


def _loss(name: str, found: Evidence, *, told: bool) -> str:
    """What came out; where a block has one seed and others have more (not `told` in the heading), it says so."""
    if name == "pre-ln":
        return f"{statistics.fmean(one.valid_loss for one in found.finished(name).values()):.3f}"
    if name not in EXPERIMENTS["fig5"].configs(LAPTOP):
        return "–"
    rows = found.by_seed((name, "pre-ln"))
    if not rows:
        return "not trained yet"
    values = [relative(name, "pre-ln")(row) for row in rows.values()]
    mean, low, high = interval(values, 0.0)
    spread = f" ({low:+.1%} to {high:+.1%}, {len(values)} seeds)" if len(values) > 1 else "" if told else " (one seed)"
    return f"{mean:+.1%}{spread}".replace("-", "−")


def claims() -> dict[str, Any]:
    """How the paper's claims stand by the archive, for how many there is nothing yet, and the seeds behind the others.

    A claim about run time has rounds of a measurement, which are no seeds.
    """
    found = [one for finding in findings().values() for one in finding.verdicts if not is_own(finding, one)]
    seeds = [int(one.numbers["seeds"]) for one in found if one.seed == "seed" and is_judged(one)]
    waiting = sum(not is_judged(one) for one in found)
    return {"seeds": statistics.median_low(seeds or [0]), "waiting": waiting, "verdicts": count(found)}


def verdicts() -> str:
    """The sentence on the paper's claims."""
    kept = json.loads(FACTS.read_text(encoding="utf-8"))["claims"]
    total, seeds, waiting = sum(kept["verdicts"].values()), kept["seeds"], kept["waiting"]
    results = "[page of results](docs/results/report.md)"
    if seeds >= SEEDS and not waiting:
        words = in_words(kept["verdicts"])
        return f"**Evidence**: of the paper's {total} claims, most of them over {seeds} seeds: {words} ({results}).\n"
    settled = {verdict: number for verdict, number in kept["verdicts"].items() if verdict != OPEN}
    undecided = total - waiting - sum(settled.values())
    by = f", mostly with {'one seed' if seeds == 1 else f'{seeds} seeds'}" if 0 < seeds < SEEDS else ""
    parts = [
        in_words(settled) if settled else "",
        f"{undecided} {'is' if undecided == 1 else 'are'} undecided{by}" if undecided else "",
        f"{waiting} {'is' if waiting == 1 else 'are'} not tested yet" if waiting else "",
    ]
    listed = "; ".join(filter(None, parts))
    return f"**Evidence**: incomplete. Of the paper's {total} claims, {listed} ({results}).\n"


def speed_table() -> str:
    """Speed against the alternatives, our own standard block among them."""
    cases = {
        "training two layers of width 768: `pre-ln`": ("T=128: pre-ln", "HF GPT-2", "itself"),
        "the same: `sas-p`": ("T=128: sas-p", "HF GPT-2", "pre-ln"),
        "a training step with AdamW, 18 layers: `sas-p`": ("training step: sas-p", "HF GPT-2", "pre-ln"),
        "generating 128 tokens after 512: `sas-p`": (
            "decoding: sas-p (kx)",
            "HF GPT-2 (static)",
            "pre-ln (kv)",
        ),
        "peak memory of that training step: `sas-p`": (
            "training step: sas-p, peak memory",
            "HF GPT-2",
            "pre-ln",
        ),
    }
    rows = [[title, *(_measured(case, other) for other in others)] for title, (case, *others) in cases.items()]
    note = (
        "\nThe first column is block and code together, the second the block alone. In float32 on two cores of an AMD "
        f"EPYC: lowest and highest of up to {len(speeds.runs())} runs of `python benchmarks/speed.py` "
        "([each run](docs/notes/performance.md)).\n"
    )
    return table(["", "against Hugging Face's GPT-2", "against our own `pre-ln`"], rows) + note


def _measured(case: str, against: str) -> str:
    if against == "itself":
        return "1"
    found = speeds.speed(case, against)
    if found is None:
        raise ValueError(f"{case} against {against} was not measured")
    return found.text if "memory" in case else f"{found.text} ×"


def demo() -> str:
    """With what `make demo` ends."""
    first, second = json.loads(DEMO.read_text(encoding="utf-8"))["runs"]
    losses = [f"about {row['valid_loss']:.2f} for `{row['name'].removeprefix('demo-')}`" for row in (first, second)]
    return (
        "The first `make demo` installs 2.5 GB, without CUDA. It then trains for about five minutes on two cores and "
        "ends with a table, samples of text, and a page of curves. Expect held-out losses of "
        f"{' and '.join(losses)}. It is shorter than the figure's, with one learning rate for both: "
        "don't read anything into which is lower.\n"
    )


def keep_demo(reported: Path, runs: Iterable[str] = ("demo-pre-ln", "demo-sas-p")) -> None:
    """Keep what `skipless report … --json` said of the demo."""
    content = json.loads(reported.read_text(encoding="utf-8"))
    kept = [{key: row[key] for key in ("name", "parameters", "steps", "valid_loss")} for row in content["runs"]]
    assert [row["name"] for row in kept] == list(runs)
    DEMO.write_text(json.dumps({"runs": kept}, indent=2) + "\n", encoding="utf-8")
