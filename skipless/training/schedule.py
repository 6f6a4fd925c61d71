"""Learning rate and batch size of a step, as functions of the progress of a training run, 0 to 1."""

import math
from collections.abc import Callable

from skipless.config.run import TrainConfig
from skipless.training.own_parts import own_part


def learning_rate(cfg: TrainConfig, progress: float) -> float:
    """The learning rate when `progress`, from 0 to 1, of the budget is spent."""
    if cfg.schedule == "wsd":
        return cfg.lr * _warmup_stable_decay(cfg, progress)
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
"""The multiplier of the peak learning rate after the warm-up, from the fraction of the remaining budget (1 to 0)."""


def _shape(cfg: TrainConfig, left: float) -> float:
    if isinstance(cfg.schedule, str) and cfg.schedule in SCHEDULES:
        return SCHEDULES[cfg.schedule](cfg, left)
    return own_part("schedule", cfg.schedule, left, cfg)


def _warmup_stable_decay(cfg: TrainConfig, progress: float) -> float:
    """The multiplier of the peak: linear warm-up, constant, linear decay to zero (WSD).

    A warm-up and a decay in steps are counted in whole steps, not as shares. So trainings of any lengths have the same
    rates until they decay, to the last bit, and one may branch off another.
    """
    whole = cfg.steps is not None
    at, end = (round(progress * (cfg.steps + 1)), cfg.steps + 1) if whole else (progress, 1.0)  # pyrefly: ignore
    warmup = cfg.warmup if whole and cfg.warmup is not None and cfg.warmup >= 1 else cfg.warmup_share * end
    decay = cfg.decay + 1 if whole and cfg.decay is not None and cfg.decay >= 1 else cfg.decay_share * end
    if at < warmup:
        return cfg.warmup_from + (1 - cfg.warmup_from) * at / warmup
    return min(max(end - at, 0) / decay, 1.0)


def batch_rows(cfg: TrainConfig, progress: float) -> int:
    """Sequences in the next step: with a ramp, whole micro-batches that grow linearly to `batch_size`."""
    if progress >= cfg.batch_ramp:
        return cfg.batch_size
    micro = cfg.micro_rows
    count = math.ceil(cfg.batch_size / micro * progress / cfg.batch_ramp)
    return min(max(count, 1) * micro, cfg.batch_size)
