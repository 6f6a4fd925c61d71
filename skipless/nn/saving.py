"""A model as a folder of plain files: config.json, model.safetensors, and the tokeniser's file."""

import json
import os
import secrets
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skipless.config.plugins import plugins_needed
from skipless.errors import UserError
from skipless.nn.kernels.install import plain_type
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier, Transformer
from skipless.nn.stack import refuse_folded

MODEL_TYPE = "skipless"
"""`model_type` of config.json."""

ARCHITECTURES: dict[str, type[CausalLM] | type[MaskedLM] | type[SequenceClassifier]] = {
    "SkiplessForCausalLM": CausalLM,
    "SkiplessForMaskedLM": MaskedLM,
    "SkiplessForSequenceClassification": SequenceClassifier,
}


def described(model: Transformer) -> dict[str, Any]:
    """The content of config.json, as Hugging Face's libraries keep one."""
    name = next((name for name, kind in ARCHITECTURES.items() if plain_type(model) is kind), None)
    if name is None:
        known = ", ".join(kind.__name__ for kind in ARCHITECTURES.values())
        raise UserError(f"a {type(model).__name__} cannot be saved as one of {known}: save its state_dict yourself")
    content = {"model_type": MODEL_TYPE, "architectures": [name], "skipless_version": version("skipless")}
    if isinstance(model, SequenceClassifier):
        content |= classifier_keys(model)
    return content | model.config.model_dump(mode="json") | plugins_needed(model.config)


def classifier_keys(model: SequenceClassifier) -> dict[str, Any]:
    """What config.json says of a classifier beside its configuration: its classes, its inputs, where its head sits."""
    names = model.labels or tuple(f"LABEL_{label}" for label in range(model.num_labels))
    kind = "regression" if model.num_labels == 1 else "single_label_classification"
    keys: dict[str, Any] = {"id2label": {str(number): name for number, name in enumerate(names)}, "problem_type": kind}
    keys |= {"causal": True} if model.causal else {}
    keys |= {"max_input": model.max_input, "texts": list(model.texts)} if model.max_input else {}
    return keys


def save(model: Transformer, path: Path) -> None:
    """Write a new folder, which appears in one piece."""
    refuse_folded(model.blocks)
    content = described(model)
    with torch.device("meta"):
        more = {"num_labels": model.num_labels} if isinstance(model, SequenceClassifier) else {}
        wanted = plain_type(model)(model.config, **more).state_dict().keys()
    if wanted != model.state_dict().keys():
        raise UserError("this model does not have the parameters of its configuration: save its state_dict yourself")
    if path.exists():
        raise UserError(f"{str(path)!r} is already there: give another place")
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    stage.mkdir()
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save(stage / "tokenizer.json")
        (stage / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        mode = (stage / "config.json").stat().st_mode
        for file in stage.iterdir():
            file.chmod(mode)  # as the umask asks: safetensors makes files for their owner alone
            _fsync(file)
        _fsync(stage)
        stage.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Force a file, or the names of a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
