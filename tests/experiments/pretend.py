"""Runs and findings that nobody trained: what reads them cannot tell."""

import json
import math
import random
from pathlib import Path

from skipless.experiments.outcome import FAILS, HOLDS, OPEN, Finding, Plot, Series, Verdict
from skipless.experiments.recipes import laptop
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
