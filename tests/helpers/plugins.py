"""Plugins in tests: the examples', made-up ones, and a registry that is as it was afterwards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skipless import parts as api
from skipless.config import plugins
from skipless.config.block import BLOCKS
from skipless.config.parts import PARTS

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_BLOCKS = {
    "dynamic_tanh": "pre-ln-dyt",
    "contrast_mixing": "pre-ln-contrast",
    "bilinear_mlp": "pre-ln-bilinear",
}
"""File → the block that it adds."""

EVERY_PART = "sas-p:norm=dyt,mixing=contrast,mlp=bilinear"


def example(name: str) -> str:
    """The path of an example."""
    return str(EXAMPLES / f"{name}.py")


@contextmanager
def no_plugins() -> Iterator[None]:
    """Only our own parts are known at first, and what was known before is known again afterwards."""
    kept = [
        {kind: dict(parts) for kind, parts in PARTS.items()},
        dict(BLOCKS),
        dict(plugins.LOADED),
        dict(api._presets),
    ]
    modules = {name: sys.modules.pop(name) for name in plugins.LOADED if name in sys.modules}
    for parts in PARTS.values():
        for name in [name for name, part in parts.items() if part.plugin]:
            del parts[name]
    for name in api._presets:
        BLOCKS.pop(name, None)
    plugins.LOADED.clear()
    api._presets.clear()
    try:
        yield
    finally:
        for name in plugins.LOADED:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        for kind, parts in kept[0].items():
            PARTS[kind].clear()
            PARTS[kind].update(parts)
        for table, before in ((BLOCKS, kept[1]), (plugins.LOADED, kept[2]), (api._presets, kept[3])):
            table.clear()
            table.update(before)
