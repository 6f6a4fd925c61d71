"""What the folder of every export holds: the configuration, the tokeniser."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from skipless.data import Tokenizer
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.nn.saving import described

Model = CausalLM | MaskedLM | SequenceClassifier


ONE_FILE = 1 << 30
"""Bytes of weights up to which they lie inside the ONNX file; beyond 2 GB that is not possible."""


SOURCE_MARK = "# From skipless "
"""How each file of source in an export begins."""


def write_config(model: Model, folder: Path, more: dict[str, Any] | None = None) -> None:
    """The configuration, as Hugging Face's libraries keep one, with what else a format has to say."""
    text = json.dumps(described(model) | (more or {}), indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """The tokeniser, where there is one."""
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")


def n_bytes(model: nn.Module) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())
