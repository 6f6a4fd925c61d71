"""Small pieces of Markdown."""

import re
from collections.abc import Callable, Sequence

CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$|`[^`\n]+`|\$\$[^$]+\$\$|\$[^$\n]+\$", re.M | re.S)
"""Blocks and pieces of code, and formulas."""


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """A page with everything changed that is no code and no formula."""
    kept: list[str] = []

    def hide(found: re.Match[str]) -> str:
        kept.append(found.group(0))
        return f"\0{len(kept) - 1}\0"

    return re.sub("\0(\\d+)\0", lambda found: kept[int(found.group(1))], change(CODE.sub(hide, text)))


def raised(text: str) -> str:
    """`W^V` and `β_FF` as a page shows them, where they are no code."""

    def change(prose: str) -> str:
        prose = re.sub(r"\bW\^([VPQKO])", r"W<sup>\1</sup>", prose)
        return re.sub(r"([αβγ])_([A-Za-z]+)", r"\1<sub>\2</sub>", prose)

    return outside_code(text, change)


def plain(text: str) -> str:
    """A text whose stars and angle brackets are meant as they stand, but for what is code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


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
