"""`skipless.fit`: train a model from Python, on a configured source or on data of one's own."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.config.model import ModelConfig
from skipless.config.run import OWN, DataConfig, RunConfig, TrainConfig
from skipless.data import Tokenizer
from skipless.errors import UserError
from skipless.errors import unknown as unknown_name
from skipless.nn.model import CausalLM, MaskedLM
from skipless.runs import Run
from skipless.training.observer import Observer
from skipless.training.own_data import Loss, OwnData
from skipless.training.recompute import keep_activations
from skipless.training.stopping import Interrupted
from skipless.training.train import train


@dataclass(frozen=True)
class Fitted:
    """What a training run gives."""

    model: CausalLM | MaskedLM
    """In eval mode."""
    metrics: list[dict[str, Any]]
    """The records of metrics: step, tokens, seconds, and what was measured."""
    run: Run | None
    """Its folder, for `skipless.load`, `skipless report` and the rest; None where nothing was kept."""


class Callbacks(Observer):
    """An observer that calls functions, keeps the lines of metrics, and passes everything on."""

    def __init__(
        self,
        on_step: Callable[[dict[str, Any]], object] | None = None,
        on_evaluate: Callable[[dict[str, Any]], object] | None = None,
        on_save: Callable[[int, Path], object] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.on_step, self.on_evaluate, self.on_save = on_step, on_evaluate, on_save
        self.observer = observer or Observer()
        self.model: CausalLM | MaskedLM | None = None
        for name in ("message", "data", "log", "end"):
            setattr(self, name, getattr(self.observer, name))

    def begin(self, trainer: Any) -> None:
        """Remember the model."""
        self.model = trainer.model
        self.observer.begin(trainer)

    def stepped(self, record: dict[str, Any]) -> None:
        """A step was made."""
        if self.on_step is not None:
            self.on_step(record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """The held-out loss was measured."""
        if self.on_evaluate is not None:
            self.on_evaluate(record)

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint is on the disk."""
        if self.on_save is not None:
            self.on_save(step, folder)


def fit(
    model: ModelConfig | RunConfig | CausalLM | MaskedLM,
    data: Any = None,
    *,
    valid: Any = None,
    folder: Path | str | None = None,
    resume: bool = False,
    loss: Loss | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    tokenizer: Tokenizer | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    on_evaluate: Callable[[dict[str, Any]], object] | None = None,
    on_save: Callable[[int, Path], object] | None = None,
    observer: Observer | None = None,
    cache_dir: Path | None = None,
    **settings: Any,
) -> Fitted:
    """Train a model, and return it with what was measured.

        skipless.fit(skipless.ModelConfig(block="sas-p", n_layer=4), "files:src/**/*.py", steps=500, folder="runs/mine")
        skipless.fit(model, dataset, valid=held_out, steps=500, lr=1e-3, on_step=print)

    `model` is one to go on from, or a configuration of a new one. `data` is a source or a `DataConfig`, as for
    `skipless train`; or a `torch.utils.data.Dataset` or an iterable whose items are tensors of token ids (the targets
    are the next ones), pairs (ids, labels), or mappings with ids, labels and attention_mask. With `loss(model, batch)`,
    a loss of your own, items are what you like; `collate` makes a batch of a list of them. `settings` are keys of
    `TrainConfig`.

    With a `folder` it is a run like any other, with checkpoints; `resume=True` goes on from the newest, or begins. That
    is bit for bit the same training for a source and for a `Dataset`; see `skipless.training.own_data` for an iterable.
    The callbacks are given what a step was (`step`, `loss`, `grad_norm`, `lr`, `batch_size`), the line of metrics of an
    evaluation, and the step and folder of a checkpoint that is on the disk.
    """
    given = model if isinstance(model, CausalLM | MaskedLM) else None
    own = data is not None and not isinstance(data, str | DataConfig)
    if not own and (loss is not None or collate is not None or valid is not None or tokenizer is not None):
        raise UserError("loss, collate, valid and tokenizer go with data of your own; a source has its own of each")
    cfg = _config(model, data if not own else None, settings)
    if own:
        held_out = None if valid is None else valid if hasattr(valid, "__getitem__") else list(valid)
        kept = tokenizer or getattr(given, "tokenizer", None)
        own_data = OwnData(data, held_out, kept, cfg.task == "causal", loss, collate, cfg.train.seed)
        cfg = cfg.replace(data=_described(own_data, cfg.model))
    else:
        own_data = None
    callbacks = Callbacks(on_step, on_evaluate, on_save, observer)
    if folder is None and resume:
        raise UserError("to resume there must be a folder")
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        where = Path(place) / "run" if folder is None else Path(place)
        try:
            run = train(
                cfg,
                where,
                resume=resume,
                trackers=[],
                observer=callbacks,
                cache_dir=cache_dir,
                model=given,
                data=own_data,
            )
        except Interrupted as stopped:
            again = None if folder is None else "resume=True"
            raise Interrupted(stopped.number, stopped.step, again) from None
        metrics = list(run.metrics())
    assert callbacks.model is not None
    keep_activations(callbacks.model)
    return Fitted(callbacks.model.eval(), metrics, None if folder is None else run)


def _config(model: Any, data: str | DataConfig | None, settings: dict[str, Any]) -> RunConfig:
    """The configuration of the run, but for data of one's own."""
    if isinstance(model, RunConfig):
        cfg = model
    elif isinstance(model, ModelConfig | CausalLM | MaskedLM):
        task = "masked" if isinstance(model, MaskedLM) else "causal"
        shape = model if isinstance(model, ModelConfig) else model.config
        length = min(DataConfig().seq_len, shape.max_seq_len)
        cfg = RunConfig(task=task, model=shape, data=DataConfig(seq_len=length, vocab_size=max(shape.vocab_size, 257)))
    else:
        raise UserError(f"fit takes a ModelConfig, a RunConfig, a CausalLM or a MaskedLM, got {type(model).__name__}")
    if isinstance(data, str):
        cfg = cfg.override({"data.source": data, "data.valid_source": None})
    elif data is not None:
        cfg = cfg.replace(data=data)
    budgets = ("steps", "tokens", "minutes")
    if any(budget in settings for budget in budgets):
        settings = {**dict.fromkeys(budgets), **settings}
    unknown = [key for key in settings if key not in TrainConfig.model_fields]
    if unknown:
        raise unknown_name("setting of fit", unknown[0], TrainConfig.model_fields)
    return cfg.override({f"train.{key}": value for key, value in settings.items()})


def _described(data: OwnData, model: ModelConfig) -> DataConfig:
    """What a run's configuration says of data of one's own: that it is that, and how long its rows are."""
    length = model.max_seq_len
    if data.loss is None and data.collate is None and data.has_index:
        batch = data.batch([data.train[0]])
        length = min(batch.ids.shape[1], length)  # pyrefly: ignore
    return DataConfig(source=OWN, tokenizer=OWN, seq_len=length, vocab_size=model.vocab_size)
