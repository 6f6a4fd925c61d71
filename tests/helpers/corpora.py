"""Small corpora for the tests of the data pipeline."""

import json
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Where a subprocess must start to import the tests."""

WORDS = [
    "the",
    "model",
    "has",
    "no",
    "skip",
    "and",
    "trains",
    "def",
    "return",
    "self",
    "if",
    "import",
    "x",
    "y",
    "1",
    "2",
]


def make_texts(n: int, *, words: int = 40, seed: int = 0) -> list[str]:
    """Distinct little documents of a few lines."""
    rng = random.Random(seed)
    return [f"# {i}\n" + "".join(rng.choice(WORDS) + rng.choice("  \n") for _ in range(words)) for i in range(n)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path
