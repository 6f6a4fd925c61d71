"""Speeds that `benchmarks/speed.py` has measured, from its files."""

import json
from dataclasses import dataclass
from functools import cache

from tools.site import ROOT

FILES = ROOT / "benchmarks" / "results"
FIRST = 3
"""The first run in which wide products are made in pieces; earlier ones are of other code."""


@dataclass(frozen=True)
class Speed:
    """How a case compares with another, in each run."""

    case: str
    against: str
    values: tuple[float, ...]

    @property
    def text(self) -> str:
        """`1.18 to 1.20`: the least and the most."""
        low, high = f"{min(self.values):.2f}", f"{max(self.values):.2f}"
        return low if low == high else f"{low} to {high}"


@cache
def runs() -> list[dict]:
    """The runs of the benchmark, the oldest first."""
    paths = sorted(FILES.glob("speed-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(path.read_text()) for path in paths if int(path.stem.split("-")[1]) >= FIRST]


def speed(case: str, against: str) -> Speed | None:
    """A comparison by its name, in the runs that measured it."""
    found = [
        figure["value"]
        for run in runs()
        for figure in run["figures"]
        if (figure["case"], figure["against"]) == (case, against)
    ]
    return Speed(case, against, tuple(found)) if found else None


def of_block(block: str) -> Speed | None:
    """Forward and backward of two blocks of width 768 against our own `pre-ln`."""
    return speed(f"T=128: {block}", "pre-ln")
