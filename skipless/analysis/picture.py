"""Blocks as a picture: an SVG that is made from their configurations, light or dark, and loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from skipless.analysis.drawing import gain_name, maps_name, mixing_name, mlp_name, norm_name
from skipless.config.block import BlockConfig, GainConfig
from skipless.nn.layers import is_identity

WIDTH = 330
"""Of a block's column."""

STEP = 22
"""The length of an arrow."""

FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Palette:
    """Colours by what they are for: the fill and the edge of each kind of part, lines, text, and the paper."""

    line: str
    text: str
    soft: str
    """Text of less weight."""
    skip: str
    paper: str
    parts: Mapping[str, tuple[str, str]]


LIGHT = Palette(
    line="#57606a",
    text="#1f2328",
    soft="#57606a",
    skip="#9a6700",
    paper="#ffffff",
    parts={
        "norm": ("#f0f2f4", "#8c959f"),
        "attention": ("#ddeeff", "#0072b2"),
        "mlp": ("#ffe8dc", "#d55e00"),
        "gain": ("#ffffff", "#57606a"),
    },
)
DARK = Palette(
    line="#9aa4af",
    text="#f0f3f6",
    soft="#a9b3bd",
    skip="#e3b341",
    paper="#0d1117",
    parts={
        "norm": ("#262c34", "#7d8792"),
        "attention": ("#0f2f4a", "#58a6ff"),
        "mlp": ("#43220f", "#f0883e"),
        "gain": ("#0d1117", "#9aa4af"),
    },
)


def block_picture(
    blocks: Mapping[str, BlockConfig],
    *,
    dark: bool = False,
    paper: bool = False,
    captions: Mapping[str, str] | None = None,
) -> str:
    """Blocks side by side, each under its name and its caption; with `paper` on a ground of its own."""
    colours = DARK if dark else LIGHT
    columns = [
        _column(name, block, colours, WIDTH * position, (captions or {}).get(name, ""))
        for position, (name, block) in enumerate(blocks.items())
    ]
    width, height = WIDTH * len(columns), max(column.y for column in columns) + 10
    words = " ".join(_in_words(name, block) for name, block in blocks.items())
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="{colours.paper}"/>' if paper else ""
    parts = "\n".join(part for column in columns for part in column.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="15">\n<title>{escape(words)}</title>\n{_heads(colours)}\n'
        f"{ground}{parts}\n</svg>\n"
    )


def _in_words(name: str, block: BlockConfig) -> str:
    """What somebody hears who cannot see it."""
    skips = [gain for gain in (block.alpha_sa, block.alpha_ff, block.alpha_comb) if gain]
    order = "then" if block.layout == "sequential" else "beside"
    norm = norm_name(block)[0] if norm_name(block) else "no norm"
    count = {0: "no skip", 1: "one skip"}.get(len(skips), f"{len(skips)} skips")
    return f"{name}: attention {mixing_name(block)} {maps_name(block)} {order} {mlp_name(block)}, {norm}, {count}."


def _heads(colours: Palette) -> str:
    """The heads of arrows, one for each colour of lines."""
    head = '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0.6 L7.6 4 L0 7.4 z" fill="{}"/></marker>'
    return f"<defs>{head.format('line', colours.line)}{head.format('skip', colours.skip)}</defs>"


# ------------------------------------------------------------------------------- a column


@dataclass
class Column:
    """A flow from the top to the bottom: `y` is where it has come to, `x` where its line runs."""

    x: float
    colours: Palette
    y: float = 0.0
    parts: list[str] = field(default_factory=list)

    def arrow(self, points: Sequence[tuple[float, float]], kind: str = "line", *, head: bool = True) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        colour, end = getattr(self.colours, kind), f' marker-end="url(#{kind})"' if head else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{end}/>')

    def down(self, length: float = STEP, *, head: bool = True) -> None:
        """The line goes on."""
        self.arrow([(self.x, self.y), (self.x, self.y + length)], head=head)
        self.y += length

    def text(
        self,
        text: str,
        x: float,
        y: float,
        *,
        size: int = 15,
        soft: bool = False,
        bold: bool = False,
        as_it_is: bool = False,
    ) -> None:
        """A line of text around a point: `W^V` and `β_SA` with raised and lowered letters, unless it is a name."""
        colour = self.colours.soft if soft else self.colours.text
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" fill="{colour}"{weight}>'
            f"{escape(text) if as_it_is else _raised(text)}</text>"
        )

    def box(self, kind: str, lines: Sequence[str], x: float, y: float, width: float) -> float:
        """A part, with its top at `y`; gives its height."""
        fill, edge = self.colours.parts[kind]
        height = 14 + 19 * len(lines)
        self.parts.append(
            f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1.5"/>'
        )
        for number, line in enumerate(lines):
            first = number == 0
            self.text(line, x, y + 21 + 19 * number, size=15 if first else 14, bold=first and kind != "norm")
        return height

    def gain(self, text: str, x: float, y: float) -> float:
        """A gain on a line, with its top at `y`; gives its height."""
        fill, edge = self.colours.parts["gain"]
        width = 18 + 8.5 * len(text.lstrip("·").replace("_", ""))
        self.parts.append(
            f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="24" rx="12" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1.2"/>'
        )
        self.text(text.lstrip("·"), x, y + 17, size=14)
        return 24

    def plus(self) -> float:
        """A sum on the line; gives the height of its middle."""
        middle = self.y + 11
        self.parts.append(
            f'<circle cx="{self.x:g}" cy="{middle:g}" r="11" fill="{self.colours.parts["gain"][0]}" '
            f'stroke="{self.colours.line}" stroke-width="1.8"/>'
        )
        self.text("+", self.x, middle + 6, size=18)
        self.y += 22
        return middle

    def dot(self) -> None:
        """Where something leaves the line."""
        self.parts.append(f'<circle cx="{self.x:g}" cy="{self.y:g}" r="3.2" fill="{self.colours.line}"/>')


def _raised(text: str) -> str:
    """`W^V` and `β_SA` in SVG."""
    out, position = "", 0
    while position < len(text):
        letter = text[position]
        if letter in "^_":
            end = position + 1
            while end < len(text) and text[end].isalnum():
                end += 1
            shift = -0.38 if letter == "^" else 0.28
            small = f'<tspan dy="{shift}em" font-size="72%">{escape(text[position + 1 : end])}</tspan>'
            rest = "\u200b"  # what follows goes back to the line, even where nothing follows
            out += f'{small}<tspan dy="{-shift * 0.72:.3f}em">{rest}</tspan>'
            position = end
        else:
            out += escape(letter)
            position += 1
    return out


def _column(name: str, block: BlockConfig, colours: Palette, left: float, caption: str) -> Column:
    column = Column(left + WIDTH / 2, colours)
    column.text(name, column.x, 24, size=18, bold=True, as_it_is=True)
    column.y = 28
    if caption:
        column.text(caption, column.x, 44, size=14, soft=True, as_it_is=True)
        column.y = 50
    column.text("x", column.x, column.y + 20)
    column.y += 28
    (_sequential if block.layout == "sequential" else _parallel)(column, block)
    column.down()
    column.text("out", column.x, column.y + 15)
    column.y += 20
    return column


def _attention_lines(block: BlockConfig) -> list[str]:
    """The attention as it is written in its box."""
    lines = ["Attention", f"{mixing_name(block)} {maps_name(block)}"]
    if len(lines[1].replace("^", "")) > 20:
        lines[1:] = [mixing_name(block), maps_name(block)]
    return lines


def _first_layer(block: BlockConfig) -> list[str]:
    """What only the first layer has."""
    if block.first_value is None or is_identity(block.first_value):
        return []
    return ["W^V in layer 1 only" if is_identity(block.value) else "another W^V in layer 1"]


def _mlp_lines(block: BlockConfig) -> list[str]:
    name, _, rest = mlp_name(block).partition("[")
    return [name, rest.strip(" ]")] if rest else [name]


# ----------------------------------------------------------------------------- equation 1


def _sequential(column: Column, block: BlockConfig) -> None:
    """Attention, then MLP, each with its skip on the right."""
    branches = (
        ("attention", [*_attention_lines(block), *_first_layer(block)], block.alpha_sa, block.beta_sa, "SA"),
        ("mlp", _mlp_lines(block), block.alpha_ff, block.beta_ff, "FF"),
    )
    for kind, lines, alpha, beta, symbol in branches:
        if beta is None:
            continue
        start = column.y + 8
        column.down(8, head=False)
        if alpha:
            column.dot()
        column.down(16)
        if block.norm_position == "pre":
            _norm(column, block)
        column.y += column.box(kind, lines, column.x, column.y, 196)
        _gain(column, beta, f"β_{symbol}")
        if alpha:
            column.down()
            middle = column.plus()
            _skip(column, start, middle, alpha, f"α_{symbol}")
        if block.norm_position == "post":
            column.down()
            column.y += column.box("norm", norm_name(block), column.x, column.y, 130) if norm_name(block) else 0


def _norm(column: Column, block: BlockConfig) -> None:
    for name in norm_name(block):
        column.y += column.box("norm", [name], column.x, column.y, 130)
        column.down()


def _gain(column: Column, gain: GainConfig | None, symbol: str) -> None:
    for text in gain_name(gain, symbol):
        column.down(12, head=False)
        column.y += column.gain(text, column.x, column.y)


def _skip(column: Column, start: float, end: float, gain: GainConfig, symbol: str) -> None:
    """A line around a branch, into its sum."""
    side = column.x + 128
    column.arrow([(column.x, start), (side, start), (side, end), (column.x + 12, end)], "skip")
    for text in gain_name(gain, symbol):
        column.gain(text, side, (start + end) / 2 - 12)


# ----------------------------------------------------------------------------- equation 7


def _parallel(column: Column, block: BlockConfig) -> None:
    """Attention on the left and MLP on the right of one norm; a skip around both."""
    start = column.y + 8
    column.down(8, head=False)
    if block.alpha_comb:
        column.dot()
    for name in norm_name(block):
        column.down(16)
        column.y += column.box("norm", [name], column.x, column.y, 130)
    column.down(10, head=False)
    column.dot()
    bottoms = [_branch(column, *branch) for branch in _branches(block)]
    middle = max(bottom for _, bottom in bottoms) + 24
    for x, bottom in bottoms:
        side = 12 if x > column.x else -12
        path = [(x, middle), (column.x + side, middle)] if x != column.x else [(x, middle - 12)]
        column.arrow([(x, bottom), *path])
    column.y = middle - 11
    column.plus()
    if block.alpha_comb:
        column.down()
        _skip(column, start, column.plus(), block.alpha_comb, "α_comb")


Branch = tuple[str, list[str], GainConfig | None, str, float, float]
"""Kind, text, gain and its symbol; how far from the middle it stands, and how wide it is."""


def _branches(block: BlockConfig) -> list[Branch]:
    """Those of the two that are there; one alone stands in the middle."""
    attention = [*_attention_lines(block), *_first_layer(block)]
    two: list[Branch] = [
        ("attention", attention, block.beta_sa, "β_SA", -74.0, 150.0),
        ("mlp", _mlp_lines(block), block.beta_ff, "β_FF", 66.0, 84.0),
    ]
    there = [branch for branch in two if branch[2]]
    return there if len(there) == 2 else [(*branch[:4], 0.0, 150.0) for branch in there]


def _branch(
    column: Column, kind: str, lines: list[str], gain: GainConfig | None, symbol: str, shift: float, width: float
) -> tuple[float, float]:
    """A branch from the fork to where its line goes on."""
    x, top = column.x + shift, column.y + 18
    column.arrow([(column.x, column.y), (x, column.y), (x, top)])
    bottom = top + column.box(kind, lines, x, top, width)
    for text in gain_name(gain, symbol):
        column.arrow([(x, bottom), (x, bottom + 12)], head=False)
        bottom += 12 + column.gain(text, x, bottom + 12)
    return x, bottom
