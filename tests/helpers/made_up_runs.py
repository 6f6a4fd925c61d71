"""Runs and findings that nobody trained: what reads them cannot tell."""

import json
import math
import random
from pathlib import Path

from skipless.experiments.claims import Claim
from skipless.experiments.outcome import FAILS, HOLDS, OPEN, Finding, Plot, Series, Verdict
from skipless.recipes.laptop import laptop
from skipless.runs import Run

VERSIONS = {"python": "3.11.2", "skipless": "0.1.0", "torch": "2.13.0"}
MACHINE = {"system": "Linux x86_64", "processor": "Some CPU @ 2.00GHz", "cores": 2, "threads": 2, "accelerator": None}
ENDS = {"pre-ln": 2.91, "sas": 2.90, "sas-p": 2.93}
SPEEDS = {"pre-ln": 8200, "sas": 8900, "sas-p": 9400}


def make_run(
    folder: Path, block: str = "sas-p", seed: int = 0, reached: int = 2000, sample: str | None = None, **changes
) -> Run:
    """A run of 2,000 steps that got as far as `reached`; changes by dotted name, with `__` for a dot."""
    rng = random.Random(f"{block} {seed}")
    cfg = laptop(block).override(
        {"train.seed": seed, **{key.replace("__", "."): value for key, value in changes.items()}}
    )
    run = Run(folder)
    folder.mkdir(parents=True)
    command = ["/opt/bin/skipless", "train", "--block", block, "--seed", str(seed)]
    content = {"config": cfg.model_dump(mode="json"), "command": command, "versions": VERSIONS, "machine": MACHINE}
    run.config_file.write_text(json.dumps(content))
    end, speed = ENDS.get(block, 3.0) + rng.gauss(0, 0.004), SPEEDS.get(block, 8000) * rng.uniform(0.98, 1.02)
    with run.metrics_file.open("w") as file:
        for step in range(0, reached + 1, 10):
            tokens = step * cfg.train.batch_size * cfg.data.seq_len
            base = {"step": step, "tokens": tokens, "seconds": round(tokens / speed, 3)}
            loss = end + 5.4 * math.exp(-((step / 55) ** 0.55))
            if step:
                record = {**base, "loss": loss + rng.gauss(0.02, 0.03)}
                if step % 50 == 0 and block != "pre-ln":
                    record["gains"] = gains(cfg.model.n_layer, step, rng)
                print(json.dumps(record), file=file)
            if step % 100 == 0:
                valid = {"valid_loss": loss + 0.03, "valid_bits_per_byte": (loss + 0.03) / 2.7}
                print(json.dumps({**base, **valid}), file=file)
    if sample is not None:
        run.samples_file.write_text(json.dumps({"step": reached, "prompt": "def ", "text": sample}) + "\n")
    return run


def gains(layers: int, step: int, rng: random.Random) -> dict:
    found = {}
    for layer in range(layers):
        share = math.exp(-step / (300 + 60 * layer))
        found[f"blocks.{layer}.beta_ff"] = 0.12 + 0.02 * layer * (1 - share)
        for name, goal in (("alpha", 0.7), ("beta", 1.2), ("gamma", 0.9)):
            mean = goal + (1 - goal) * share + 0.01 * layer
            found[f"blocks.{layer}.attention.mixing.{name}"] = [mean + rng.gauss(0, 0.03) for _ in range(4)]
    return found


def line(name: str = "one", y=(3.0, 2.0, 1.5), **changes) -> Series:
    """A series over steps and minutes."""
    n = len(y)
    x = {"steps": tuple(100 * i for i in range(1, n + 1)), "minutes": tuple(0.5 * i for i in range(1, n + 1))}
    return Series(**{"name": name, "x": x, "y": tuple(y), **changes})


def plot(*series: Series, **changes) -> Plot:
    """A plot of series over steps or minutes."""
    axes = {"steps": "training steps", "minutes": "minutes of training"}
    default = {"key": "loss", "title": "Loss", "y_label": "loss", "axes": axes, "series": series}
    return Plot(**{**default, **changes})


def judged(*values: float, text: str = "sas matches pre-ln", paper: str = "“they match”", **claim) -> Verdict:
    """A verdict on values, one for each seed."""
    made = Claim(text, paper, ("sas", "pre-ln"), lambda seed: math.nan, **claim)
    return made.verdict(values, range(len(values)), {"sas": 2.903, "pre-ln": 2.914})


def missing(text: str = "sas-p matches sas", **claim) -> Verdict:
    """A verdict on runs that are not there."""
    return Claim(text, "“they match”", ("sas-p", "sas"), lambda seed: math.nan, **claim).undecided("no finished run")


MATCH = {"above": -0.02, "below": 0.02, "better": "low"}

ALL_KINDS = (
    judged(0.003, 0.001, 0.005, **MATCH),
    judged(-0.061, -0.055, -0.064, text="sas-p matches pre-ln", **MATCH),
    judged(0.051, 0.047, 0.055, text="sas is faster than pre-ln", paper="“faster”", below=0.0),
    judged(0.01, 0.03, 0.022, text="sas is slightly behind pre-ln", above=0.0, below=0.02),
    judged(0.0194, 0.0195, 0.0196, text="sas-p-nonorm matches sas-p", **MATCH),
    judged(0.012, text="one seed matches", **MATCH),
    judged(2.5, 3.5, 2.9, text="sas gains points", above=1.0, form="+.1f", unit=" points", seed="round"),
    missing(below=0.02),
    judged(0.0, 0.009, -0.009, text="sas-p follows pre-ln", **MATCH),
    judged(1.5, 1.6, 1.4, text="pre-training helps", paper="(a check of the recipe)", above=0.0, form=".2f", own=True),
)
"""Holds, better, fails, crosses a bound, close, one seed, a unit, nothing measured, not enough seeds, our own."""


def finding(*plots: Plot, runs=(), **changes) -> Finding:
    """An experiment with a verdict of each kind."""
    verdicts = (
        Verdict("The small block matches.", "it matches", HOLDS, "0.3% ± 0.2% over 3 seeds", {"gap": 0.003}),
        Verdict("The quick block wins.", "it wins", FAILS, "5.1% ± 0.4% over 3 seeds", {"gap": 0.051, "p": math.nan}),
        Verdict("A third is better.", "slightly", OPEN, "no run has finished"),
    )
    default = {
        "id": "fig5",
        "title": "Six blocks over time",
        "paper": "They match.",
        "scale": "laptop",
        "seeds": (0, 1, 2),
        "command": "skipless reproduce fig5 --seeds 3",
        "verdicts": verdicts,
        "plots": plots,
        "runs": tuple(runs),
    }
    return Finding(**{**default, **changes})
