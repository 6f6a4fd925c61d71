"""skipless models where Hugging Face models go: `from_pretrained`, `generate`, `Trainer`, PEFT.

    import skipless
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("exported")

`import skipless` is enough for the Auto classes to know these models (see `skipless.auto`). Names are loaded when they
are first used: the configuration has to be there before `transformers` is wholly imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skipless.errors import MissingExtra

if TYPE_CHECKING:
    from skipless.hf.configuration import SkiplessConfig
    from skipless.hf.modeling import SkiplessForCausalLM, SkiplessForMaskedLM, SkiplessForSequenceClassification
    from skipless.hf.wrapping import wrap, wrap_tokenizer

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
        raise AttributeError(f"module 'skipless.hf' has no attribute {name!r}")
    try:
        import_module("transformers")
    except ImportError:
        raise MissingExtra("transformers", "hf", "skipless.hf") from None
    return getattr(import_module(f"skipless.hf.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
