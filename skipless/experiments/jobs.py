"""What experiments need: runs to be trained, encoders to be fine-tuned, in the order in which they are done."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from skipless.config.run import FinetuneConfig, RunConfig
from skipless.data.glue import GlueTask, parse_tasks, read_task
from skipless.errors import UserError, unknown
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.estimates import cost
from skipless.experiments.experiment import Experiment
from skipless.experiments.messages import FinetuneWork, TrainWork, Work
from skipless.experiments.run_index import Completion, RunIndex, completion, run_key, run_name, tidy, with_seed
from skipless.experiments.scale import PROTOCOLS, Protocol, Scale
from skipless.runs import Run
from skipless.storage.atomic_files import leftovers, remove_folder, sweep
from skipless.storage.lock import FolderLock, InUse
from skipless.tasks.glue_results import has_outcome, read_results, variant
from skipless.tasks.low_bits import FILE as LOW_BITS_FILE


@dataclass(frozen=True)
class Job:
    """A run that experiments need."""

    cfg: RunConfig
    run: Run
    seconds: float
    """Estimated cost: of runs in seconds, of fine-tunings in units of one seed of all tasks."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.run.name

    @property
    def folder(self) -> Path:
        """The folder whose lock a worker holds while it does this job."""
        return self.run.folder

    def completion(self) -> Completion:
        """How far it is."""
        return completion(self.run)

    def tidy(self) -> None:
        """Remove what a process that was killed at its very end has left."""
        tidy(self.run)

    def work(self, cache_dir: Path | None) -> Work:
        """What a worker is told to do, or to go on with."""
        return TrainWork(folder=self.folder, config=self.cfg, cache_dir=cache_dir)


@dataclass(frozen=True)
class LowBits(Job):
    """A run whose model is also measured at low bits. One that was published has no weights: it is trained again."""

    def completion(self) -> Completion:
        """It is finished with its figures."""
        trained = completion(self.run)
        return Completion(trained.finished and (self.run.folder / LOW_BITS_FILE).exists(), trained.share)

    def work(self, cache_dir: Path | None) -> Work:
        """What a worker is told to do, or to go on with."""
        return TrainWork(folder=self.folder, config=self.cfg, cache_dir=cache_dir, low_bits=True)


@dataclass(frozen=True)
class FineTuning(Job):
    """The fine-tuning of a finished run on GLUE."""

    glue: str
    protocol: Protocol
    seeds: int
    from_scratch: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{self.run.name}, GLUE {'from scratch, ' * self.from_scratch}{self.seeds} seed{'s' * (self.seeds > 1)}"

    @property
    def finetune_config(self) -> FinetuneConfig:
        """How it is done."""
        return FinetuneConfig().override({**self.protocol.changes, "from_scratch": self.from_scratch})

    @property
    def folder(self) -> Path:
        """The folder whose lock a worker holds while it does this job."""
        return self.run.folder / variant(self.finetune_config)

    def completion(self) -> Completion:
        """How many of its tasks and seeds have ended."""
        path = self.run.folder / f"{self.folder.name}.json"
        if not path.exists():
            return Completion(finished=False, share=0.0)
        results, wanted = read_results(path), self._wanted()
        done = sum(has_outcome(results, task, seed) for task, seed in wanted)
        return Completion(finished=done == len(wanted), share=done / len(wanted))

    def tidy(self) -> None:
        """Remove what a process that was killed at its very end has left: staged files, checkpoints of what is done."""
        fits = [self.folder / f"{task.name}-seed-{seed}" for task, seed in self._wanted()]
        if leftovers(self.folder) or any(fit.exists() for fit in fits):
            with suppress(InUse, OSError), FolderLock(self.folder):
                for fit in fits:
                    if fit.exists():
                        remove_folder(fit)
                sweep(self.folder)

    def _wanted(self) -> list[tuple[GlueTask, int]]:
        return [(task, seed) for task in parse_tasks(self.protocol.tasks) for seed in range(self.seeds)]

    def work(self, cache_dir: Path | None) -> Work:
        """What a worker is told to do, or to go on with."""
        del cache_dir  # of text that is prepared for training
        return FinetuneWork(
            run=self.run.folder,
            glue=self.glue,
            tasks=tuple(task.name for task in parse_tasks(self.protocol.tasks)),
            seeds=self.seeds,
            config=self.finetune_config,
        )


def choose(ids: Sequence[str]) -> list[Experiment]:
    """Experiments by their ids; `all` is every one."""
    for name in ids:
        if name not in (*EXPERIMENTS, "all"):
            raise unknown("experiment", name, [*EXPERIMENTS, "all"])
    return [one for one in EXPERIMENTS.values() if one.id in ids or "all" in ids]


def plan(experiments: Iterable[Experiment], scale: Scale, seeds: int, index: RunIndex, speed: float) -> list[Job]:
    """Every run once; the first seed of all experiments before the second, so that a short budget shows most."""
    needed = [(seed, one.low_bits, cfg) for one in experiments for _, seed, cfg in one.runs(scale, seeds)]
    measured = {run_key(cfg) for _, low_bits, cfg in needed if low_bits}
    jobs: dict[str, Job] = {}
    for _, _, cfg in sorted(needed, key=lambda part: part[0]):
        key = run_key(cfg)
        if key in jobs:
            continue
        if key in measured:
            jobs[key] = LowBits(cfg, _with_weights(index, cfg), cost(cfg, speed))
        else:
            jobs[key] = Job(cfg, index.find(cfg), cost(cfg, speed))
    return list(jobs.values())


def _with_weights(index: RunIndex, cfg: RunConfig) -> Run:
    """The run with its figures at low bits, or that from whose weights they are made."""
    found = index.find(cfg)
    archived = found.archived_metrics_file.exists() and not found.metrics_file.exists()
    return Run(index.folder / run_name(cfg)) if archived and not (found.folder / LOW_BITS_FILE).exists() else found


def check_glue(glue: str, experiments: Sequence[Experiment], scale: Scale) -> None:
    """A UserError where GLUE would not be used or cannot be read."""
    if not any(one.on_glue for one in experiments):
        using = ", ".join(one.id for one in EXPERIMENTS.values() if one.on_glue)
        raise UserError(f"--glue-dir is for {using}; none of them was asked for")
    for task in parse_tasks(PROTOCOLS[scale.name].tasks):
        read_task(glue, task)


def plan_fine_tunings(
    experiments: Iterable[Experiment], scale: Scale, seeds: int, index: RunIndex, glue: str
) -> list[Job]:
    """Fine-tunings of finished runs: a seed of each and of its random encoder, the other seeds, more of some tasks."""
    protocol = PROTOCOLS[scale.name]
    cfgs = {label: cfg for one in experiments if one.on_glue for label, cfg in one.configs(scale).items()}
    runs = {(label, seed): with_seed(cfg, seed) for seed in range(seeds) for label, cfg in cfgs.items()}
    found = {key: (cfg, index.find(cfg)) for key, cfg in runs.items()}
    found = {key: (cfg, run) for key, (cfg, run) in found.items() if completion(run).finished}

    def tune(
        wanted: Iterable[tuple[str, int]], count: int, tasks: str = protocol.tasks, *, from_scratch: bool = False
    ) -> list[Job]:
        of, share = replace(protocol, tasks=tasks), len(parse_tasks(tasks)) / len(parse_tasks(protocol.tasks))
        return [FineTuning(*found[key], count * share, glue, of, count, from_scratch) for key in wanted]

    baselines = [key for key in found if key[0] in protocol.baselines]
    first = [*tune(found, 1), *tune(baselines, 1, from_scratch=True)]
    rest = tune([key for key in found if key[0] not in protocol.once], protocol.seeds)
    for task, count in protocol.more:
        rest += [*tune(baselines, count, task), *tune(baselines, count, task, from_scratch=True)]
    return [*first, *rest]
