"""The items of `python_next_line`, read from the file beside this one, wherever that is."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """The one split; a context, four lines, and the number of the right one."""
    lines = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
