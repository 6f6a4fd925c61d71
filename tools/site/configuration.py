"""The configuration reference, from the descriptions of the configurations' own fields."""

import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from skipless.config.base import Config
from skipless.config.block import BLOCKS, BlockConfig, GainConfig, MapConfig
from skipless.config.model import ModelConfig
from skipless.config.parts import PARTS, resolve
from skipless.config.run import DataConfig, FinetuneConfig, ParallelConfig, RunConfig, TrainConfig
from skipless.interop.onnx_options import OnnxOptions
from skipless.recipes import RECIPES

CLASSES: dict[type[Config], str] = {
    RunConfig: "",
    ModelConfig: "model",
    BlockConfig: "model.block",
    GainConfig: "model.block.beta_ff",
    MapConfig: "model.block.value",
    DataConfig: "data",
    TrainConfig: "train",
    ParallelConfig: "parallel",
    FinetuneConfig: "",
    OnnxOptions: "",
}
"""Every configuration, and the dotted name under which the keys of a run's are set."""

HEAD = """# Configuration

Written from the descriptions in the code: `skipless/config/`. Configurations are frozen and checked when they are made,
and an unknown key is an error that names the nearest one.

Any key can be set by its dotted name, on the command line or in a file:

```sh
skipless train --set train.lr=2e-3 --set model.block.beta_ff=0.2 --steps 20
```

```yaml
# mine.yaml, for --config mine.yaml
model:
  block: sas-p
train:
  lr: 2.0e-3
```

What is not set comes from a recipe (`--recipe`): {recipes}.
"""


def page() -> str:
    """The whole page."""
    recipes = ", ".join(f"`{name}`" for name in RECIPES)
    return HEAD.format(recipes=recipes) + "\n".join(_section(cls, place) for cls, place in CLASSES.items())


def _section(cls: type[Config], place: str) -> str:
    docstring = (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    where = f" Set with `{place}.KEY=VALUE`." if place else ""
    rows = [_row(name, info) for name, info in cls.model_fields.items()]
    head = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    return "\n".join([f"\n## {cls.__name__}\n", f"{' '.join(docstring.split())}{where}\n", *head, *rows, ""])


def _row(name: str, info: FieldInfo) -> str:
    if not info.description:
        raise ValueError(f"the key {name} has no description")
    cells = [f"`{name}`", value_of(info), default_of(info), info.description]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def default_of(info: FieldInfo) -> str:
    """The default as it is written in a file."""
    default = info.default
    if isinstance(default, GainConfig):
        return f"{default.init:g}, trained" if default.trainable else f"{default.init:g}"
    if isinstance(default, BlockConfig):
        return "".join(f"`{name}`" for name, block in BLOCKS.items() if block == default)
    if isinstance(default, Config):
        return "its own defaults" if default == type(default)() else str(default)
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def value_of(info: FieldInfo) -> str:
    """What may be given: names, a number between bounds, another configuration."""
    if names := _parts(info.metadata):
        return names
    bounds = [_bound(one) for one in info.metadata]
    return ", ".join([_type(info.annotation), *filter(None, bounds)])


def _parts(metadata: Iterable[Any]) -> str:
    """The names of the parts of a kind, where a value is one."""
    found = (one.func for one in metadata if isinstance(one, BeforeValidator))
    kinds = [func.args[0] for func in found if isinstance(func, functools.partial) and func.func is resolve]
    return ", ".join(f"`{name}`" for kind in kinds for name in PARTS[kind])


def _bound(found: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(f"{sign} {getattr(found, name):,}" for name, sign in signs.items() if hasattr(found, name))


NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", types.NoneType: "none"}


def _type(annotation: Any) -> str:
    if annotation in NAMES:
        return NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin is typing.Annotated:
        return _parts(inside[1:]) or _type(inside[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in inside))
    if origin is tuple:
        return "list of texts" if Ellipsis in inside else f"{len(inside)} numbers"
    if origin is dict:
        return f"mapping of {_type(inside[0])} to {_type(inside[1])}"
    raise TypeError(f"no words for {annotation}")
