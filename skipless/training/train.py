"""`train`: a configuration and a folder → a run, from the beginning or resumed from its newest valid checkpoint."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt

from skipless.config.base import differences
from skipless.config.plugins import plugins_of
from skipless.config.run import RunConfig
from skipless.data import Corpus, prepare
from skipless.distributed import devices
from skipless.distributed.group import Group
from skipless.distributed.launch import join
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM
from skipless.runs import Run
from skipless.storage.atomic_files import BROKEN, folder_lost, make_folder, write_json
from skipless.storage.checkpoint_format import Checkpoint
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.lock import FolderLock
from skipless.storage.provenance import machine, versions
from skipless.storage.saver import BackgroundSaver, GatherOnlySaver
from skipless.training.branch import Branch
from skipless.training.loop import TrainingLoop
from skipless.training.observer import Observer, StopOnClosedPipe
from skipless.training.own_data import OwnData, OwnDataTrainer
from skipless.training.state import NoValidCheckpoint, foreign_state_said
from skipless.training.stopping import Signals
from skipless.training.trackers import Trackers, check_trackers
from skipless.training.trainer import Trainer, fit_vocabulary


class Positions(BaseModel):
    """Where the files of lines ended when a checkpoint was made."""

    metrics: NonNegativeInt
    samples: NonNegativeInt


def train(
    cfg: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    trackers: Sequence[str] = ("tensorboard",),
    observer: Observer | None = None,
    cache_dir: Path | None = None,
    branch: Branch | None = None,
    model: CausalLM | MaskedLM | None = None,
    data: OwnData | None = None,
) -> Run:
    """Train `cfg` in the folder of a run, from the beginning or, with `resume`, from its newest valid checkpoint.

    A `model` is trained in the place of a new one, and `data` of one's own in the place of the configured corpus.
    """
    run = Run(Path(folder))
    with join(cfg.parallel, cfg.train.device) as group, ExitStack() as stack:
        observer = StopOnClosedPipe(observer or Observer(), group.ask_to_stop)
        resume = any(group.exchange(resume or group.was_restarted(str(run.folder))))

        def check() -> None:
            group.check_same("run", {"--name": run.name})
            check_trackers(trackers)
            _check_may_begin(run, resume=resume)

        if data is None:
            cfg, corpus = prepare_corpus(cfg, group, observer, cache_dir, check)
            trainer = Trainer(cfg, corpus, observer, group, model)
        else:
            check()
            corpus = data
            trainer = OwnDataTrainer(cfg, data, observer, group, model)
        with group.raise_on_all_ranks():
            if group.is_main_process:
                with folder_lost(run.folder, BROKEN):  # a folder that cannot be made is bad input
                    _lock(run, cfg, stack, resume=resume, accept_changes=accept_changes)
                group.note_started(str(run.folder))
        checkpoint = _newest_checkpoint(run, group, observer) if resume else None
        if checkpoint is not None:
            with group.raise_on_all_ranks(), foreign_state_said(checkpoint):
                trainer.restore(checkpoint)
                Positions.model_validate(checkpoint.state["journals"], strict=True)
        elif cfg.train.branch is not None:
            with group.raise_on_all_ranks():
                _begin_branch(trainer, branch)
        with folder_lost(run.folder):
            if group.is_main_process:
                _write_config(run, cfg, corpus)
            _train(trainer, run, checkpoint, trackers if group.is_main_process else [])
    return run


def prepare_corpus(
    cfg: RunConfig, group: Group, observer: Observer, cache_dir: Path | None, check: Callable[[], None] = lambda: None
) -> tuple[RunConfig, Corpus]:
    """Collective: the corpus of a configuration, and the configuration with the vocabulary its tokeniser really has.

    A UserError in every process where one of them fails a `check`, or has another configuration or other text.
    """
    group.check_same("configuration", cfg.model_dump(mode="json"))
    with group.raise_on_all_ranks():
        check()
        devices.pick_dtype(cfg.train.precision, devices.pick_device(cfg.train.device))
        corpus = prepare(cfg.data, cache_dir=cache_dir, progress=observer.data)
    group.check_same("corpus", corpus.fingerprint)
    return fit_vocabulary(cfg, corpus), corpus


def _begin_branch(trainer: Trainer, branch: Branch | None) -> None:
    """Take over the state of the run that this one goes on from; its lines of metrics begin there."""
    wanted = trainer.cfg.train.branch
    if branch is None or branch.origin != wanted:
        found = f", and this is {branch.origin}" if branch else ""
        raise UserError(
            f"this run continues from the checkpoint {wanted}{found}: say where that is with --branch RUN@STEP"
        )
    with foreign_state_said(branch.checkpoint):
        trainer.restore(branch.checkpoint)
    trainer.state.evaluated = trainer.state.sampled = -1


def _check_may_begin(run: Run, *, resume: bool) -> None:
    """Raise if this would write over a run that nobody has asked to resume."""
    if not resume and run.has_files:
        raise UserError(f"run {str(run.folder)!r} exists already: continue with --resume, or give another --name")


def _lock(run: Run, cfg: RunConfig, stack: ExitStack, *, resume: bool, accept_changes: bool) -> None:
    """Make a run's folder, lock it until the stack is closed, and check that it may be written to."""
    make_folder(run.folder)
    stack.enter_context(FolderLock(run.folder))
    _check_may_begin(run, resume=resume)  # again: another process may have trained here while data was prepared
    run.sweep()
    _check_same(run, cfg, accept_changes=accept_changes)


def _has_saved(run: Run) -> bool:
    """Whether this run ever saved: `.saved` is there, or (runs of 0.1.0) its metrics go beyond its second save."""
    if run.saved_file.exists() or not run.exists or run.config().train.branch is not None:
        return run.saved_file.exists()
    second = 2 * run.config().train.save_every
    return any(record["step"] > second for record in run.metrics())


def _train(trainer: Trainer, run: Run, checkpoint: Checkpoint | None, trackers: Sequence[str]) -> None:
    """Run the loop, from the beginning or from a checkpoint that was restored."""
    cfg, group, observer = trainer.cfg, trainer.group, trainer.observer
    checkpoints = run.checkpoints(cfg.train.keep_last, save_group=group.save_group)
    log = Trackers(trackers, run.folder, cfg.model_dump(mode="json"), trainer.state.step, observer.message)
    with Signals(group), BackgroundSaver(checkpoints) if group.saves else GatherOnlySaver() as saver:
        loop = TrainingLoop(trainer, run, log, saver, resumed=checkpoint is not None)
        with _closing(loop, observer):
            for name, journal in (("metrics", loop.metrics), ("samples", loop.samples)):
                lost = journal.cut(checkpoint.state["journals"][name] if checkpoint else 0)
                if lost:
                    observer.message(lost)
            observer.begin(trainer)
            with group.guarded():  # innermost: a lost rank is noticed before a pending save is waited for
                loop.train()


@contextmanager
def _closing(loop: TrainingLoop, observer: Observer) -> Iterator[None]:
    try:
        yield
    finally:
        observer.end()
        loop.close()


def _check_same(run: Run, cfg: RunConfig, *, accept_changes: bool) -> None:
    """Raise where a run that exists was started with another configuration."""
    # how processes share a run changes nothing in it
    changed = differences(run.config(), cfg.replace(parallel=run.config().parallel)) if run.exists else {}
    if changed and not accept_changes:
        listed = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in changed.items())
        raise UserError(
            f"run {str(run.folder)!r} was started with another configuration ({listed}); "
            "continue with the old one, or add --accept-changes"
        )


def _write_config(run: Run, cfg: RunConfig, corpus: Corpus | OwnData) -> None:
    """Write what the run is."""
    if corpus.tokenizer is not None:
        corpus.tokenizer.save(run.tokenizer_file)
    train_tokens = {} if isinstance(corpus, OwnData) else {"train_tokens": corpus.train.n_tokens}
    write_json(
        run.config_file,
        {
            "config": cfg.model_dump(mode="json"),
            "command": sys.argv,
            "versions": versions(),
            "machine": machine(),
            "data": {"fingerprint": corpus.fingerprint, **train_tokens},
            **plugins_of(cfg),
        },
    )


def _newest_checkpoint(run: Run, group: Group, observer: Observer) -> Checkpoint | None:
    """The newest valid checkpoint: the first process finds and verifies it, the others open the same."""
    checkpoint: Checkpoint | None = None
    with group.raise_on_all_ranks():
        if group.is_main_process:
            checkpoint, damaged = run.checkpoints().latest_valid()
            if checkpoint is None and (damaged or _has_saved(run)):
                raise NoValidCheckpoint(run, damaged)
            for path, reason in damaged:
                observer.message(f"skipped the damaged checkpoint {path.name}: {reason}")
    name = group.exchange(checkpoint.path.name if checkpoint else None)[0]
    if name is None:
        return None
    with group.raise_on_all_ranks():
        checkpoint = checkpoint or Checkpoints.load(run.checkpoints().folder / name, verified=True)
    assert checkpoint is not None
    observer.message(f"going on from step {checkpoint.step}")
    return checkpoint
