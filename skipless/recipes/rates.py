"""Tuned learning rates by recipe and block: `rates.json`, in the form that `skipless sweep` writes."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

Rates = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Recipe → block → dotted key → value."""


@cache
def packaged_rates() -> Rates:
    """What was tuned here, and what the paper says it tuned."""
    return json.loads(files("skipless.recipes").joinpath("rates.json").read_text(encoding="utf-8"))


def tuned(name: str, block: str, rates: Rates | None = None) -> dict[str, Any]:
    """The tuned keys of a recipe and a block.

    What is not listed has the values of what its name begins with: `sas:beta_ff=0.2` and `sas-gains` those of `sas`,
    `study-long` those of `study`.
    """
    table = {recipe: dict(blocks) for recipe, blocks in packaged_rates().items()}
    for recipe, blocks in (rates or {}).items():
        table[recipe] = {**table.get(recipe, {}), **blocks}
    found: dict[str, Any] = {}
    for blocks in _from_general_to_own(table, name):
        found |= next(reversed(_from_general_to_own(blocks, block)), {})
    return found


def tuned_exactly(rates: Rates, name: str, block: str) -> Mapping[str, Any]:
    """The keys that were tuned for just this block, and a recipe or what that recipe derives from."""
    for blocks in reversed(_from_general_to_own(rates, name)):
        if block in blocks:
            return blocks[block]
    return {}


Value = TypeVar("Value")


def _from_general_to_own(table: Mapping[str, Value], name: str) -> list[Value]:
    """The entries of a name and of all that it begins with up to a hyphen or a colon, its own last."""
    matching = [key for key in table if name == key or (name.startswith(key) and name[len(key)] in "-:")]
    return [table[key] for key in sorted(matching, key=len)]
