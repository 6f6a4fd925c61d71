"""skipless models where Hugging Face models go: `from_pretrained`, `generate`, `Trainer`, PEFT, TRL.

    from skipless import hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("exported")

With this import the Auto classes know these models (see `auto.py`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skipless.errors import MissingExtra

if TYPE_CHECKING:
    from skipless.interop.hf.bare import SkiplessModel
    from skipless.interop.hf.configuration import SkiplessConfig
    from skipless.interop.hf.modeling import (
        SkiplessForCausalLM,
        SkiplessForMaskedLM,
        SkiplessForQuestionAnswering,
        SkiplessForSequenceClassification,
        SkiplessForTokenClassification,
    )
    from skipless.interop.hf.wrapping import unwrap, wrap, wrap_tokenizer

_HOME = {
    "SkiplessConfig": "configuration",
    "SkiplessForCausalLM": "modeling",
    "SkiplessForMaskedLM": "modeling",
    "SkiplessForQuestionAnswering": "modeling",
    "SkiplessForSequenceClassification": "modeling",
    "SkiplessForTokenClassification": "modeling",
    "SkiplessModel": "bare",
    "unwrap": "wrapping",
    "wrap": "wrapping",
    "wrap_tokenizer": "wrapping",
}

__all__ = [
    "SkiplessConfig",
    "SkiplessForCausalLM",
    "SkiplessForMaskedLM",
    "SkiplessForQuestionAnswering",
    "SkiplessForSequenceClassification",
    "SkiplessForTokenClassification",
    "SkiplessModel",
    "unwrap",
    "wrap",
    "wrap_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'skipless.interop.hf' has no attribute {name!r}")
    try:
        import_module("transformers")
    except ImportError:
        raise MissingExtra("transformers", "hf", "skipless.interop.hf") from None
    return getattr(import_module(f"skipless.interop.hf.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__


if find_spec("transformers") is not None:
    import_module("skipless.interop.hf.auto").register()
