"""What the trainer costs beside the bare loop, and what a checkpoint every 50 steps costs beside none.

    python benchmarks/overhead.py [--steps 50] [--rounds 7]

All variants take turns in one process on the same batches. Prints a table and then one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from skipless.checkpoint import BackgroundSaver, Checkpoints
from skipless.config import RunConfig
from skipless.data import Corpus, prepare
from skipless.experiments.recipes import laptop
from skipless.optim import make_optimizers
from skipless.runs import Run
from skipless.trackers import Trackers
from skipless.train import Session, Signals, Trainer, fit_vocabulary


def bare(cfg: RunConfig, corpus: Corpus, steps: int) -> Callable[[], float]:
    """Forward, backward, clipping and optimiser on batches that lie ready."""
    torch.manual_seed(0)
    trainer = Trainer(cfg, corpus)
    model, optimizer = trainer.model, make_optimizers(trainer.model, cfg.train)[0]
    rows = [torch.from_numpy(corpus.train.batch(0, step * 8, 8)) for step in range(steps)]
    parameters = list(model.parameters())

    def run() -> float:
        start = time.perf_counter()
        for batch in rows:
            model.loss(batch[:, :-1], batch[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return run


def loop(cfg: RunConfig, corpus: Corpus, steps: int, folder: Path, *, save_every: int) -> Callable[[], float]:
    """The trainer's own loop, with its metrics and TensorBoard, for `steps` more steps at each call."""
    cfg = cfg.override({"train.save_every": save_every})
    trainer = Trainer(cfg, corpus)
    run = Run(folder)
    folder.mkdir(parents=True)
    saver = BackgroundSaver(Checkpoints(folder / "checkpoints"))
    session = Session(trainer, run, Trackers(["tensorboard"], folder, {}, 0, print), saver, Signals())
    trainer.model.train()

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            session._between_steps()
            session._log(trainer.step())
        saver.wait()
        return time.perf_counter() - start

    return turn


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    # no evaluation or samples: they are not overhead, they are asked for
    quiet = {"train.eval_every": 0, "train.sample_every": 0, "train.steps": 10**9, "train.warmup": 0.05}
    cfg = laptop("sas-p").override(quiet)
    corpus = prepare(cfg.data)
    cfg = fit_vocabulary(cfg, corpus)
    with tempfile.TemporaryDirectory() as folder:
        turns = {
            "bare loop": bare(cfg, corpus, options.steps),
            "trainer": loop(cfg, corpus, options.steps, Path(folder) / "a", save_every=10**9),
            "trainer, checkpoint every 50": loop(cfg, corpus, options.steps, Path(folder) / "b", save_every=50),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for round_number in range(options.rounds + 1):
            for name, turn in turns.items():
                seconds = turn() / options.steps
                if round_number:  # the first round warms up
                    times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:32} {1e3 * median[name]:8.1f} ms a step   ({1e3 * min(values):.1f} … {1e3 * max(values):.1f})")
    trainer = statistics.median(b / a for a, b in zip(times["bare loop"], times["trainer"], strict=True))
    saving = statistics.median(
        b / a for a, b in zip(times["trainer"], times["trainer, checkpoint every 50"], strict=True)
    )
    print(json.dumps({"trainer_over_bare": round(trainer, 4), "checkpoints_over_none": round(saving, 4), "ms": median}))


if __name__ == "__main__":
    main()
