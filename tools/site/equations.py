"""The page of equations: each line of code beside what it computes, and held against the source.

In docs/equations.md the code of a function stands between two comments, in pieces with text between them:

    <!-- lines of skipless.nn.blocks.ParallelBlock.forward -->
    ```python
    ...
    ```

    what these lines compute
    <!-- end of lines -->

Put together, the pieces have to be the function's source, line by line.
"""

import importlib
import inspect
import re
import textwrap
from typing import Any

SECTION = re.compile(r"<!-- lines of ([\w.]+) -->\n(.*?)<!-- end of lines -->\n", re.S)
PIECE = re.compile(r"```python\n(.*?)```\n(.*?)(?=```python\n|\Z)", re.S)


class Drift(Exception):
    """The page and the code differ."""


def find(symbol: str) -> Any:
    """The object of a dotted name."""
    parts = symbol.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise Drift(f"there is no {symbol}")


def pieces(section: str) -> list[tuple[str, str]]:
    """Code and note of each piece of a section."""
    return [(code, note.strip()) for code, note in PIECE.findall(section)]


def check(symbol: str, section: str, source: str | None = None) -> None:
    """Raise where the code of a section is not the source of its function, or where a piece has no note."""
    if source is None:
        source = inspect.getsource(find(symbol))
    wanted = textwrap.dedent(source).splitlines()
    found = "".join(code for code, _ in pieces(section)).splitlines()
    for number in range(max(len(wanted), len(found))):
        line, expected = (lines[number] if number < len(lines) else None for lines in (found, wanted))
        if line != expected:
            raise Drift(f"docs/equations.md, {symbol}, line {number + 1}: the page has {line!r}, the code {expected!r}")
    if silent := [code.splitlines()[0] for code, note in pieces(section) if not note]:
        raise Drift(f"docs/equations.md, {symbol}: nothing is said of {silent[0]!r}")


def sections(text: str) -> dict[str, str]:
    """The sections of the page by the function that they show."""
    return dict(SECTION.findall(text))


WIDE = "---\nhide: [navigation, toc]\n---\n\n"
"""Two columns need the room of the lists beside a page."""


def render(text: str) -> str:
    """The page with notes on the left and code on the right."""

    def side_by_side(found: re.Match[str]) -> str:
        symbol, section = found.groups()
        check(symbol, section)
        rows = [_row(code, note) for code, note in pieces(section)]
        title = f'<p class="source">{symbol.replace("skipless.", "", 1)}</p>'
        return f'<div class="annotated" markdown>\n{title}\n' + "\n".join(rows) + "\n</div>\n"

    return WIDE + SECTION.sub(side_by_side, text)


def _row(code: str, note: str) -> str:
    return (
        f'<div class="note" markdown>\n\n{note}\n\n</div>\n<div class="code" markdown>\n\n'
        f"```python\n{textwrap.dedent(code)}```\n\n</div>"
    )
