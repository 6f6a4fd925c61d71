"""Making the models known to the Auto classes of `transformers`, when `skipless.hf` is imported.

`transformers` has no entry point by which a package that is only installed could say what it brings, so one import is
needed; and that of `skipless` alone takes neither torch nor `transformers`.
"""

import transformers
from transformers import AutoConfig

OLDEST = 5
"""Before this version of `transformers` there is nothing to register with."""

AUTO = {
    "AutoModel": "SkiplessModel",
    "AutoModelForCausalLM": "SkiplessForCausalLM",
    "AutoModelForMaskedLM": "SkiplessForMaskedLM",
    "AutoModelForSequenceClassification": "SkiplessForSequenceClassification",
    "AutoModelForTokenClassification": "SkiplessForTokenClassification",
    "AutoModelForQuestionAnswering": "SkiplessForQuestionAnswering",
}
"""Auto class → model."""


def register() -> None:
    """Make the Auto classes know `model_type: skipless`."""
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        return
    from skipless.interop.hf import modeling
    from skipless.interop.hf.bundle import remote_code
    from skipless.interop.hf.configuration import SkiplessConfig

    AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig, exist_ok=True)
    SkiplessConfig.sources = remote_code
    for auto, name in AUTO.items():
        getattr(transformers, auto).register(SkiplessConfig, getattr(modeling, name), exist_ok=True)
