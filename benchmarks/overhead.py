"""What the trainer costs beside the bare loop, and what a checkpoint every 50 steps costs beside none.

    python benchmarks/overhead.py [--steps 60] [--saves 8]

The bare loop and the trainer take turns, a step each, on the same batches; then blocks of ten steps with and without a
save at their end. Prints a table and then one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from skipless.config.run import RunConfig
from skipless.data import Corpus, prepare
from skipless.recipes.laptop import laptop
from skipless.runs import Run
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.saver import BackgroundSaver
from skipless.training.loop import TrainingLoop
from skipless.training.optimizers import make_optimizers
from skipless.training.trackers import Trackers
from skipless.training.trainer import Trainer, fit_vocabulary

BLOCK = 10
EVERY = 50


def bare_step(cfg: RunConfig, corpus: Corpus) -> Callable[[], None]:
    """Forward, backward, clipping and optimiser on batches that lie ready."""
    trainer = Trainer(cfg, corpus)
    model, optimizer = trainer.model, make_optimizers(trainer.model, cfg.train)[0]
    rows = [torch.from_numpy(corpus.train.batch(0, step * 8, 8)) for step in range(1000)]
    parameters, number = list(model.parameters()), iter(range(10**9))

    def step() -> None:
        batch = rows[next(number) % len(rows)]
        model.loss(batch[:, :-1], batch[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_loop(cfg: RunConfig, corpus: Corpus, folder: Path) -> TrainingLoop:
    """The trainer with its files and TensorBoard, as `skipless train` makes it."""
    folder.mkdir(parents=True)
    saver = BackgroundSaver(Checkpoints(folder / "checkpoints"))
    trackers = Trackers(["tensorboard"], folder, {}, 0, print)
    return TrainingLoop(Trainer(cfg, corpus), Run(folder), trackers, saver)


def trainer_step(loop: TrainingLoop) -> None:
    """One turn of the trainer's own loop."""
    loop._between_steps()
    loop._log(loop.trainer.step())


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def block(loop: TrainingLoop, *, save: bool) -> None:
    """Ten steps, the first of which may have a save running beside it."""
    if save:
        loop._save()
    for _ in range(BLOCK):
        trainer_step(loop)
    loop.saver.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--saves", type=int, default=8)
    options = parser.parse_args()
    # no evaluation or samples: they are not overhead, they are asked for
    quiet = {"train.eval_every": 0, "train.sample_every": 0, "train.steps": 10**9, "train.save_every": 10**9}
    cfg = laptop("sas-p").override(quiet)
    corpus = prepare(cfg.data)
    cfg = fit_vocabulary(cfg, corpus)
    with tempfile.TemporaryDirectory() as folder:
        bare, loop = bare_step(cfg, corpus), make_loop(cfg, corpus, Path(folder) / "run")
        pairs = [(seconds(bare), seconds(lambda: trainer_step(loop))) for _ in range(options.steps)][5:]
        block(loop, save=True)  # the first save makes its buffers
        blocks = [
            (seconds(lambda: block(loop, save=False)), seconds(lambda: block(loop, save=True)))
            for _ in range(options.saves)
        ]
    step = statistics.median(mine for _, mine in pairs)
    trainer = step / statistics.median(theirs for theirs, _ in pairs)
    save = statistics.median(with_save - without for without, with_save in blocks)
    share = save / (EVERY * step)
    print(f"a step of the bare loop          {1e3 * step / trainer:8.1f} ms (median of {len(pairs)})")
    print(f"a step of the trainer            {1e3 * step:8.1f} ms, {trainer - 1:+.1%}")
    print(f"a checkpoint in the background   {1e3 * save:8.1f} ms, {share:.2%} if there is one every {EVERY} steps")
    print(
        json.dumps({"trainer_over_bare": round(trainer, 4), "checkpoint_share": round(share, 4), "step_ms": 1e3 * step})
    )


if __name__ == "__main__":
    main()
