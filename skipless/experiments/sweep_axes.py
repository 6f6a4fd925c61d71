"""What a sweep varies: a list of values or a range of a key."""

import math
from dataclasses import dataclass
from typing import Any

import yaml

from skipless.config.overrides import YAML_ERRORS
from skipless.errors import UserError


@dataclass(frozen=True)
class Axis:
    """A key and the values it is to take: some, or a range."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    kind: str = "grid"

    @property
    def numeric(self) -> bool:
        """Whether a range, or a grid of numbers."""
        return self.kind != "grid" or all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    def suggest(self, trial: Any) -> None:
        """Have Optuna choose a value, unless the trial has one."""
        if self.kind == "int":
            trial.suggest_int(self.key, int(self.low), int(self.high))
        elif self.kind in ("log", "lin"):
            trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log")
        elif self.numeric:  # as a range, for then a later sweep may have other values
            trial.suggest_float(self.key, min(self.values), max(self.values))
        else:
            trial.suggest_categorical(self.key, self.values)

    def restore(self, value: Any) -> Any:
        """The value as it was given: Optuna makes numbers floats."""
        whole = isinstance(value, float) and value.is_integer() and any(isinstance(v, int) for v in self.values)
        return int(value) if whole else value


RANGES = ("log", "lin", "int")


def parse_axis(text: str) -> Axis:
    """`train.lr=1e-3,3e-3`, or a range: `train.lr=log:1e-4:1e-2`, `train.clip=lin:0.5:2`, `model.n_layer=int:2:12`."""
    key, equals, rest = text.partition("=")
    if not equals or not key.strip() or not rest.strip():
        raise UserError(f"--over takes KEY=VALUE,VALUE,… or KEY=log:LOW:HIGH (also lin, int), got {text!r}")
    kind, *bounds = rest.split(":")
    if kind in RANGES:
        return _range(key.strip(), kind, bounds, text)
    try:
        values = tuple(_number(yaml.safe_load(part)) for part in rest.split(","))
    except YAML_ERRORS:
        raise UserError(f"--over {text!r}: a value is not valid YAML") from None
    if any(isinstance(value, dict | list) for value in values):
        raise UserError(f"--over {text!r}: values are numbers, words, true, false or null")
    return Axis(key.strip(), tuple(dict.fromkeys(values)))


def _number(value: Any) -> Any:
    """YAML takes 1e-3, which has no point, for a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _range(key: str, kind: str, bounds: list[str], text: str) -> Axis:
    try:
        low, high = (float(bound) for bound in bounds)
    except ValueError:
        raise UserError(f"--over {text!r}: a range has two numbers, as {key}={kind}:1:10") from None
    if not (low < high and math.isfinite(low) and math.isfinite(high)) or (kind == "log" and low <= 0):
        raise UserError(f"--over {text!r}: the first number must be below the second, and above 0 for log")
    return Axis(key, low=low, high=high, kind=kind)
