"""What the folder of every export holds: the configuration, the tokeniser."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from skipless.data import Tokenizer
from skipless.nn.kernels import plain_type
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.runs import ARCHITECTURES, MODEL_TYPE

Model = CausalLM | MaskedLM | SequenceClassifier


ONE_FILE = 1 << 30
"""Bytes of weights up to which they lie inside the ONNX file; beyond 2 GB that is not possible."""


def write_config(model: Model, folder: Path) -> None:
    """The configuration, as Hugging Face's libraries keep one."""
    name = next(name for name, kind in ARCHITECTURES.items() if plain_type(model) is kind)
    content: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [name],
        "skipless_version": version("skipless"),
    }
    if isinstance(model, SequenceClassifier):
        content |= classifier_keys(model)
    content |= model.config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def classifier_keys(model: SequenceClassifier) -> dict[str, Any]:
    """What an export says of a classifier beside its configuration: its classes, its inputs, where its head sits."""
    names = model.labels or tuple(f"LABEL_{label}" for label in range(model.num_labels))
    kind = "regression" if model.num_labels == 1 else "single_label_classification"
    keys: dict[str, Any] = {"id2label": {str(number): name for number, name in enumerate(names)}, "problem_type": kind}
    keys |= {"causal": True} if model.causal else {}
    keys |= {"max_input": model.max_input, "texts": list(model.texts)} if model.max_input else {}
    return keys


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """The tokeniser, where there is one."""
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")


def n_bytes(model: nn.Module) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())
