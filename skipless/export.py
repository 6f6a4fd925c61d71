"""A trained model for others: a folder for Hugging Face's libraries, an ONNX file, or plain safetensors.

    exported/
        config.json           `model_type: skipless` and every key of `ModelConfig`
        model.safetensors     or model.onnx
        tokenizer.json
        README.md             the model card: block, parameters, data, metrics, how to use it
        *.py                  for Hugging Face: the models' source, for those who do not have this package

The folder appears in one piece, and one that is there is replaced only on demand, and only if it is an export.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from skipless import __version__
from skipless.atomic import remove_folder, staged_folder
from skipless.card import model_card
from skipless.data import Tokenizer
from skipless.errors import MissingExtra, UserError, unknown
from skipless.nn import explicit_form
from skipless.nn.kernels import plain_type
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.quiet import quiet
from skipless.runs import ARCHITECTURES, MODEL_TYPE, choose_checkpoint, find_run, is_export, load, load_checkpoint

Model = CausalLM | MaskedLM | SequenceClassifier

ONNX_TOLERANCE = 1e-4
"""Largest difference between ONNX Runtime and PyTorch, in units of the largest logit or of 1."""

ONNX_SHAPES = ((1, 5), (1, 16), (3, 5), (3, 16))
"""Batches and lengths at which an ONNX file is held against PyTorch; a shorter context takes its own length."""

ONE_FILE = 1 << 30
"""Bytes of weights up to which they lie inside the ONNX file; beyond 2 GB that is not possible."""


def export_run(path: Path | str, to: str, out: Path | str, *, which: str = "last", overwrite: bool = False) -> Path:
    """Export a checkpoint of a run, or what is in an export; `to` is `hf`, `onnx` or `safetensors`."""
    _check(to, Path(out), overwrite)
    if is_export(Path(path)):
        return export_model(load(path), to, out, overwrite=overwrite)
    run = find_run(path)
    checkpoint = choose_checkpoint(run, which)
    model = load_checkpoint(run, checkpoint)
    card = model_card(model, to, run=run, step=checkpoint.step)
    return export_model(model, to, out, card=card, overwrite=overwrite)


def export_model(model: Model, to: str, out: Path | str, *, card: str | None = None, overwrite: bool = False) -> Path:
    """Export a model, with its `tokenizer` if it has one."""
    out = Path(out)
    _check(to, out, overwrite)
    with _in_place_of(out) as folder:
        FORMATS[to](model.eval(), folder)
        (folder / "README.md").write_text(card or model_card(model, to), encoding="utf-8")
    return out


def _check(to: str, out: Path, overwrite: bool) -> None:
    """Find what cannot work before anything is computed."""
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    for package in NEEDS[to]:
        try:
            __import__(package)
        except ImportError:
            raise MissingExtra(package, to, f"export to {to}") from None
    if out.exists() and not overwrite:
        raise UserError(f"{str(out)!r} is already there; --overwrite replaces it")
    if out.exists() and not is_export(out):
        raise UserError(f"{str(out)!r} is not an exported model, so it is not replaced: give another place")


@contextmanager
def _in_place_of(out: Path) -> Iterator[Path]:
    """A staged folder that becomes `out` in one step; an old one is set aside until the new one is there."""
    aside = out.with_name(f".old-{out.name}")
    if aside.exists() and out.exists():
        remove_folder(aside)
    with staged_folder(out, set_aside=aside) as folder:
        yield folder
    if aside.exists():
        remove_folder(aside)


def _write_config(model: Model, folder: Path) -> None:
    name = next(name for name, kind in ARCHITECTURES.items() if plain_type(model) is kind)
    content: dict[str, Any] = {"model_type": MODEL_TYPE, "architectures": [name], "skipless_version": __version__}
    if isinstance(model, SequenceClassifier):
        content["id2label"] = {str(label): f"LABEL_{label}" for label in range(model.num_labels)}
    content |= model.config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")


def _to_safetensors(model: Model, folder: Path) -> None:
    _write_config(model, folder)
    _write_tokenizer(model.tokenizer, folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_hf(model: Model, folder: Path) -> None:
    from skipless.hf import wrap, wrap_tokenizer
    from skipless.hf.bundle import AUTO_MAP

    wrapped = wrap(model)
    wrapped.config.auto_map = AUTO_MAP  # and with it the models' source
    with _without_bars():
        wrapped.save_pretrained(folder)
        if model.tokenizer is not None:
            wrap_tokenizer(model.tokenizer, model.config.max_seq_len).save_pretrained(folder)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the progress bars of `transformers`."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


# ------------------------------------------------------------------------------- ONNX


def _to_onnx(model: Model, folder: Path) -> None:
    """Write the model, and hold it against PyTorch in ONNX Runtime.

    A causal model takes `input_ids` alone: padding on the right is seen by nothing before it. The others take an
    `attention_mask` too. ALiBi's running sums are made by doubling, as often as the length asks for, which a graph
    for every length cannot say: there the explicit form is exported.
    """
    _write_config(model, folder)
    _write_tokenizer(model.tokenizer, folder)
    form = explicit_form(model) if model.config.positions == "alibi" else nullcontext()
    path = folder / "model.onnx"
    example = onnx_inputs(model, 2, min(7, model.config.max_seq_len))
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    length = torch.export.Dim("length", min=1, max=model.config.max_seq_len)
    with torch.no_grad(), form, quiet("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            tuple(example.values()),
            dynamo=True,
            verbose=False,
            input_names=list(example),
            output_names=["logits"],
            dynamic_shapes=tuple({0: batch, 1: length} for _ in example),
        )
        assert program is not None
        program.save(path, external_data=_n_bytes(model) > ONE_FILE)
    error = onnx_error(model, path)
    if not error <= ONNX_TOLERANCE:
        raise UserError(f"ONNX Runtime computes other logits than PyTorch, {error:.1g} apart: nothing was exported")


def _n_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def onnx_inputs(model: Model, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs by name; a mask has padding in all rows but the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    if isinstance(model, CausalLM):
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1:, length - length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def onnx_error(model: Model, path: Path) -> float:
    """The largest difference of an ONNX file from the model, in units of the largest logit or of 1."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    errors = []
    for batch, length in ONNX_SHAPES:
        inputs = onnx_inputs(model, batch, min(length, model.config.max_seq_len), seed=length)
        expected = model(*inputs.values())
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        apart = (torch.from_numpy(found) - expected).abs()
        if "attention_mask" in inputs and expected.ndim == 3:
            apart = apart[inputs["attention_mask"].bool()]  # what comes out at padding means nothing
        errors.append(apart.max() / expected.abs().max().clamp(min=1))
    return torch.stack(errors).max().item()


FORMATS = {"hf": _to_hf, "onnx": _to_onnx, "safetensors": _to_safetensors}
NEEDS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "safetensors": (),
}
"""Optional packages that a format is written with; each is in the extra of the format's name."""
