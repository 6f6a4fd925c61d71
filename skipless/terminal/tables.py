"""Tables that lose no cell: one that is too wide for the terminal is laid out in another way, never cut."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from skipless.terminal.console import Console
from skipless.terminal.text import say

GAP = 2
"""Spaces between two columns."""

LONG = 12
"""Width from which on a name may stand as `[1]` in a table, and in full above it."""


@dataclass(frozen=True)
class Grid:
    """A head and its rows; the first column is text, the others are figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    """`[1]` → the long name that it stands for."""

    def columns(self) -> list[tuple[str, ...]]:
        """Each with its head first."""
        return list(zip(self.head, *self.rows, strict=True))

    def widths(self) -> list[int]:
        """The cells that each column needs."""
        return [max(map(cell_len, column)) for column in self.columns()]

    def width(self) -> int:
        """The cells that a line needs."""
        return _line_width(self.widths())

    def turned(self) -> "Grid":
        """Rows as columns."""
        head, *rows = self.columns()
        return Grid(head, tuple(rows), self.keys)

    def keyed(self) -> "Grid":
        """With a key for each long head that is wider than what stands below it."""
        head, keys = list(self.head), dict(self.keys)
        for position, (name, *cells) in enumerate(self.columns()):
            if position and cell_len(name) > max(LONG, *map(cell_len, cells), 0):
                head[position] = f"[{len(keys) + 1}]"
                keys[head[position]] = name
        return Grid(tuple(head), self.rows, keys)

    def parts(self, width: int) -> list["Grid"]:
        """Grids that fit, each with the first column and as many others as there is room for; none if one is wider."""
        first, *others = self.columns()
        found: list[list[tuple[str, ...]]] = []
        for column in others:
            if found and (longer := _of([first, *found[-1], column])).width() <= width:
                found[-1] = longer.columns()[1:]
            else:
                found.append([column])
        grids = [_of([first, *part]) for part in found]
        return grids if grids and all(grid.width() <= width for grid in grids) else []


def _of(columns: Sequence[tuple[str, ...]]) -> Grid:
    head, *rows = zip(*columns, strict=True)
    return Grid(head, tuple(rows))


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def show_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    prose: bool = False,
    console: Console | None = None,
) -> None:
    """Print a table whose first column is text and whose others are figures, or with `prose` sentences in the last.

    Where the terminal is too narrow, rows and columns change places, long names get a key, the columns come in several
    parts, or each row becomes a list, whichever comes first that has room. Sentences alone are folded, between words.
    """
    console = console or Console()
    grid = Grid(tuple(head), tuple(map(tuple, rows)))
    say(title, style="bold", console=console)
    grids = _fitting(_folded(grid, console.width) if prose else grid, console.width, turns=not prose)
    for key, name in grids[0].keys.items() if grids else ():
        _print(console, [f"{key} {name}"])
    for one in grids:
        named, *lines = _lines(one, left=prose)
        _print(console, [named] if named else [], style="bold")
        _print(console, [*lines, ""])
    if not grids:
        _print(console, _records(grid))


def _fitting(grid: Grid, width: int, *, turns: bool) -> list[Grid]:
    """The grid, or another form of it in one part or several, that fits; nothing if none does."""
    turned = grid.turned()
    forms = [grid, grid.keyed(), turned, turned.keyed(), turned.keyed().turned()] if turns else [grid]
    for form in forms:
        if form.width() <= width:
            return [form]
    split = [[Grid(part.head, part.rows, form.keys) for part in form.parts(width)] for form in forms if turns]
    return min(filter(None, split), key=lambda parts: sum(len(part.rows) + 3 for part in parts), default=[])


def _folded(grid: Grid, width: int) -> Grid:
    """With the sentences of the last column folded between words, so that lines have this width if words allow it."""
    room = max(width - _line_width([*grid.widths()[:-1], 0]), 1)
    rows = []
    for *cells, sentence in grid.rows:
        lines = textwrap.wrap(sentence, room, break_long_words=False, break_on_hyphens=False) or [""]
        rows += [(*(cells if not n else [""] * len(cells)), line) for n, line in enumerate(lines)]
    return Grid(grid.head, tuple(rows))


def _lines(grid: Grid, *, left: bool) -> Iterator[str]:
    """The head, a rule, and the rows; figures stand on the right, and the last column on the left if it is text."""
    widths = grid.widths()
    texts = {0, len(widths) - 1} if left else {0}
    for number, row in enumerate([grid.head, *grid.rows]):
        if number == 1:
            yield "─" * _line_width(widths)
        spaces = [" " * (width - cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        cells = [c + s if n in texts else s + c for n, (c, s) in enumerate(zip(row, spaces, strict=True))]
        yield (" " * GAP).join(cells).rstrip()


def _records(grid: Grid) -> Iterator[str]:
    """Every row as a list."""
    for first, *cells in grid.rows:
        yield first
        yield from (f"  {name}: {cell}" for name, cell in zip(grid.head[1:], cells, strict=True) if cell)
    yield ""


def _print(console: Console, lines: Sequence[str] | Iterator[str], style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def figure(value: float | None, digits: int) -> str:
    """A number with as many digits, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"
