"""skipless models where Hugging Face models go: `from_pretrained`, `generate`, `Trainer`, PEFT.

    import skipless
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("exported")

`import skipless` is enough for the Auto classes to know these models (see `auto.py`). Names are loaded when they are
first used: the configuration has to be there before `transformers` is wholly imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skipless.errors import MissingExtra

if TYPE_CHECKING:
    from skipless.interop.hf.configuration import SkiplessConfig
    from skipless.interop.hf.modeling import SkiplessForCausalLM, SkiplessForMaskedLM, SkiplessForSequenceClassification
    from skipless.interop.hf.wrapping import wrap, wrap_tokenizer

_HOME = {
    "SkiplessConfig": "configuration",
    "SkiplessForCausalLM": "modeling",
    "SkiplessForMaskedLM": "modeling",
    "SkiplessForSequenceClassification": "modeling",
    "wrap": "wrapping",
    "wrap_tokenizer": "wrapping",
}

__all__ = [
    "SkiplessConfig",
    "SkiplessForCausalLM",
    "SkiplessForMaskedLM",
    "SkiplessForSequenceClassification",
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
