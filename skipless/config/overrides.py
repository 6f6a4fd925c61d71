"""Keys by their dotted names, from the command line and from files."""

import math
from pathlib import Path
from typing import Any

import yaml

from skipless.config.reading import read_text
from skipless.errors import UserError, unknown


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A tree of values with another laid over it."""
    return {**tree, **{key: laid_over(tree.get(key), value) for key, value in changes.items()}}


def laid_over(old: Any, new: Any) -> Any:
    """A new value for an old one: mappings are merged, and a bare number for a gain that is there changes its value.

    Two parts of different names have nothing in common: the new one takes the place of the old.
    """
    if isinstance(old, dict) and isinstance(new, dict) and old.get("name") == new.get("name", old.get("name")):
        return merged(old, new)
    if isinstance(old, dict) and "trainable" in old and is_gain_value(new):
        return {**old, "init": new}
    return new


def is_gain_value(value: Any) -> bool:
    """Whether something can be the `init` of a gain: a number, also written as text, or `depth`."""
    if isinstance(value, bool):
        return False
    try:
        return value == "depth" or math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def set_dotted(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted name in a tree; a UserError where there is no such name."""
    *parents, last = path.split(".")
    for depth, name in enumerate(parents):
        if name not in tree:
            raise unknown("key", ".".join(parents[: depth + 1]), tree)
        if not isinstance(tree[name], dict):
            raise UserError(
                f"key {path!r}: {'.'.join(parents[: depth + 1])!r} holds {tree[name]!r}, which has no parts"
            )
        tree = tree[name]
    if last not in tree and tree:
        raise unknown("key", path, [".".join([*parents, known]) for known in tree])
    tree[last] = laid_over(tree.get(last), value) if not isinstance(value, dict) else value


YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What PyYAML raises: for a date that does not exist, say, not an error of its own."""


MOST_VALUES = 10_000
"""More than any configuration has."""


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text; a UserError that says `what` it is where it is none, or too large.

    Aliases make a few hundred bytes stand for billions of values, so these are counted before anybody walks over them.
    """
    try:
        content = yaml.safe_load(text)
        count = _count_values(content, {})
    except YAML_ERRORS:
        raise UserError(f"{what} is not valid YAML or JSON") from None
    if count > MOST_VALUES:
        raise UserError(f"{what} holds {count:.3g} values, and a configuration has at most {MOST_VALUES:,}")
    return content


def _count_values(content: Any, known: dict[int, int | None]) -> int:
    """How many values there are when every alias is followed."""
    if not isinstance(content, dict | list | tuple | set):
        return 1
    if id(content) not in known:
        known[id(content)] = None
        parts = [*content.keys(), *content.values()] if isinstance(content, dict) else list(content)
        known[id(content)] = 1 + sum(_count_values(part, known) for part in parts)
    count = known[id(content)]
    if count is None:
        raise ValueError("a value that holds itself")
    return count


def parse_overrides(items: list[str]) -> dict[str, Any]:
    """`["n_layer=12", "block.beta_ff.init=0.2"]` → `{"n_layer": 12, ...}`, with values read as YAML."""
    changes: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"expected key=value, got {item!r}")
        changes[key.strip()] = read_yaml(text, f"the value of {item!r}")
    return changes


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    content = read_yaml(read_text(path), repr(str(path)))
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} must hold keys and values, not {type(content).__name__}")
    return content
