"""Text for people: folded between words, so that no name is ever broken."""

from rich.cells import cell_len
from rich.text import Text

from skipless.terminal.console import Console


def say(*parts: str | tuple[str, str], style: str = "", indent: int = 0, console: Console | None = None) -> None:
    """Print a paragraph; a part with a style of its own is a pair."""
    console, text = console or Console(), Text.assemble(*parts, style=style)
    longest = max(map(cell_len, text.plain.split()), default=0)
    for line in text.wrap(console, max(console.width - indent, longest)):
        line.rstrip()
        console.print(Text(" " * indent) + line if line else line, soft_wrap=True)
