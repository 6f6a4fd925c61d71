"""Exported models: which folder is one, and how it is opened."""

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from skipless.config.explain import explain
from skipless.config.model import ModelConfig
from skipless.config.plugins import missing_plugins
from skipless.config.reading import check_regular, read_json
from skipless.config.run import RunConfig
from skipless.data import Tokenizer
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.nn.saving import ARCHITECTURES, MODEL_TYPE
from skipless.runs.weights import with_tokenizer, with_weights
from skipless.runtime.model import OnnxCausalLM

UNNAMED = ("LABEL_0", "LABEL_1")
"""The classes of an export that does not name them: `transformers` does not write these two down."""


def is_export(folder: Path) -> bool:
    """Whether a folder holds an exported model."""
    return _export_info(folder).get("model_type") == MODEL_TYPE


def exported_run(folder: Path) -> RunConfig | None:
    """The configuration of the run that an export comes from, where it says it."""
    content = _export_info(folder).get("run")
    if content is None:
        return None
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{str(folder / 'config.json')!r}: {explain(error)}") from None


def _export_info(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except UserError:
        return {}


def _own_name(name: str) -> str:
    """The library's name of a tensor in an export to Hugging Face's libraries, or one of its own."""
    return name.removeprefix("model.").replace("lm_head.", "head.", 1)


def _labels(info: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The classes by their numbers. In a file they may stand in any order: sorted as text, 10 comes before 2."""
    names = info.get("id2label")
    if not isinstance(names, dict) or not names:
        return UNNAMED
    try:
        return tuple(str(names[str(number)]) for number in range(len(names)))
    except KeyError as error:
        raise UserError(f"{str(folder / 'config.json')!r}: id2label has no class {error.args[0]}") from None


def load_export(folder: Path) -> CausalLM | MaskedLM | SequenceClassifier | OnnxCausalLM:
    """The model of an export, in eval mode and with its tokeniser, where it has one."""
    info = _export_info(folder)
    match info.get("architectures"):
        case [str(name)] if name in ARCHITECTURES:
            kind = ARCHITECTURES[name]
        case other:
            raise UserError(f"{str(folder)!r} holds {other or 'no model'!r}; known: {', '.join(ARCHITECTURES)}")
    try:
        cfg = ModelConfig.model_validate({key: info[key] for key in ModelConfig.model_fields if key in info})
    except ValidationError as error:
        raise UserError(f"{str(folder / 'config.json')!r}: {explain(error)}{missing_plugins(info)}") from None
    labels = _labels(info, folder)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    files = sorted(folder.glob("*.safetensors"))
    if not files and isinstance(info.get("onnx"), dict):
        check_regular(folder / "model.onnx")
        return with_tokenizer(OnnxCausalLM(folder, cfg), tokenizer, folder)
    if not files:
        raise UserError(
            f"{str(folder)!r} has no .safetensors file; an export to onnx without a cache is for ONNX Runtime alone"
        )
    for file in files:
        check_regular(file)
    try:
        tensors = {_own_name(key): value for file in files for key, value in load_file(file).items()}
    except (SafetensorError, OSError, RuntimeError) as error:  # damaged, or of a type that PyTorch does not have
        raise UserError(f"the weights in {str(folder)!r} cannot be loaded: {error}") from None
    if issubclass(kind, SequenceClassifier):
        model = with_weights(partial(kind, cfg, len(labels), causal=info.get("causal") is True), cfg, tensors, folder)
        _describe(model, labels, info)
    else:
        model = with_weights(partial(kind, cfg), cfg, tensors, folder)
    return with_tokenizer(model, tokenizer, folder)


def _describe(model: SequenceClassifier, labels: tuple[str, ...], info: dict[str, Any]) -> None:
    """Give a classifier what an export says of its inputs and outputs."""
    model.labels = labels if len(labels) > 1 else ()
    match info.get("texts"):
        case [str(), *_] as texts if all(isinstance(text, str) for text in texts):
            model.texts = tuple(texts)
    longest = info.get("max_input")
    model.max_input = longest if isinstance(longest, int) and longest > 0 else None
