"""Making the models known to the Auto classes of `transformers` when `skipless` is imported, and importing neither.

Whoever opens a model by an Auto class gets its configuration from `AutoConfig` first. So `import skipless` only waits
for the module that defines `AutoConfig` to be imported, or finds that it was, and registers the configuration there,
which takes no torch. The models are registered when a first configuration is made: by then `transformers` is wholly
imported, and importing more of it cannot run in a circle.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
OLDEST = 5
"""Before this version of `transformers` there is nothing to register with."""


class _WhenImported(MetaPathFinder):
    """Finds the module of `AutoConfig` as Python would, and registers behind its import."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_config()

        spec.loader.exec_module = execute_and_register
        return spec


def watch() -> None:
    """Register now if `transformers` is there, else as soon as it is imported; does nothing a second time."""
    if AUTO_CONFIG in sys.modules:
        register_config()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def register_config() -> None:
    """Make `AutoConfig` know `model_type: skipless`."""
    if int(import_module("transformers").__version__.split(".")[0]) < OLDEST:
        return
    config_class = import_module("skipless.interop.hf.configuration").SkiplessConfig
    sys.modules[AUTO_CONFIG].AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.when_made = register_models


def register_models() -> None:
    """Make the other Auto classes know the models."""
    import transformers

    from skipless.interop.hf import modeling
    from skipless.interop.hf.bundle import remote_code
    from skipless.interop.hf.configuration import SkiplessConfig

    SkiplessConfig.when_made = lambda: None
    SkiplessConfig.sources = remote_code
    for task in ("CausalLM", "MaskedLM", "SequenceClassification"):
        auto = getattr(transformers, f"AutoModelFor{task}")
        auto.register(SkiplessConfig, getattr(modeling, f"SkiplessFor{task}"), exist_ok=True)
