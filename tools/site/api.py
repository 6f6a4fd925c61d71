"""The reference of the Python interface, from signatures and docstrings."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from skipless.config.base import Config
from tools.site import ROOT

MODULES: dict[str, tuple[str, str]] = {
    "skipless": ("skipless", "What most programs need."),
    "skipless.nn": ("skipless.nn", "The equations as modules."),
    "skipless.parts": ("skipless.parts", "What a plugin imports."),
    "skipless.testing": ("skipless.testing", "What parts are held to."),
    "skipless.recipes": ("skipless.recipes", "Configurations to begin with."),
    "skipless.analysis.inspection": ("skipless.analysis", "What a configuration costs, and its signal."),
    "skipless.tasks.predict": ("skipless.tasks.predict", "Asking a classifier."),
    "skipless.tasks.own_labels": ("skipless.tasks.own_labels", "Fine-tuning on labelled rows."),
    "skipless.interop.hf": ("skipless.hf", "Models of `transformers`."),
    "skipless.interop.gpt2": ("skipless.convert", "Models from elsewhere."),
    "skipless.interop.export": ("skipless.interop.export", "Models for others."),
}
"""Module → the name that users know it by, and what it is for."""


def pages() -> dict[str, str]:
    """Every page by its path."""
    names = {module: _public(importlib.import_module(module)) for module in MODULES}
    found = {f"api/{title}.md": _page(module, title, what, names[module]) for module, (title, what) in MODULES.items()}
    rows = [
        f"| [`{title}`]({title}.md) | {what} | {', '.join(f'`{name}`' for name in names[module])} |"
        for module, (title, what) in MODULES.items()
    ]
    head = ["# Python interface", "", "Written from signatures and docstrings.", ""]
    table = ["| module | | names |", "| --- | --- | --- |", *rows, ""]
    return {"api/index.md": "\n".join([*head, *table]), **found}


def _public(module: ModuleType) -> list[str]:
    """The names that a module offers: those it lists, else the functions and classes that are defined in it."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    own = inspect.getmembers(module, lambda one: inspect.isclass(one) or inspect.isfunction(one))
    return [name for name, one in own if one.__module__ == module.__name__ and not name.startswith("_")]


def _page(module: str, title: str, what: str, names: list[str]) -> str:
    found = importlib.import_module(module)
    lines = [f"# {title}", "", what, ""]
    if found.__doc__ and module != "skipless":
        lines += [docstring(found), ""]
    for name in names:
        lines += _entry(name, getattr(found, name), module)
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, one: Any, module: str) -> list[str]:
    home = (getattr(one, "__module__", None) or "").split(".")[0]
    if (inspect.isclass(one) or inspect.isfunction(one)) and home != "skipless":
        return [f"## `{name}`", "", f"`{home}.{name}`, for convenience.", ""]
    if inspect.isclass(one):
        members = [line for member, method in _methods(one) for line in _function(member, method, level=3)]
        return [
            f"## `{name}`",
            "",
            _code(_class_signature(name, one)),
            "",
            docstring(one),
            "",
            _origin(one),
            "",
            *members,
        ]
    if inspect.isfunction(one):
        return [*_function(name, one, level=2), _origin(one), ""]
    note = _comment_of(name, module)
    return [f"## `{name}`", "", note or f"A {type(one).__name__}.", ""]


def _class_signature(name: str, one: type) -> str:
    if hasattr(one, "model_fields"):
        return f"class {name}  # its keys: see the configuration"
    own = [cls for cls in one.__mro__ if "__init__" in vars(cls) and cls.__module__.split(".")[0] == "skipless"]
    if not own or is_dataclass(one):
        return f"class {name}"
    return f"class {name}{_arguments(own[0].__init__)}"


def _methods(one: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that have something to say, those of our own parents included."""
    seen: set[str] = set()
    for cls in one.__mro__:
        if cls.__module__.split(".")[0] != "skipless" or cls is Config:
            continue
        for name, method in vars(cls).items():
            method = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            inner = method.fget if isinstance(method, property) else method
            if not name.startswith("_") and name not in seen and inspect.isfunction(inner) and inner.__doc__:
                seen.add(name)
                yield name, method


def _function(name: str, one: Any, level: int) -> list[str]:
    title = f"{'#' * level} `{name}`"
    if isinstance(one, property):
        return [title, "", _code(f"{name}: {_definition(one.fget).returns_text}"), "", docstring(one.fget), ""]
    return [title, "", _code(f"{name}{_arguments(one)}"), "", docstring(one), ""]


class Definition:
    """A function as its source declares it."""

    def __init__(self, function: Any) -> None:
        self.node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
        assert isinstance(self.node, ast.FunctionDef)

    @property
    def returns_text(self) -> str:
        """What it returns."""
        return ast.unparse(self.node.returns).strip("'") if self.node.returns else ""  # pyrefly: ignore

    @property
    def arguments(self) -> list[str]:
        """Each argument with its type and its default."""
        args: ast.arguments = self.node.args  # pyrefly: ignore
        plain = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
        found = [_argument(*pair) for pair in zip(plain, defaults, strict=True)]
        found += [f"*{_argument(args.vararg)}"] if args.vararg else ["*"] if args.kwonlyargs else []
        found += [_argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        found += [f"**{_argument(args.kwarg)}"] if args.kwarg else []
        return found[1:] if plain and plain[0].arg in ("self", "cls") else found


def _argument(arg: ast.arg, default: ast.expr | None = None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    equals = " = " if kind else "="
    return f"{arg.arg}{kind}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")


_definition = cache(Definition)


def _arguments(one: Any) -> str:
    """The arguments of a function, a line for each where they are many."""
    found = _definition(one)
    returns = f" -> {found.returns_text}" if found.returns_text and one.__name__ != "__init__" else ""
    short = f"({', '.join(found.arguments)}){returns}"
    return short if len(short) < 90 else "(\n    " + ",\n    ".join(found.arguments) + f",\n){returns}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def docstring(one: Any) -> str:
    """A docstring as Markdown: what is indented in it is code."""
    text = inspect.getdoc(one) or ""
    return re.sub(r"(?:^ {4,}.*\n?(?:\n(?= {4,}))?)+", _indented, text, flags=re.M)


def _indented(found: re.Match[str]) -> str:
    lines = found.group(0).rstrip("\n").split("\n")
    return "\n```text\n" + "\n".join(line[4:] for line in lines) + "\n```\n"


def _origin(one: Any) -> str:
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(one)) or "").relative_to(ROOT)
    except (TypeError, ValueError):
        return ""
    return f"Defined in `{path}`."


def _comment_of(name: str, module: str) -> str:
    """The text under a constant, which is its description here: looked for where it is defined."""
    for place in (module, "skipless.nn.layers", "skipless.config.block"):
        source = inspect.getsource(importlib.import_module(place))
        found = re.search(rf'^{re.escape(name)}\b[^\n]*=.*?\n"""(.*?)"""', source, flags=re.M | re.S)
        if found and "\n\n\n" not in found.group(0):
            return " ".join(found.group(1).split())
    return ""
