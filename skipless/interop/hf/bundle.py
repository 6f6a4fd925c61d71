"""The models' own source as files that `transformers` can load where this package is not installed.

`trust_remote_code=True` copies the file that `auto_map` names, and those it imports by `from .name import`, all from
one folder. So the modules that the models need are laid side by side, and their imports of one another are made
relative. Nothing is kept by hand: this reads the sources of the package that does the export.
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from importlib.resources import files
from importlib.util import decode_source
from pathlib import Path, PurePosixPath

from skipless.config.model import ModelConfig
from skipless.config.parts import parts_in

ENTRY = "skipless.interop.hf.modeling"
AUTO_MAP = {
    "AutoConfig": "configuration_skipless.SkiplessConfig",
    "AutoModel": "bare_skipless.SkiplessModel",
    "AutoModelForCausalLM": "modeling_skipless.SkiplessForCausalLM",
    "AutoModelForMaskedLM": "modeling_skipless.SkiplessForMaskedLM",
    "AutoModelForQuestionAnswering": "modeling_skipless.SkiplessForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_skipless.SkiplessForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_skipless.SkiplessForTokenClassification",
}
"""Where each Auto class finds its class in the files of `remote_code`."""


class NotInTheExport(UserWarning):
    """The source of a part cannot travel with an export."""


def remote_code(config: ModelConfig | None = None) -> dict[str, str]:
    """File name → source of everything that the models need of this package, and of the plugins of a configuration."""
    plugins = _plugin_sources(config)
    sources: dict[str, str] = {}
    waiting = [ENTRY, *(need for source in plugins.values() for need in _needs(source))]
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = _read(module)
            waiting += _needs(sources[module])
    note = f"# From skipless {version('skipless')}, MIT licence; made by `skipless export`.\n"
    bundle = {f"{_flat(module)}.py": note + _relative(source) for module, source in sorted(sources.items())}
    for name, source in plugins.items():
        bundle[f"plugin_{name}.py"] = f"{note}{_relative(source)}\n\nPLUGIN = {name!r}\n"
    # of a file that auto_map names, transformers looks whether its imports can be had, and says what is missing
    packages = _packages([*sources.values(), *plugins.values()])
    needs = "".join(f"import {package}  # noqa: E402, F401\n" for package in packages)
    # a configuration names their parts, so they have to be there before one is read
    needs += "".join(f"from .plugin_{name} import PLUGIN  # noqa: E402, F401\n" for name in plugins)
    for reference in set(AUTO_MAP.values()):
        file = f"{reference.split('.')[0]}.py"
        if not bundle[file].endswith(needs):
            bundle[file] += f"\n# what all these files need\n{needs}"
    return bundle


def _plugin_sources(config: ModelConfig | None) -> dict[str, str]:
    """Name → source of each plugin whose parts a model has, if it is one file that can stand by itself."""
    found = {}
    for plugin in {part.plugin for part in parts_in(config) if part.plugin} if config else ():
        source = _source(plugin.file) if plugin.file and plugin.file.is_file() else None
        problem = "its source is no file" if source is None else _problem(source)
        if source is None or problem:
            warnings.warn(
                f"the source of the plugin {plugin} does not go with the export ({problem}): "
                "whoever opens it has to load the plugin first",
                NotInTheExport,
                stacklevel=2,
            )
        else:
            found[plugin.name.rpartition(".")[2]] = source
    return found


def _source(file: Path) -> str:
    """The text of a source in any encoding, without the comment that names it: it travels as UTF-8."""
    first, *rest = decode_source(file.read_bytes()).split("\n", 2)
    return "\n".join([*(re.sub(r"coding([:=])", r"written as\1", line) for line in (first, *rest[:1])), *rest[1:]])


def _problem(source: str) -> str | None:
    """Why a source cannot be laid beside the others, whose imports are by `from skipless… import …`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "skipless" for alias in node.names):
            return "it says `import skipless`: `from skipless.parts import …` can travel"
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "skipless"):
            return "it imports from beside itself, or from `skipless`: `from skipless.parts import …` can travel"
    return None


def _read(module: str) -> str:
    path = PurePosixPath(*module.split(".")[1:]).with_suffix(".py")
    return files("skipless").joinpath(str(path)).read_text(encoding="utf-8")


def _is_module(name: str) -> bool:
    return files("skipless").joinpath(*name.split(".")[1:-1], f"{name.split('.')[-1]}.py").is_file()


def _needs(source: str) -> list[str]:
    """The modules of this package that a source imports."""
    needed = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "skipless":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            needed += [name if _is_module(name) else node.module for name in names]
    return needed


def _packages(sources: Iterable[str]) -> list[str]:
    """The other packages that sources import, but for Python's own."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return sorted({name.split(".")[0] for name in names} - sys.stdlib_module_names - {"skipless"})


def _flat(module: str) -> str:
    """The one name of a module without packages."""
    home, _, name = module.rpartition(".")
    return f"{name}_skipless" if home == "skipless.interop.hf" else module.replace(".", "_")


def _relative(source: str) -> str:
    """The source with imports from this package made relative."""

    def module(match: re.Match[str]) -> str:
        indent, home, names = match.groups()
        name = f"{home}.{names}"
        if re.fullmatch(r"\w+", names) and _is_module(name):
            return f"{indent}from . import {_flat(name)} as {names}"
        return f"{indent}from .{_flat(home)} import {names}"

    return re.sub(r"^( *)from (skipless[\w.]*) import (.*)$", module, source, flags=re.MULTILINE)
