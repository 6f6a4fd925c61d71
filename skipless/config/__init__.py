"""Configurations: frozen, checked when made, unknown keys refused, JSON in and out.

Nothing here imports torch, so that the command line can check its input before it loads anything heavy.
"""

from skipless.config.base import Config, differences
from skipless.config.block import BLOCKS, FIXED, TRAINED, BlockConfig, GainConfig, MapConfig, WInit, parse_block
from skipless.config.explain import explain
from skipless.config.model import ModelConfig
from skipless.config.overrides import YAML_ERRORS, load_yaml, parse_overrides
from skipless.config.run import DataConfig, FinetuneConfig, ParallelConfig, RunConfig, TrainConfig

__all__ = [
    "BLOCKS",
    "FIXED",
    "TRAINED",
    "YAML_ERRORS",
    "BlockConfig",
    "Config",
    "DataConfig",
    "FinetuneConfig",
    "GainConfig",
    "MapConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "WInit",
    "differences",
    "explain",
    "load_yaml",
    "parse_block",
    "parse_overrides",
]
