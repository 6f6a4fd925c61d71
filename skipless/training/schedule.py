"""The learning rate and the batch of a step, as functions of the share of the budget that is spent."""

import math

from skipless.config.run import TrainConfig


def learning_rate(cfg: TrainConfig, progress: float) -> float:
    """The learning rate when `progress`, from 0 to 1, of the budget is spent."""
    warmup = cfg.warmup_share
    if progress < warmup:
        return cfg.lr * (cfg.warmup_from + (1 - cfg.warmup_from) * progress / warmup)
    left = (1 - progress) / (1 - warmup) if warmup < 1 else 0.0
    shape = {
        "linear": left,
        "triangle": left,
        "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left))),
        "constant": 1.0,
    }[cfg.schedule]
    return cfg.lr * max(shape, 0.0)


def batch_rows(cfg: TrainConfig, progress: float) -> int:
    """Sequences in the next step: with a ramp, whole micro-batches that grow linearly to `batch_size`."""
    if progress >= cfg.batch_ramp:
        return cfg.batch_size
    micro = cfg.micro_rows
    count = math.ceil(cfg.batch_size / micro * progress / cfg.batch_ramp)
    return min(max(count, 1) * micro, cfg.batch_size)
