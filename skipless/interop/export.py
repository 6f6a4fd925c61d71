"""A trained model for others: a folder for Hugging Face's libraries, an ONNX file, or plain safetensors.

    exported/
        config.json           `model_type: skipless` and every key of `ModelConfig`
        model.safetensors     or model.onnx
        tokenizer.json
        README.md             the model card: block, parameters, data, metrics, how to use it, its limits
        block.svg             the drawing of the block, for the card
        *.py                  for those who do not have this package: for Hugging Face the models' source, for ONNX what
                              runs a causal model with its cache

The folder appears in one piece, and one that is there is replaced only on demand, and only if it is an export and
holds nothing else: a repository's `.git`, or somebody's notes, are not ours to remove. A link stays a link.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from skipless.analysis.picture import block_picture
from skipless.config.plugins import plugins_needed
from skipless.config.reading import read_bytes
from skipless.config.run import RunConfig
from skipless.errors import MissingExtra, UserError, unknown, user_path
from skipless.interop.export_folder import SOURCE_MARK, Model, write_config, write_tokenizer
from skipless.interop.model_card import PICTURE, model_card
from skipless.interop.onnx import to_onnx
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.cache import pick_mode
from skipless.nn.model import CausalLM, SequenceClassifier
from skipless.nn.stack import refuse_folded
from skipless.recipes.variants import block_name
from skipless.runs import choose_checkpoint, find_run, is_classifier, is_export, load, load_checkpoint
from skipless.runtime.model import OnnxCausalLM
from skipless.storage.atomic_files import no_room_said, remove_folder, staged_folder
from skipless.storage.tensors import io_errors_said

WRITTEN = re.compile(
    r"config\.json|README\.md|block\.svg|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|model\.onnx(\.data)?|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
"""The names of what exports write, and `save_pretrained`; beside them, the models' source."""


def export_run(
    path: Path | str,
    to: str,
    out: Path | str,
    *,
    checkpoint: int | str = "last",
    overwrite: bool = False,
    onnx: OnnxOptions | None = None,
) -> Path:
    """Export a checkpoint of a run, or what is in an export; `to` is `hf`, `onnx` or `safetensors`."""
    _check(to, _place(out), overwrite)
    if is_export(Path(path)) or is_classifier(Path(path)):
        model = load(path, checkpoint=checkpoint)
        if isinstance(model, OnnxCausalLM):
            raise UserError(f"{str(path)!r} is an ONNX export, which has no weights to export: give the run")
        return export_model(model, to, out, overwrite=overwrite, onnx=onnx)
    run = find_run(path)
    chosen = choose_checkpoint(run, checkpoint)
    model = load_checkpoint(run, chosen)
    card = model_card(model, to, run=run, step=chosen.step, onnx=_onnx_options(model, to, onnx))
    return export_model(model, to, out, card=card, overwrite=overwrite, onnx=onnx, run=run.config())


def export_model(
    model: Model,
    to: str,
    out: Path | str,
    *,
    card: str | None = None,
    overwrite: bool = False,
    onnx: OnnxOptions | None = None,
    run: RunConfig | None = None,
) -> Path:
    """Export a model, with its `tokenizer` if it has one; a `run` says what text it is evaluated on."""
    refuse_folded(model.blocks)
    target = _place(out)
    _check(to, target, overwrite)
    options = _onnx_options(model, to, onnx)
    with no_room_said(f"the export {str(out)!r}"), io_errors_said(), _in_place_of(target) as folder:
        if isinstance(model, CausalLM) and options is not None and options.cache != "none":
            from skipless.interop.onnx_export import to_onnx_decoder

            to_onnx_decoder(model.eval(), folder, options, run)
        else:
            FORMATS[to](model.eval(), folder)
        if card is None:
            card = model_card(model, to) if options is None else model_card(model, to, onnx=options)
        (folder / "README.md").write_text(card, encoding="utf-8")
        picture = block_picture({block_name(model.config.block): model.config.block}, paper=True)
        (folder / PICTURE).write_text(picture, encoding="utf-8")
        _make_readable(folder)
        _check(to, target, overwrite)  # somebody may have come meanwhile
    return Path(out)


def _onnx_options(model: Model, to: str, given: OnnxOptions | None) -> OnnxOptions | None:
    """How a model is written as ONNX; None where it is not, and for one that has no cache."""
    if given is not None and to != "onnx":
        raise UserError(f"cache and bits are choices of the format onnx, not of {to}")
    if to != "onnx":
        return None
    if isinstance(model, CausalLM):
        options = given or OnnxOptions()
        if options.cache != "none":
            pick_mode(model.config, options.cache)
        return options
    if given is not None and given != OnnxOptions(cache="none"):
        raise UserError(f"a {type(model).__name__} reads whole sequences: cache and low bits are for causal models")
    return None


def _place(out: Path | str) -> Path:
    """The folder that is written: where `out` is a link, the one that it leads to, so that the link stays."""
    return Path(os.path.realpath(user_path(str(out))))


def _check(to: str, out: Path, overwrite: bool) -> None:
    """Find what cannot work before anything is computed."""
    check_format(to)
    if out.exists() and not overwrite:
        raise UserError(f"{str(out)!r} is already there; --overwrite replaces it")
    if out.exists() and not is_export(out):
        raise UserError(f"{str(out)!r} is not an exported model, so it is not replaced: give another place")
    if others := _foreign(out):
        shown = ", ".join(map(repr, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise UserError(f"{str(out)!r} also holds what no export wrote: {shown}; move it away, or give another place")


def check_format(to: str) -> None:
    """A UserError where a format is not known, or what it is written with is not installed."""
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    for package in NEEDS[to]:
        try:
            __import__(package)
        except ImportError:
            raise MissingExtra(package, to, f"export to {to}") from None


def _foreign(folder: Path) -> list[str]:
    """The names in the folder of an export that are not of files that an export writes."""
    return sorted(entry.name for entry in folder.iterdir() if not _is_written(entry)) if folder.exists() else []


def _is_written(entry: Path) -> bool:
    if entry.is_symlink() or not entry.is_file():
        return False
    if entry.suffix == ".py":
        return read_bytes(entry).startswith(SOURCE_MARK.encode())
    return WRITTEN.fullmatch(entry.name) is not None


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


def _make_readable(folder: Path) -> None:
    """Give every file the mode that the umask asks for, as the card has it: safetensors makes them for the owner."""
    mode = stat.S_IMODE((folder / "README.md").stat().st_mode)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _to_safetensors(model: Model, folder: Path) -> None:
    write_config(model, folder)
    write_tokenizer(model.tokenizer, folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _to_hf(model: Model, folder: Path) -> None:
    from skipless.interop.hf import wrap, wrap_tokenizer
    from skipless.interop.hf.bundle import AUTO_MAP

    wrapped = wrap(model)
    wrapped.config.auto_map = AUTO_MAP  # and with it the models' source
    for name, value in plugins_needed(model.config).items():
        setattr(wrapped.config, name, value)
    with _without_bars():
        wrapped.save_pretrained(folder)
        if model.tokenizer is not None:
            asked = isinstance(model, SequenceClassifier)
            longest = (model.max_input if asked else None) or model.config.max_seq_len
            wrap_tokenizer(model.tokenizer, longest, closes=asked).save_pretrained(folder)


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


FORMATS = {"hf": _to_hf, "onnx": to_onnx, "safetensors": _to_safetensors}

NEEDS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "safetensors": (),
}
"""Optional packages that a format is written with; each is in the extra of the format's name."""
