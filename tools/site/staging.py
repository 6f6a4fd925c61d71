"""All pages in one folder: those of docs/, with links that hold on the site, and those that code writes."""

import posixpath
import shutil
from pathlib import Path

from tools.site import DOCS, ROOT, STAGED, api, commands, configuration, equations, gallery, results
from tools.site.links import is_outside, rewrite

LEFT_OUT = ("results",)
"""Folders of docs/ that are not copied: results are made from the archive of runs."""

MOVED = {"results/report.md": "results/index.md"}
"""Files of docs/ that have another name on the site."""


class Lost(Exception):
    """A link that leads out of the site, to a file that is not shown on it."""


def stage() -> Path:
    """Write every page anew, and return their folder."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        relative = path.relative_to(DOCS)
        if path.is_file() and relative.parts[0] not in LEFT_OUT:
            _copy(path, relative)
    for name, text in written_pages().items():
        _write(name, text)
    gallery.write(STAGED / "blocks")
    results.write(STAGED / "results")
    return STAGED


def written_pages() -> dict[str, str]:
    """The pages that code writes, without those that have plots."""
    return {
        "configuration.md": configuration.page(),
        "commands.md": commands.page(),
        "examples.md": examples(),
        "notes/changelog.md": rewrite((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), _from_root),
        **api.pages(),
    }


def _write(name: str, text: str) -> None:
    path = STAGED / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(path: Path, relative: Path) -> None:
    if path.suffix != ".md":
        (STAGED / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, STAGED / relative)
        return
    text = path.read_text(encoding="utf-8")
    if relative.as_posix() == "equations.md":
        text = equations.render(text)
    _write(relative.as_posix(), rewrite(text, lambda target: site_link(relative.as_posix(), target)))


def site_link(page: str, target: str) -> str:
    """Where a link of a page of docs/ leads on the site."""
    if is_outside(target) or target.startswith("#"):
        return target
    path, mark, anchor = target.partition("#")
    whole = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if whole.startswith("examples/"):
        place = f"examples.md#{anchor_of(Path(whole).name)}"
        return posixpath.relpath(place, posixpath.dirname(page) or ".")
    if not whole.startswith("docs/"):
        raise Lost(f"docs/{page}: {target} leads to {whole}, which is not on the site")
    inside = whole.removeprefix("docs/")
    inside = MOVED.get(inside, inside)
    return posixpath.relpath(inside, posixpath.dirname(page) or ".") + mark + anchor


def _from_root(target: str) -> str:
    """A link of a page at the root of the repository, from `notes/` on the site."""
    if is_outside(target):
        return target
    return site_link("notes/changelog.md", f"../../{target}")


def anchor_of(file: str) -> str:
    """The anchor of an example on the page of examples."""
    return file.removesuffix(".py").replace("_", "-")


def examples() -> str:
    """Every example with its source."""
    parts = ["# Examples\n\nFiles of the folder `examples`; the tests run them.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        title = source.split('"""')[1].split("\n")[0].rstrip(".")
        code = "".join(f"    {line}\n" for line in f"```python\n{source}```".splitlines())
        parts.append(f'## {path.name} {{ #{anchor_of(path.name)} }}\n\n{title}.\n\n??? example "{path.name}"\n\n{code}')
    return "\n".join(parts)
