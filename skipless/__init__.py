"""skipless: transformer blocks with the unneeded parts taken out (He & Hofmann, ICLR 2024).

    import skipless
    model = skipless.CausalLM(skipless.ModelConfig(block="sas-p", n_layer=18, d_model=768, n_head=12))

Names are loaded when they are first used, so that importing the package, and `skipless --help`, stay quick. With
`from skipless import hf` the Auto classes of `transformers` learn of the models.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("skipless")

if TYPE_CHECKING:
    from skipless.config.block import BLOCKS, BlockConfig, GainConfig, MapConfig
    from skipless.config.model import ModelConfig
    from skipless.config.run import DataConfig, RunConfig, TrainConfig
    from skipless.errors import UserError
    from skipless.nn.masks import Mask
    from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
    from skipless.runs import load
    from skipless.training.fit import fit

_HOMES = {
    "skipless.config": [
        "BLOCKS",
        "BlockConfig",
        "DataConfig",
        "GainConfig",
        "MapConfig",
        "ModelConfig",
        "RunConfig",
        "TrainConfig",
    ],
    "skipless.errors": ["UserError"],
    "skipless.nn.masks": ["Mask"],
    "skipless.nn.model": ["CausalLM", "MaskedLM", "SequenceClassifier"],
    "skipless.runs": ["load"],
    "skipless.training.fit": ["fit"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BLOCKS",
    "BlockConfig",
    "CausalLM",
    "DataConfig",
    "GainConfig",
    "MapConfig",
    "Mask",
    "MaskedLM",
    "ModelConfig",
    "RunConfig",
    "SequenceClassifier",
    "TrainConfig",
    "UserError",
    "__version__",
    "fit",
    "load",
]


_SHORT_NAMES = {"convert": "skipless.interop.gpt2", "hf": "skipless.interop.hf"}
"""Modules that are known by a short name: `skipless.convert.gpt2(...)`."""


def __getattr__(name: str) -> Any:
    if name in _SHORT_NAMES:
        return import_module(_SHORT_NAMES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'skipless' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
