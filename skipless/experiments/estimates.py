"""What experiments cost, before they are run."""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from skipless.analysis.costs import flops_per_token
from skipless.analysis.speed import matmul_speed
from skipless.config.model import ModelConfig
from skipless.config.run import RunConfig
from skipless.distributed.devices import pick_device
from skipless.experiments.experiment import Experiment
from skipless.experiments.run_index import run_key
from skipless.experiments.scale import Scale

GPU_SPEED = 30e12
"""FLOP/s that a GPU is assumed to sustain, for the estimates at paper scale."""

CPU_SHARE = 0.35
"""Share of the speed of large matrix products that training is assumed to reach, for the estimates at laptop scale."""


def cost(cfg: RunConfig, speed: float) -> float:
    """An estimate of a run's seconds at a speed in FLOP/s, evaluations not counted."""
    train = cfg.train
    if train.minutes is not None:
        return 60 * train.minutes
    tokens = train.tokens if train.tokens else (train.steps or 0) * train.batch_size * cfg.data.seq_len
    return tokens * _flops(cfg.model, cfg.data.seq_len, cfg.predicted_share) / speed


@cache
def _flops(model: ModelConfig, length: int, head_share: float) -> float:
    return flops_per_token(model, length, head_share=head_share)["training"]


def speed_of(scale: Scale) -> float:
    """The speed that estimates are made with: of a stated GPU for the paper's scale, else of this machine."""
    if scale.is_paper:
        return GPU_SPEED
    device = pick_device("auto")
    return CPU_SHARE * matmul_speed(device, torch.float32)


def costs(experiment: Experiment, scales: Iterable[Scale]) -> dict[str, Any]:
    """What an experiment is, and what one seed of it costs at each scale if nothing is there yet."""
    at: dict[str, Any] = {}
    for scale in scales:
        configs = {run_key(cfg): cfg for cfg in experiment.configs(scale).values()}
        seconds = sum(cost(cfg, speed_of(scale)) for cfg in configs.values())
        at[scale.name] = {"runs": len(configs), "seconds": seconds}
    came_out = came_out_here().get(experiment.id)
    content = {"id": experiment.id, "title": experiment.title, "paper": experiment.paper, "own": experiment.own}
    return {**content, "scales": at, "came_out": came_out}


@cache
def came_out_here() -> dict[str, Any]:
    """What came out of the experiments that were published with this version."""
    return json.loads(files("skipless.experiments").joinpath("published.json").read_text(encoding="utf-8"))
