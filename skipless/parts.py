"""The plugin API: `part` and `block` register your own parts and blocks; the rest is what you build them from.

    from skipless.parts import Settings, part

    @part("norm", "dyt", drawn="DyT")
    class DynamicTanh(nn.Module): ...

`skipless.nn.own_parts` and `skipless.training.own_parts` say what a part of each kind is made of and called with;
docs/add-a-part.md shows it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import Field

from skipless.config.block import BLOCKS, BlockConfig, Gain, GainConfig, MapConfig
from skipless.config.model import ModelConfig
from skipless.config.parts import Part, Plugin, Settings, check_name, register, taken
from skipless.config.plugins import load_plugin, origin
from skipless.config.run import TrainConfig
from skipless.errors import UserError
from skipless.nn.layers import GLU, MLP, RMSNorm, WithGains, make_activation, make_norm, scaled, weighted_sum
from skipless.nn.masks import Mask, MaskLike
from skipless.nn.mixing import Shaped, Softmax, VSkipInit, attention_matrix, gain_shape, gains_of
from skipless.nn.positions import Positions

__all__ = [
    "BLOCKS",
    "GLU",
    "MLP",
    "BlockConfig",
    "Field",
    "Gain",
    "GainConfig",
    "MapConfig",
    "Mask",
    "MaskLike",
    "ModelConfig",
    "Positions",
    "RMSNorm",
    "Settings",
    "Shaped",
    "Softmax",
    "TrainConfig",
    "VSkipInit",
    "WithGains",
    "attention_matrix",
    "block",
    "gain_shape",
    "load_plugin",
    "make_activation",
    "make_norm",
    "part",
    "scaled",
    "weighted_sum",
]

Make = TypeVar("Make", bound=Callable[..., Any])

_presets: dict[str, Plugin] = {}
"""Who added which block."""


def part(
    kind: str, name: str, settings: type[Settings] | None = None, *, drawn: str | Callable[[Any], str] | None = None
) -> Callable[[Make], Make]:
    """Make a part known by a name: a norm, mixing, map, mlp, activation, positions, optimizer or schedule.

    `settings` is what can be set of it; `drawn` is how a drawing of a block names it, by default as it is called.
    """
    plugin = origin()

    def add(make: Make) -> Make:
        gains = gains_of(make) if kind == "mixing" else ()
        register(Part(kind, name, name if drawn is None else drawn, settings, make, plugin, gains))
        return make

    return add


def block(name: str, config: BlockConfig) -> BlockConfig:
    """Make a block known by a name, as the paper's are: `block("pre-ln-dyt", BLOCKS["pre-ln"].replace(norm="dyt"))`."""
    plugin, title = origin(), f"block {name!r}"
    check_name(name, title)
    if not isinstance(config, BlockConfig):
        raise UserError(f"{title} must be a BlockConfig, got {type(config).__name__}")
    there = _presets.get(name)
    if name in BLOCKS and there != plugin:
        raise taken(title, there, plugin)
    BLOCKS[name], _presets[name] = config, plugin
    return config
