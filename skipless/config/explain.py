"""A validation error in one line: each key, what was wrong with it, what is allowed, what is near."""

from typing import Any, get_args

from pydantic import (
    ValidationError,
)

from skipless.config.base import Config
from skipless.errors import did_you_mean


def explain(error: ValidationError) -> str:
    """One line for a validation error: each key, what was wrong with it, what is allowed, what is near."""
    return "; ".join(_explain_one(detail, error.title) for detail in error.errors())


def _explain_one(detail: Any, title: str) -> str:
    # pydantic puts the tags of unions into the path; only keys and indices help a reader
    key = ".".join(str(part) for part in detail["loc"] if not str(part).endswith("Config") and str(part) not in _TAGS)
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message else message
    if detail["type"] == "extra_forbidden":
        known = _fields(title, detail["loc"][:-1])
        message = f"unknown key{did_you_mean(str(detail['loc'][-1]), known)}"
    elif detail["type"] == "literal_error":
        choices = [choice.strip("' ") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        message = f"{detail['input']!r} is not one of {', '.join(choices)}{did_you_mean(str(detail['input']), choices)}"
    elif detail["type"] != "value_error" and not isinstance(detail["input"], dict):
        message = f"{message}, got {detail['input']!r}"
    return f"{key}: {message}" if key else message


_TAGS = {"float", "int", "str", "literal['depth']", "function-before[_gain(), nullable[GainConfig]]"}


def _fields(title: str, path: tuple[Any, ...]) -> list[str]:
    """The names a configuration knows at a path, for the nearest-name hint."""
    model: Any = next((kind for kind in _all_configs(Config) if kind.__name__ == title), None)
    for part in path:
        if model is not None and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next((kind for kind in kinds if issubclass(kind, Config)), None)
    return list(model.model_fields) if model is not None else []


def _all_configs(base: type[Config]) -> list[type[Config]]:
    return [base, *(kind for sub in base.__subclasses__() for kind in _all_configs(sub))]
