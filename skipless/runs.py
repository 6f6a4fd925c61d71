"""A run is a folder; everything that reports reads it and nothing else.

runs/<name>/
    config.json          the configuration, the versions, the data and the machine
    metrics.jsonl        one object a line: step, tokens, seconds, and what was measured
    samples.jsonl        text sampled on the way
    tokenizer.json
    checkpoints/step-<n>/
    .saved               there once a checkpoint was made, so that their loss is noticed
    tensorboard/

The folder of a fine-tuned classifier is like it, with classifier.json in the place of config.json.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from skipless.config.classifier import ClassifierConfig
from skipless.config.explain import explain
from skipless.config.model import ModelConfig
from skipless.config.plugins import missing_plugins
from skipless.config.reading import check_regular, read_json
from skipless.config.run import OWN, RunConfig
from skipless.data import Tokenizer
from skipless.errors import UserError, did_you_mean
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier, Transformer
from skipless.nn.saving import ARCHITECTURES, MODEL_TYPE
from skipless.runtime.model import OnnxCausalLM
from skipless.storage.checkpoints import AVERAGE, Checkpoint, Checkpoints
from skipless.storage.files import leftovers, sweep
from skipless.storage.json_files import are_numbers, read_json_lines
from skipless.storage.save_group import SaveGroup

MODELS: dict[str, type[CausalLM] | type[MaskedLM]] = {"causal": CausalLM, "masked": MaskedLM}


class _Data(BaseModel):
    fingerprint: str | None = None
    train_tokens: int = 0


class _About(BaseModel):
    """What config.json says beside the configuration, for those who read it without a look; more may stand in it."""

    command: list[str] | None = None
    versions: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    data: _Data = _Data()
    plugins: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def config_file(self) -> Path:
        """What the run is."""
        return self.folder / "config.json"

    @property
    def metrics_file(self) -> Path:
        """What was measured."""
        return self.folder / "metrics.jsonl"

    @property
    def archived_metrics_file(self) -> Path:
        """The same, compressed, in the archive of published runs."""
        return self.folder / "metrics.jsonl.gz"

    @property
    def samples_file(self) -> Path:
        """What it wrote."""
        return self.folder / "samples.jsonl"

    @property
    def tokenizer_file(self) -> Path:
        """How its text becomes tokens."""
        return self.folder / "tokenizer.json"

    @property
    def saved_file(self) -> Path:
        """There once a checkpoint was made."""
        return self.folder / ".saved"

    def checkpoints(self, keep_last: int = 2, save_group: SaveGroup | None = None) -> Checkpoints:
        """Its checkpoints; the ranks of a `save_group` save them together."""
        folder = self.folder / "checkpoints"
        return Checkpoints(folder, keep_last=keep_last, save_group=save_group, note=self.saved_file)

    @property
    def exists(self) -> bool:
        """Whether a training has begun here."""
        return self.config_file.exists()

    @property
    def has_files(self) -> bool:
        """Whether there is anything that another training would write over, be it that config.json was lost."""
        written = (path for path in (self.metrics_file, self.samples_file) if path.exists())
        return self.exists or bool(self.checkpoints().all()) or any(path.stat().st_size for path in written)

    def leftovers(self) -> list[Path]:
        """What a process that was killed left half-written or half-removed, or one is writing at this instant."""
        return [*leftovers(self.folder, *self._replaced), *self.checkpoints().leftovers()]

    def sweep(self) -> None:
        """Remove what was left. Only for the process that has the folder's lock."""
        sweep(self.folder, *self._replaced)
        self.checkpoints().sweep()

    @property
    def _replaced(self) -> list[str]:
        """The names of the files that a training puts there in one step."""
        return [path.name for path in (self.config_file, self.tokenizer_file, self.saved_file)]

    def info(self) -> dict[str, Any]:
        """The content of config.json."""
        if not self.exists:
            raise UserError(f"{str(self.folder)!r} is not a run: there is no {self.config_file.name}")
        info = read_json(self.config_file)
        try:
            _About.model_validate(info)
        except ValidationError as error:
            raise UserError(f"{str(self.config_file)!r}: {explain(error)}") from None
        return info

    def config(self) -> RunConfig:
        """The configuration it runs with."""
        info = self.info()
        try:
            return RunConfig.model_validate(info.get("config"))
        except ValidationError as error:
            raise UserError(f"{str(self.config_file)!r}: {explain(error)}{missing_plugins(info)}") from None

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Its measurements; a last line that is still being written is left out, as is what is no measurement."""
        live = self.metrics_file.exists() or not self.archived_metrics_file.exists()
        return read_json_lines(self.metrics_file if live else self.archived_metrics_file, is_measurement)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Its samples."""
        return read_json_lines(self.samples_file, _is_sample)

    def tokenizer(self) -> Tokenizer:
        """Its tokeniser."""
        return Tokenizer.load(self.tokenizer_file)


def is_measurement(record: dict[str, Any]) -> bool:
    """Whether this can be a line of metrics: numbers, with those that every line has."""
    counted = all(isinstance(record.get(key), int | float) for key in ("step", "tokens", "seconds"))
    return counted and are_numbers(record)


def _is_sample(record: dict[str, Any]) -> bool:
    return isinstance(record.get("step"), int) and isinstance(record.get("text"), str)


def find_run(path: Path | str, runs: Path | str = "runs") -> Run:
    """The run at a path, or by its name below the folder `runs`."""
    given = Path(path)
    for folder in (given, Path(runs) / given):
        if (folder / "config.json").exists():
            return Run(folder)
    known = sorted(folder.parent.name for folder in Path(runs).glob("*/config.json"))
    listed = f"; runs in {str(runs)!r}: {', '.join(known[:8])}{did_you_mean(given.name, known)}" if known else ""
    raise UserError(f"there is no run at {str(path)!r}{listed}")


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
        return _load_export(given)
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
    model = _with_weights(lambda: MODELS[cfg.task](cfg.model), cfg.model, tensors, checkpoint.path)
    has_none = cfg.data.tokenizer == OWN and not run.tokenizer_file.exists()
    return _with_tokenizer(model, None if has_none else run.tokenizer(), run.folder)


# ------------------------------------------------------------------------ classifiers

CLASSIFIER = "classifier.json"


def is_classifier(folder: Path) -> bool:
    """Whether a folder holds a classifier that `skipless finetune` made."""
    return (folder / CLASSIFIER).exists()


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
    model = _with_weights(make, cfg.model, checkpoint.tensors("model"), checkpoint.path)
    if not cfg.labels:
        with torch.no_grad():
            model.classifier.weight.mul_(cfg.spread)
            model.classifier.bias.mul_(cfg.spread).add_(cfg.centre)
    model.labels, model.texts, model.max_input = cfg.labels, cfg.texts, cfg.max_input
    return _with_tokenizer(model, run.tokenizer(), run.folder)


AnyModel = TypeVar("AnyModel", bound=Transformer)
Loaded = TypeVar("Loaded", bound=Transformer | OnnxCausalLM)


def _with_weights(
    make: Callable[[], AnyModel], cfg: ModelConfig, tensors: Mapping[str, Tensor], where: Path
) -> AnyModel:
    """A model with these weights; a UserError where they are not of its configuration, or not finite.

    What its configuration asks for is compared before there is memory for it: it can say anything.
    """
    problem = f"the weights in {str(where)!r} cannot be loaded: "
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if len(layers) != cfg.n_layer:
        raise UserError(f"{problem}they have {len(layers)} layers, and the configuration has {cfg.n_layer}")
    try:
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    except RuntimeError as error:  # sizes that not even a number holds
        raise UserError(f"{problem}no model has the sizes of the configuration: {error}") from None
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({**wanted, **found}):
        if found.get(name) != wanted.get(name):
            sizes = [_shape(shapes.get(name)) for shapes in (found, wanted)]
            raise UserError(f"{problem}{name} is {sizes[0]}, and by the configuration {sizes[1]}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{problem}{name} is not finite")
    model = make()
    model.load_state_dict(tensors)
    return model


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else " × ".join(map(str, shape)) or "a number"


def _with_tokenizer(model: Loaded, tokenizer: Tokenizer | None, where: Path) -> Loaded:
    """The model in eval mode with a tokeniser, all of whose ids it knows."""
    rows = model.config.vocab_size
    largest = rows - 1 if tokenizer is None else tokenizer.vocab_size - 1
    if largest >= rows:
        raise UserError(f"the tokenizer in {str(where)!r} has ids up to {largest}, and the model knows 0 … {rows - 1}")
    model.tokenizer = tokenizer
    return model.eval()


def choose_checkpoint(run: Run, checkpoint: int | str) -> Checkpoint:
    """A run's `last` or `best` checkpoint, or that of a step."""
    if not is_classifier(run.folder):
        run.info()  # where that is damaged, it is the first thing to say
    checkpoints = run.checkpoints()
    if checkpoint == "best":
        valid = [Checkpoints.load(path) for path in checkpoints.all() if Checkpoints.verify(path) is None]
        scored = [one for one in valid if one.score is not None]
        if scored:
            return min(scored, key=lambda one: (one.score, one.step))
    elif checkpoint != "last":
        return _checkpoint_of_step(run, checkpoint)
    found, damaged = checkpoints.latest_valid()
    if found is None:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged) or "it has none yet"
        raise UserError(f"run {run.name!r} has no valid checkpoint ({reasons})")
    return found


def _checkpoint_of_step(run: Run, step: int | str) -> Checkpoint:
    there = {str(int(path.name.rpartition("-")[2])): path for path in run.checkpoints().all()}
    known = f"run {run.name!r} has {', '.join(there) or 'none yet'}"
    if not (str(step).isascii() and str(step).isdigit()):
        raise UserError(f"a checkpoint is last, best or the number of a step, got {step!r}; {known}")
    number = str(step).lstrip("0") or "0"  # as text: a number of thousands of digits is no int
    if number not in there:
        raise UserError(f"there is no checkpoint of step {number}; {known}")
    return Checkpoints.load(there[number])


# ---------------------------------------------------------------------------- exports


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


def _load_export(folder: Path) -> CausalLM | MaskedLM | SequenceClassifier | OnnxCausalLM:
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
    names = info.get("id2label")
    labels = tuple(map(str, names.values())) if isinstance(names, dict) and names else UNNAMED
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    files = sorted(folder.glob("*.safetensors"))
    if not files and isinstance(info.get("onnx"), dict):
        check_regular(folder / "model.onnx")
        return _with_tokenizer(OnnxCausalLM(folder, cfg), tokenizer, folder)
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
        model = _with_weights(partial(kind, cfg, len(labels), causal=info.get("causal") is True), cfg, tensors, folder)
        _describe(model, labels, info)
    else:
        model = _with_weights(partial(kind, cfg), cfg, tensors, folder)
    return _with_tokenizer(model, tokenizer, folder)


def _describe(model: SequenceClassifier, labels: tuple[str, ...], info: dict[str, Any]) -> None:
    """Give a classifier what an export says of its inputs and outputs."""
    model.labels = labels if len(labels) > 1 else ()
    match info.get("texts"):
        case [str(), *_] as texts if all(isinstance(text, str) for text in texts):
            model.texts = tuple(texts)
    longest = info.get("max_input")
    model.max_input = longest if isinstance(longest, int) and longest > 0 else None
