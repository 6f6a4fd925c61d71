"""What the folder of every export holds: the configuration, the tokeniser."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from skipless.config.plugins import plugins_of
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
        content["id2label"] = {str(label): f"LABEL_{label}" for label in range(model.num_labels)}
    content |= model.config.model_dump(mode="json") | plugins_needed(model)
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def plugins_needed(model: Model) -> dict[str, Any]:
    """`plugins`: what an export has to be opened with, without the paths of this machine; nothing if nothing is."""
    found = plugins_of(model.config).get("plugins", [])
    return {"plugins": [{**one, "file": None} for one in found]} if found else {}


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """The tokeniser, where there is one."""
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")


def n_bytes(model: nn.Module) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())
