"""The tree is the chart: imports go one way, and the chart in docs/architecture.md is what is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "skipless"

ORDER = (
    "errors",
    "config",
    "recipes",
    "nn",
    "parts",
    "storage",
    "data",
    "runtime",
    "runs",
    "distributed",
    "analysis",
    "testing",
    "training",
    "interop",
    "tasks",
    "experiments",
    "terminal",
    "cli",
)
"""Each may import what stands before it, and itself. The package's own `__init__` and `__main__` stand outside."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__main__.py",))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> Iterator[str]:
    """Every module of this package that a source imports, at its top, in a function, or for an annotation."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            if node.module and node.module.split(".")[0] == "skipless":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "skipless")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                given.value
                for given in node.args
                if isinstance(given, ast.Constant) and str(given.value).startswith("skipless.")
            )


def steps_back(path: Path, source: str) -> list[str]:
    """The imports of a module that go against the order."""
    own = name_of(path).split(".")
    if len(own) == 1:
        return []
    allowed = ORDER[: ORDER.index(own[1]) + 1]
    return [name for name in imported(source) if len(name.split(".")) < 2 or name.split(".")[1] not in allowed]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    assert steps_back(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from skipless.training.train import train",
        "def f():\n    from skipless.cli import main",
        "import skipless.experiments.pool",
        "from skipless import __version__",
        "if TYPE_CHECKING:\n    from skipless.analysis.health import health",
        "import_module('skipless.interop.hf')",
    ],
)
def test_a_step_back_is_found(source):
    assert steps_back(PACKAGE / "nn" / "made_up.py", source)


def test_the_top_level_has_five_modules():
    alone = {"errors", "parts", "testing"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", *alone}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | alone == set(ORDER)


# ------------------------------------------------------------------------------ the chart

DOCUMENT = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- files: `python -m tests.test_architecture` writes this table -->\n", "<!-- end of files -->\n")


def first_sentence(path: Path) -> str:
    """What a module says that it is: the first sentence, or line, of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".").replace("|", "\\|")


def chart() -> str:
    """Every module by package, in the order of the imports."""
    lines = []
    for package in ORDER:
        paths = [PACKAGE / f"{package}.py"] if (PACKAGE / f"{package}.py").exists() else []
        paths += sorted(
            (PACKAGE / package).rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path.name)
        )
        lines += [f"| `{path.relative_to(PACKAGE)}` | {first_sentence(path)}. |" for path in paths]
    return "\n".join(["| file in `skipless/` | what is in it |", "| --- | --- |", *lines]) + "\n"


def test_every_module_says_what_it_is():
    assert [name_of(path) for path in MODULES if not first_sentence(path)] == []


def test_the_documented_files_are_those_that_are_there():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.split(MARKS[0])[1].split(MARKS[1])[0] == chart()


def test_the_documented_order_is_the_order():
    text = DOCUMENT.read_text(encoding="utf-8")
    (lines,) = re.findall(r"^config ←[^`]*", text, flags=re.M)
    assert [name for name in ORDER if name != "errors"] == " ".join(lines.split()).split(" ← ")


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(MARKS[0])
    DOCUMENT.write_text(before + MARKS[0] + chart() + MARKS[1] + rest.partition(MARKS[1])[2], encoding="utf-8")
