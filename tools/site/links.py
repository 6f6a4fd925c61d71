"""Links in pages, before and after they are built."""

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.M | re.S)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)(\))")


def rewrite(text: str, change: Callable[[str], str]) -> str:
    """A page with the target of every link changed; what is code stays as it is."""
    kept: list[str] = []

    def hide(found: re.Match[str]) -> str:
        kept.append(found.group(0))
        return f"\0{len(kept) - 1}\0"

    text = CODE.sub(hide, FENCE.sub(hide, text))
    text = LINK.sub(lambda found: found.group(1) + change(found.group(2)) + found.group(3), text)
    while "\0" in text:
        text = re.sub("\0(\\d+)\0", lambda found: kept[int(found.group(1))], text)
    return text


def is_outside(target: str) -> bool:
    """Whether a link leads to another site."""
    return bool(urlsplit(target).scheme or urlsplit(target).netloc)


# ------------------------------------------------------------------------------ as built


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember what a tag refers to, and what can be referred to."""
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name in ("href", "src") and not (tag == "link" and value.startswith("https:")):
                self.links.append(value)
            elif name == "srcset":
                self.links += [part.split()[0] for part in value.split(",")]


def broken(site: Path) -> Iterator[str]:
    """Every link of a built site that leads nowhere inside it."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            if is_outside(link):
                continue
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            where = path.relative_to(site)
            if not target.is_file():
                yield f"{where}: {link} is not there"
            elif parts.fragment and target in pages and not _has(pages[target], parts.fragment):
                yield f"{where}: {link} has no such anchor"


def _has(page: Page, fragment: str) -> bool:
    return unquote(fragment) in page.anchors or fragment.startswith("__")
