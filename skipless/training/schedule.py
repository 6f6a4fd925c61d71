"""The learning rate and the batch of a step, as functions of the share of the budget that is spent."""

import math
from collections.abc import Callable

from skipless.config.run import TrainConfig
from skipless.training.own_parts import own_part


def learning_rate(cfg: TrainConfig, progress: float) -> float:
    """The learning rate when `progress`, from 0 to 1, of the budget is spent."""
    warmup = cfg.warmup_share
    if progress < warmup:
        return cfg.lr * (cfg.warmup_from + (1 - cfg.warmup_from) * progress / warmup)
    left = (1 - progress) / (1 - warmup) if warmup < 1 else 0.0
    return cfg.lr * max(_shape(cfg, left), 0.0)


SCHEDULES: dict[str, Callable[[TrainConfig, float], float]] = {
    "linear": lambda cfg, left: left,
    "triangle": lambda cfg, left: left,
    "cosine": lambda cfg, left: 0.5 * (1 + math.cos(math.pi * (1 - left))),
    "constant": lambda cfg, left: 1.0,
}
"""The learning rate after the warm-up as a share of the peak, by how much of what follows the warm-up is left."""


def _shape(cfg: TrainConfig, left: float) -> float:
    if isinstance(cfg.schedule, str) and cfg.schedule in SCHEDULES:
        return SCHEDULES[cfg.schedule](cfg, left)
    return own_part("schedule", cfg.schedule, left, cfg)


def batch_rows(cfg: TrainConfig, progress: float) -> int:
    """Sequences in the next step: with a ramp, whole micro-batches that grow linearly to `batch_size`."""
    if progress >= cfg.batch_ramp:
        return cfg.batch_size
    micro = cfg.micro_rows
    count = math.ceil(cfg.batch_size / micro * progress / cfg.batch_ramp)
    return min(max(count, 1) * micro, cfg.batch_size)
