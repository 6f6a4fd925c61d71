"""Labelled rows of one's own, whose answers can be read off the first word."""

import csv
import json
import random
from pathlib import Path

from tests.helpers.glue_files import sentence

CLASSES = ("bad", "fair", "good")


def rows(count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    drawn = [rng.randrange(3) for _ in range(count)]
    return [
        {"id": str(n), "body": sentence(rng, c), "mood": CLASSES[c], "grade": f"{c}.5"} for n, c in enumerate(drawn)
    ]


def write(path: Path, made: list[dict[str, str]]) -> Path:
    """In the format that the name says."""
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in made)
        elif path.suffix == ".csv":
            table = csv.DictWriter(file, list(made[0]))
            table.writeheader()
            table.writerows(made)
        else:
            file.writelines("\t".join(row) + "\n" for row in [list(made[0]), *(list(row.values()) for row in made)])
    return path


def three_classes(folder: Path, suffix: str = ".tsv") -> tuple[Path, Path, Path]:
    """Rows to train on, to validate on, and to be asked."""
    folder.mkdir(exist_ok=True, parents=True)
    parts = (("train", 96, 0), ("valid", 24, 1), ("test", 18, 2))
    return tuple(write(folder / f"{name}{suffix}", rows(count, seed)) for name, count, seed in parts)
