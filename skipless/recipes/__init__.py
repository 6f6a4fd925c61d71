"""Recipes: functions that return a `RunConfig`, derived from one another. `recipe(name, block)` adds what was tuned."""

from collections.abc import Callable
from pathlib import Path

from skipless.config.overrides import load_yaml
from skipless.config.run import RunConfig
from skipless.errors import UserError, unknown
from skipless.recipes.laptop import (
    crammed_bert_laptop,
    demo,
    laptop,
    smoke,
    study,
    study_books,
    study_deep,
    study_long,
    study_shallow,
)
from skipless.recipes.paper import (
    codeparrot,
    codeparrot_authors,
    codeparrot_deep,
    codeparrot_long,
    codeparrot_shallow,
    crammed_bert,
    languini,
)
from skipless.recipes.rates import Rates, tuned

RECIPES: dict[str, Callable[[str], RunConfig]] = {
    "laptop": laptop,
    "demo": demo,
    "smoke": smoke,
    "study": study,
    "study-long": study_long,
    "study-shallow": study_shallow,
    "study-deep": study_deep,
    "crammed-bert-laptop": crammed_bert_laptop,
    "study-books": study_books,
    "codeparrot": codeparrot,
    "codeparrot-long": codeparrot_long,
    "codeparrot-shallow": codeparrot_shallow,
    "codeparrot-deep": codeparrot_deep,
    "codeparrot-authors": codeparrot_authors,
    "crammed-bert": crammed_bert,
    "languini": languini,
}


def load_rates(path: Path) -> Rates:
    """A file that `skipless sweep` wrote."""
    table = load_yaml(path)
    for name, blocks in table.items():
        if name not in RECIPES:
            raise unknown(f"recipe in {str(path)!r}", name, RECIPES)
        if not isinstance(blocks, dict) or not all(isinstance(values, dict) for values in blocks.values()):
            raise UserError(f"{str(path)!r} must hold recipe → block → key → value, as `skipless sweep` writes it")
    return table


def recipe(name: str, block: str, rates: Rates | None = None) -> RunConfig:
    """The recipe of a name, for a block, with what was tuned for the two."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](block).override(tuned(name, block, rates))
