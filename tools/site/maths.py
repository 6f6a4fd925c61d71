"""`$…$` and `$$…$$` as MathML, which browsers draw by themselves: no script, no font, no network."""

import re
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor


class MathsProcessor(InlineProcessor):
    """One formula, in a line or, between double dollars, on a line of its own."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # noqa: N802
        block, inline = m.group(1), m.group(2)
        formula = convert(block or inline, display="block" if block else "inline")
        return self.md.htmlStash.store(formula), m.start(0), m.end(0)


class MathsExtension(Extension):
    """Formulas in Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Before emphasis, so that an underscore is a subscript, and after code, in which a dollar is one."""
        md.inlinePatterns.register(MathsProcessor(r"\$\$([^$]+)\$\$|\$([^$\n]+(?:\n[^$\n]+)?)\$", md), "maths", 182)


def makeExtension(**options: object) -> MathsExtension:  # noqa: N802
    """What Markdown looks for."""
    return MathsExtension(**options)
