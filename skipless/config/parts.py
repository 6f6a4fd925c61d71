"""The registry of the parts that blocks, models and training runs are made with: built-in ones, and those of plugins.

Built-in parts are listed here by name only; their constructors are next to the equations (`nn.layers.NORMS` and the
like). User-defined parts bring their own constructor and may have settings: in a configuration such a part is its name,
or a mapping such as `{name: dyt, alpha: 0.5}`. So the configuration of a run names every part and all of its settings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, create_model

from skipless.config.base import Config, Text
from skipless.errors import UserError, did_you_mean, unknown


class Settings(Config):
    """What can be set of a part of your own: a subclass with fields, each with a default and a description."""

    name: Text = Field("", description="The part.")


@dataclass(frozen=True)
class Plugin:
    """Where parts of somebody's own come from: a module, and its file if it has one."""

    name: str
    file: Path | None = None

    def __str__(self) -> str:
        return f"{self.name!r}" + (f" ({self.file})" if self.file else "")


@dataclass(frozen=True)
class Part:
    """A part of a kind."""

    kind: str
    name: str
    drawn: str | Callable[[Any], str] = ""
    """How a drawing of a block names it, or a function of its settings."""
    settings: type[Settings] | None = None
    make: Callable[..., Any] | None = field(default=None, repr=False)
    """What makes it; nothing for ours, which the packages that use them know."""
    plugin: Plugin | None = None
    gains: tuple[str, ...] = ()
    """Of a mixing matrix: which of the block's alpha, beta and gamma it has."""

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.kind} {self.name!r}"


def _ours(kind: str, **drawn: str) -> dict[str, Part]:
    names = {name.replace("_", "-"): label for name, label in drawn.items()}
    return {name: Part(kind, name, label) for name, label in names.items()}


PARTS: dict[str, dict[str, Part]] = {
    "norm": _ours("norm", rmsnorm="RMSNorm", rms_plus_eps="RMSNorm", layernorm="LayerNorm", none=""),
    "mixing": {
        "softmax": Part("mixing", "softmax", "A"),
        "v-skipinit": Part("mixing", "v-skipinit", "αI + βA", gains=("alpha", "beta")),
        "shaped": Part("mixing", "shaped", "αI + βA − γC", gains=("alpha", "beta", "gamma")),
    },
    "map": _ours("map", dense="W", reparam="αW₀+βΔW", identity=""),
    "mlp": _ours("mlp", plain="MLP", glu="GLU"),
    "activation": _ours(
        "activation", relu="relu", leaky_relu="leaky-relu", gelu="gelu", gelu_tanh="gelu-tanh", silu="silu"
    ),
    "positions": _ours("positions", sinusoidal="", scaled_sinusoidal="", learned="", alibi="", rotary=""),
    "optimizer": _ours("optimizer", adamw="", muon="", sgd=""),
    "schedule": _ours("schedule", linear="", cosine="", triangle="", constant="", wsd=""),
}
"""Kind → name → part."""

KINDS = tuple(PARTS)

PartValue = str | Settings
"""A part in a configuration: the name of one that has nothing to set, or the settings of one that has."""


def name_of(value: PartValue) -> str:
    """The name of a part in a configuration."""
    return value if isinstance(value, str) else value.name


def find_part(kind: str, value: PartValue) -> Part:
    """A part by its name or its settings; a UserError that lists the known ones."""
    name = name_of(value)
    known = PARTS[kind]
    if name not in known:
        from skipless.config.plugins import load_installed

        load_installed()  # only now: a name of ours never waits for it
    if name not in known:
        raise UserError(f"{name!r} is not one of {', '.join(known)}{did_you_mean(str(name), known)}")
    return known[name]


def register(part: Part) -> None:
    """Add a part. A plugin may define its own again, as a cell of a notebook does; not one of ours or another's."""
    if part.kind not in PARTS:
        raise unknown("kind of part", part.kind, KINDS)
    check_name(part.name, part.title)
    there = PARTS[part.kind].get(part.name)
    if there is not None and not _same_origin(there.plugin, part.plugin):
        raise taken(part.title, there.plugin, part.plugin)
    named = None if part.settings is None else _with_name(part.settings, part.name)
    PARTS[part.kind][part.name] = replace(part, settings=named)


def taken(title: str, first: Plugin | None, second: Plugin | None) -> UserError:
    """The error for a name that two have."""
    if first is None:
        return UserError(f"{title} is a name of skipless's own, so the plugin {second} cannot have it: choose another")
    return UserError(f"{title} is brought by two plugins, {first} and {second}: give one of them another name")


def _same_origin(first: Plugin | None, second: Plugin | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.file == second.file if first.file and second.file else first.name == second.name


def check_name(name: str, title: str) -> None:
    """A UserError where a name could not be written on a command line: `my-norm` can."""
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name):
        raise UserError(f"{title}: a name has letters, digits, hyphens, dots and underscores, got {name!r}")


def _with_name(settings: type[Settings], name: str) -> type[Settings]:
    """The settings with the part's name in them, so that a configuration says whose they are."""
    literal: Any = Literal[name]  # pyrefly: ignore
    return create_model(settings.__name__, __base__=settings, __module__=settings.__module__, name=(literal, name))


def resolve(kind: str, value: Any) -> PartValue:
    """A part as a configuration keeps it, from its name, a mapping with its name and settings, or settings."""
    given = value.model_dump() if isinstance(value, Settings) else value
    if isinstance(given, dict):
        changes = dict(given)
        name = changes.pop("name", None)
    else:
        name, changes = given, {}
    if not isinstance(name, str):
        raise ValueError(f"{given!r} is not one of {', '.join(PARTS[kind])}")  # noqa: TRY004  pydantic's own
    part = find_part(kind, name)
    if part.settings is None:
        if changes:
            raise ValueError(f"{part.title} has nothing to set, got {', '.join(map(str, changes))}")
        return name
    try:
        return part.settings.model_validate(changes)
    except ValidationError as error:
        from skipless.config.explain import explain

        known = [key for key in part.settings.model_fields if key != "name"]
        raise ValueError(f"{part.title}: {explain(error)} (it has {', '.join(known) or 'nothing to set'})") from None


def _value(kind: str) -> Any:
    return Annotated[SerializeAsAny[PartValue], BeforeValidator(partial(resolve, kind))]


Norm = _value("norm")
Mixing = _value("mixing")
MapKind = _value("map")
Mlp = _value("mlp")
Activation = _value("activation")
Positions = _value("positions")
OptimizerPart = _value("optimizer")
SchedulePart = _value("schedule")


def parts_in(config: Config) -> Iterable[Part]:
    """The parts of plugins that a configuration names, at any depth, each once."""
    found: dict[tuple[str, str], Part] = {}
    kinds = {"outer_norm": "norm", **{kind: kind for kind in KINDS}}

    def walk(tree: Config) -> None:
        for key in type(tree).model_fields:
            value = getattr(tree, key)
            kind = "map" if key == "kind" and "init" in type(tree).model_fields else kinds.get(key)
            if kind is not None and isinstance(value, PartValue):
                part = find_part(kind, value)
                if part.plugin is not None:
                    found[part.kind, part.name] = part
            elif isinstance(value, Config):
                walk(value)

    walk(config)
    return found.values()
