"""`dry_run`: what a training would cost, from one real step."""

import time
from pathlib import Path
from typing import Any

from skipless.config.run import RunConfig
from skipless.distributed.launch import join
from skipless.training.observer import Observer
from skipless.training.train import prepare_corpus
from skipless.training.trainer import Trainer


def dry_run(cfg: RunConfig, *, observer: Observer | None = None, cache_dir: Path | None = None) -> dict[str, Any]:
    """Prepare the data, build the model, train one step, and keep nothing of it but figures."""
    observer = observer or Observer()
    with join(cfg.parallel, cfg.train.device) as group:
        cfg, corpus = prepare_corpus(cfg, group, observer, cache_dir)
        trainer = Trainer(cfg, corpus, observer, group)
        start = time.perf_counter()
        trainer.step()
        seconds = time.perf_counter() - start
    state, train = trainer.state, cfg.train
    per_token = seconds / state.tokens
    if train.minutes is not None:
        total = 60 * train.minutes
    elif train.tokens is not None:
        total = per_token * train.tokens
    else:
        assert train.steps is not None
        total = per_token * train.steps * train.batch_size * trainer.tokens_per_row
    return {
        "config": cfg.model_dump(mode="json"),
        "parameters": trainer.model.num_parameters(),
        "memory": trainer.planned.memory,
        "train_tokens": corpus.train.n_tokens,
        "loss": state.loss_sum,
        "step_seconds": seconds,
        "tokens_per_second": 1 / per_token,
        "total_seconds": total,
    }
