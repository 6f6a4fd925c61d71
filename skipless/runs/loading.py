"""`skipless.load`: the model of a run, of a classifier, of a checkpoint or of an export."""

import warnings
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError

from skipless.config.classifier import ClassifierConfig
from skipless.config.explain import explain
from skipless.config.reading import read_json
from skipless.config.run import OWN
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.runs.exports import is_export, load_export
from skipless.runs.run import CLASSIFIER, Run, choose_checkpoint, find_run, is_classifier
from skipless.runs.weights import with_tokenizer, with_weights
from skipless.runtime.model import OnnxCausalLM
from skipless.storage.checkpoint_format import AVERAGE, Checkpoint
from skipless.storage.checkpoints import Checkpoints

MODELS: dict[str, type[CausalLM] | type[MaskedLM]] = {"causal": CausalLM, "masked": MaskedLM}


def find_model(path: Path | str, runs: Path | str = "runs") -> Path:
    """The folder of what `load` opens: an export, a checkpoint, or a run or classifier by path or name below `runs`."""
    given = Path(path)
    if is_export(given) or _is_checkpoint(given):
        return given
    classifiers = (folder for folder in (given, Path(runs) / given) if is_classifier(folder))
    return next(classifiers, None) or find_run(given, runs).folder


def load(
    path: Path | str, *, checkpoint: int | str = "last", average: bool = False, which: str | None = None
) -> CausalLM | MaskedLM | SequenceClassifier | OnnxCausalLM:
    """The model of a run, of a classifier's folder, of a checkpoint in one, or of an export.

    It is in eval mode and has its tokeniser as `.tokenizer`; a classifier has the names of its classes as `.labels`.

    `checkpoint` is one of a run: `last`, `best`, or its step (`which` is the old name). With `average` its weights are
    their average over steps (`train.ema`). An export is a folder of `skipless export`, or one that `save_pretrained`
    wrote; one to ONNX is run by ONNX Runtime, and is no module.
    """
    if which is not None:
        warnings.warn("`which` is now `checkpoint`", DeprecationWarning, stacklevel=2)
        checkpoint = which
    given = find_model(path)
    if is_classifier(given):
        return load_classifier(Run(given), choose_checkpoint(Run(given), checkpoint))
    if not is_export(given) and not _is_checkpoint(given):
        return load_checkpoint(Run(given), choose_checkpoint(Run(given), checkpoint), average=average)
    if average and is_export(given):
        raise UserError(f"{str(path)!r} is an export, which has one set of weights and no average beside it")
    if checkpoint != "last":
        raise UserError(f"{str(path)!r} is one model, not a run: there is no checkpoint {str(checkpoint)!r} to choose")
    if is_export(given):
        return load_export(given)
    run = Run(given.absolute().parent.parent)
    if is_classifier(run.folder):
        return load_classifier(run, Checkpoints.load(given))
    return load_checkpoint(run, Checkpoints.load(given), average=average)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").exists()


def load_checkpoint(run: Run, checkpoint: Checkpoint, *, average: bool = False) -> CausalLM | MaskedLM:
    """The model of a run as a checkpoint has it, or with the average of its weights."""
    cfg = run.config()
    tensors = checkpoint.tensors("model")
    if average:
        if AVERAGE not in checkpoint.stems:
            raise UserError(f"{str(checkpoint.path)!r} has no average of the weights: it was trained without train.ema")
        tensors |= checkpoint.tensors(AVERAGE)
    model = with_weights(lambda: MODELS[cfg.task](cfg.model), cfg.model, tensors, checkpoint.path)
    has_none = cfg.data.tokenizer == OWN and not run.tokenizer_file.exists()
    return with_tokenizer(model, None if has_none else run.tokenizer(), run.folder)


def classifier_config(folder: Path) -> ClassifierConfig:
    """What a classifier is."""
    try:
        return ClassifierConfig.model_validate(read_json(folder / CLASSIFIER).get("classifier"))
    except ValidationError as error:
        raise UserError(f"{str(folder / CLASSIFIER)!r}: {explain(error)}") from None


def load_classifier(run: Run, checkpoint: Checkpoint) -> SequenceClassifier:
    """A classifier as a checkpoint has it. The answers of a regression are in the units of its training data."""
    cfg = classifier_config(run.folder)
    make = partial(SequenceClassifier, cfg.model, cfg.outputs, causal=cfg.causal)
    model = with_weights(make, cfg.model, checkpoint.tensors("model"), checkpoint.path)
    if not cfg.labels:
        with torch.no_grad():
            model.classifier.weight.mul_(cfg.spread)
            model.classifier.bias.mul_(cfg.spread).add_(cfg.centre)
    model.labels, model.texts, model.max_input = cfg.labels, cfg.texts, cfg.max_input
    return with_tokenizer(model, run.tokenizer(), run.folder)
