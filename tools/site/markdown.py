"""Small pieces of Markdown."""

import re
from collections.abc import Sequence


def plain(text: str) -> str:
    """A text whose stars and angle brackets are meant as they stand, but for what is code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<\\])", r"\\\1", part) for part in parts)


def cell(text: str) -> str:
    """A text in a table, which has one line."""
    return " ".join(text.replace("|", "\\|").split())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def themed(title: str, path: str, ending: str) -> str:
    """A picture that is there light and dark."""
    return f"![{title}]({path}-light.{ending}#only-light)\n![{title}]({path}-dark.{ending}#only-dark)\n"
