"""Runs what an experiment needs and is not there yet, and judges what is: the engine of `skipless reproduce`.

A run is found by its configuration, so experiments share runs, and what is finished is never done again. Each run is
trained by a child process, `skipless train`, which takes the lock of the run's folder: several of these engines, on
one machine or on several with a common file system, share the work. `skipless finetune` does the same for encoders.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import torch

from skipless.atomic import IN_USE, is_locked, make_folder, write_json
from skipless.config import FinetuneConfig, ModelConfig, RunConfig
from skipless.data.glue import parse_tasks, read_task
from skipless.errors import UserError, unknown
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.experiment import Experiment
from skipless.experiments.outcome import Finding
from skipless.experiments.recipes import PROTOCOLS, Protocol, Scale
from skipless.experiments.shelf import Shelf, State, run_key, state, with_seed
from skipless.finetune import has_outcome, variant
from skipless.inspect import flops_per_token
from skipless.machine import matmul_speed, pick_device
from skipless.runs import Run
from skipless.train import Signals, TrainingStopped

LOOK_EVERY = 0.2
"""Seconds between two looks at the children."""

READ_EVERY = 2.0
"""Seconds between two looks at how far their runs are."""

GPU_SPEED = 30e12
"""FLOP/s that a GPU is assumed to sustain, for the estimates at paper scale."""

CPU_SHARE = 0.35
"""Share of the speed of large matrix products that training is assumed to reach, for the estimates at laptop scale."""


# -------------------------------------------------------------------------------- costs


def cost(cfg: RunConfig, speed: float) -> float:
    """An estimate of a run's seconds at a speed in FLOP/s, evaluations not counted."""
    train = cfg.train
    if train.minutes is not None:
        return 60 * train.minutes
    tokens = train.tokens if train.tokens else (train.steps or 0) * train.batch_size * cfg.data.seq_len
    return tokens * _flops(cfg.model, cfg.data.seq_len, cfg.predicted_share) / speed


@cache
def _flops(model: ModelConfig, length: int, head_share: float) -> float:
    return flops_per_token(model, length, head_share=head_share)["training"]


def speed_of(scale: Scale) -> float:
    """The speed that estimates are made with: of a stated GPU for the paper's scale, else of this machine."""
    if scale.is_paper:
        return GPU_SPEED
    device = pick_device("auto")
    return CPU_SHARE * matmul_speed(device, torch.float32)


def costs(experiment: Experiment, scales: Iterable[Scale]) -> dict[str, Any]:
    """What an experiment is, and what one seed of it costs at each scale if nothing is there yet."""
    at: dict[str, Any] = {}
    for scale in scales:
        configs = {run_key(cfg): cfg for cfg in experiment.configs(scale).values()}
        seconds = sum(cost(cfg, speed_of(scale)) for cfg in configs.values())
        at[scale.name] = {"runs": len(configs), "seconds": seconds}
    came_out = came_out_here().get(experiment.id)
    content = {"id": experiment.id, "title": experiment.title, "paper": experiment.paper, "own": experiment.own}
    return {**content, "scales": at, "came_out": came_out}


@cache
def came_out_here() -> dict[str, Any]:
    """What came out of the experiments that were published with this version."""
    return json.loads(files("skipless.experiments").joinpath("published.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Task:
    """A run that experiments need."""

    cfg: RunConfig
    run: Run
    seconds: float
    """What it is estimated to cost."""

    @property
    def name(self) -> str:
        """What it is called while it is at work."""
        return self.run.name

    @property
    def folder(self) -> Path:
        """The folder whose lock a process that is at it holds."""
        return self.run.folder

    def state(self) -> State:
        """How far it is."""
        return state(self.run)

    def command(self, cache_dir: Path | None) -> list[str]:
        """The words after `skipless` that do it, or go on with it."""
        make_folder(self.folder)
        write_json(self.folder / "plan.json", self.cfg.model_dump(mode="json"))
        command = ["train", "--config", str(self.folder / "plan.json"), "--runs", str(self.folder.parent)]
        command += ["--name", self.folder.name, "--resume", "auto", "--track", "none", "--json"]
        return [*command, *(["--cache-dir", str(cache_dir)] if cache_dir else [])]


@dataclass(frozen=True)
class FineTuning(Task):
    """The fine-tuning of a finished run on GLUE."""

    glue: str
    protocol: Protocol
    seeds: int
    from_scratch: bool = False

    @property
    def name(self) -> str:
        """What it is called while it is at work."""
        return f"{self.run.name}, GLUE {'from scratch, ' * self.from_scratch}{self.seeds} seed{'s' * (self.seeds > 1)}"

    @property
    def folder(self) -> Path:
        """The folder whose lock a process that is at it holds."""
        return self.run.folder / variant(FinetuneConfig(from_scratch=self.from_scratch))

    def state(self) -> State:
        """How many of its tasks and seeds have ended."""
        path = self.run.folder / f"{self.folder.name}.json"
        if not path.exists():
            return State(finished=False, share=0.0)
        results = json.loads(path.read_text(encoding="utf-8"))
        wanted = [(task, seed) for task in parse_tasks(self.protocol.tasks) for seed in range(self.seeds)]
        done = sum(has_outcome(results, task, seed) for task, seed in wanted)
        return State(finished=done == len(wanted), share=done / len(wanted))

    def command(self, cache_dir: Path | None) -> list[str]:
        """The words after `skipless` that do it, or go on with it."""
        del cache_dir
        command = ["finetune", str(self.run.folder), "--glue-dir", self.glue, "--tasks", self.protocol.tasks]
        command += ["--seeds", str(self.seeds), *self.protocol.options, "--json"]
        return [*command, *(["--from-scratch"] if self.from_scratch else [])]


def choose(ids: Sequence[str]) -> list[Experiment]:
    """Experiments by their ids; `all` is every one."""
    for name in ids:
        if name not in (*EXPERIMENTS, "all"):
            raise unknown("experiment", name, [*EXPERIMENTS, "all"])
    return [one for one in EXPERIMENTS.values() if one.id in ids or "all" in ids]


def plan(experiments: Iterable[Experiment], scale: Scale, seeds: int, shelf: Shelf, speed: float) -> list[Task]:
    """Every run once; the first seed of all experiments before the second, so that a short budget shows most."""
    needed = [(seed, cfg) for one in experiments for _, seed, cfg in one.runs(scale, seeds)]
    tasks: dict[str, Task] = {}
    for _, cfg in sorted(needed, key=lambda pair: pair[0]):
        key = run_key(cfg)
        if key not in tasks:
            tasks[key] = Task(cfg, shelf.find(cfg), cost(cfg, speed))
    return list(tasks.values())


def check_glue(glue: str, experiments: Sequence[Experiment], scale: Scale) -> None:
    """A UserError where GLUE would not be used or cannot be read."""
    if not any(one.on_glue for one in experiments):
        using = ", ".join(one.id for one in EXPERIMENTS.values() if one.on_glue)
        raise UserError(f"--glue-dir is for {using}; none of them was asked for")
    for task in parse_tasks(PROTOCOLS[scale.name].tasks):
        read_task(glue, task)


def plan_fine_tunings(
    experiments: Iterable[Experiment], scale: Scale, seeds: int, shelf: Shelf, glue: str
) -> list[Task]:
    """Fine-tunings of finished runs: one seed of all and of the baselines, the other seeds, more of single tasks."""
    protocol = PROTOCOLS[scale.name]
    cfgs = {label: cfg for one in experiments if one.on_glue for label, cfg in one.configs(scale).items()}
    runs = {(label, seed): with_seed(cfg, seed) for seed in range(seeds) for label, cfg in cfgs.items()}
    found = {key: (cfg, shelf.find(cfg)) for key, cfg in runs.items()}
    found = {key: (cfg, run) for key, (cfg, run) in found.items() if state(run).finished}

    def tune(
        wanted: Iterable[tuple[str, int]], count: int, tasks: str = protocol.tasks, *, from_scratch: bool = False
    ) -> list[Task]:
        of, share = replace(protocol, tasks=tasks), len(parse_tasks(tasks)) / len(parse_tasks(protocol.tasks))
        return [FineTuning(*found[key], count * share, glue, of, count, from_scratch) for key in wanted]

    baselines = [key for key in found if key[0] in protocol.baselines]
    first = [*tune(found, 1), *tune(baselines, 1, from_scratch=True)]
    rest = tune([key for key in found if key[0] not in protocol.once], protocol.seeds)
    for task, count in protocol.more:
        rest += [*tune(baselines, count, task), *tune(baselines, count, task, from_scratch=True)]
    return [*first, *rest]


def as_dict(finding: Finding) -> dict[str, Any]:
    """For JSON; plots are left to their own files."""
    content = {key: value for key, value in vars(finding).items() if key not in ("plots", "runs", "verdicts")}
    verdicts = [asdict(verdict) for verdict in finding.verdicts]
    return {**content, "verdicts": verdicts, "runs": [str(run.folder) for run in finding.runs]}


# ------------------------------------------------------------------------------- running


class Stopped(TrainingStopped):
    """A signal asked for an end; every run is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: every run is saved; the same command goes on from here")
        self.status = 128 + number


@dataclass
class Progress:
    """How far all runs are together."""

    tasks: Sequence[Task]
    finished: set[str] = field(default_factory=set)
    """Names of runs."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name of a run → reason."""
    running: dict[str, float] = field(default_factory=dict)
    """Name of a run → share of its budget that is spent."""
    started: float = field(default_factory=time.monotonic)
    done_before: float = 0.0

    @property
    def total(self) -> float:
        """Estimated seconds of all runs that have not failed."""
        return sum(task.seconds for task in self.tasks if task.name not in self.failed)

    @property
    def done(self) -> float:
        """Those of what is done."""
        share = {**self.running, **dict.fromkeys(self.finished, 1.0)}
        return sum(task.seconds * share.get(task.name, 0.0) for task in self.tasks)

    @property
    def seconds_left(self) -> float:
        """From the speed since the start; not a number before there is one."""
        gained = self.done - self.done_before
        return (self.total - self.done) * (time.monotonic() - self.started) / gained if gained > 0 else float("nan")


class Watcher:
    """Whoever wants to see what happens. This one looks away."""

    def started(self, task: Task, progress: Progress) -> None:
        """A run begins or goes on."""

    def finished(self, task: Task, progress: Progress) -> None:
        """A run is finished."""

    def failed(self, task: Task, reason: str, progress: Progress) -> None:
        """A run has stopped by itself."""

    def waiting(self, task: Task, progress: Progress) -> None:
        """A run is being trained by another process."""

    def tick(self, progress: Progress) -> None:
        """Time has passed."""


@dataclass
class Child:
    """A process that trains a run."""

    task: Task
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    slot: int
    """Its number among those that run at a time."""

    def reason(self) -> str:
        """The last line of what it said."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("skipless: ") if lines else "it said nothing"
        return f"{said} (exit status {self.process.returncode})"


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(number) for number in range(torch.cuda.device_count())]


@dataclass
class Pool:
    """Trains runs in child processes."""

    jobs: int = 1
    cache_dir: Path | None = None
    deadline: float | None = None
    """On the monotonic clock."""
    watcher: Watcher = field(default_factory=Watcher)

    done: Callable[[Task], object] = lambda task: None
    """Called with each task that was finished here."""

    def run(self, tasks: Sequence[Task]) -> Progress:
        """Train what is not finished; ends when all is done, or has failed, or the deadline has come."""
        self.progress = Progress(tasks)
        self.children: list[Child] = []
        self.elsewhere: list[Task] = []
        self.queue: deque[Task] = deque()
        self.read = 0.0
        for task in tasks:
            found = task.state()
            if found.finished:
                self.progress.finished.add(task.name)
            else:
                self.progress.running[task.name] = found.share
                self.queue.append(task)
        self.progress.done_before = self.progress.done
        with Signals() as signals:
            try:
                self._loop(signals)
            finally:
                self._stop()
        if signals.received:
            raise Stopped(signals.received)
        return self.progress

    def _loop(self, signals: Signals) -> None:
        while self.queue or self.children or self.elsewhere:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            if signals.received or late:
                return
            self._look_elsewhere()
            self._read_shares()
            while self.queue and len(self.children) < self.jobs:
                self._start(self.queue.popleft())
            for child in list(self.children):
                if child.process.poll() is not None:
                    self._ended(child)
            self.watcher.tick(self.progress)
            time.sleep(LOOK_EVERY)

    def _read_shares(self) -> None:
        if time.monotonic() - self.read > READ_EVERY:
            self.read = time.monotonic()
            for child in self.children:
                self.progress.running[child.task.name] = child.task.state().share

    def _look_elsewhere(self) -> None:
        """Runs that another process had: done, or left behind."""
        for task in list(self.elsewhere):
            if is_locked(task.folder):
                continue
            self.elsewhere.remove(task)
            if task.state().finished:
                self._finish(task)
            else:
                self.queue.append(task)

    def _start(self, task: Task) -> None:
        if is_locked(task.folder):
            self._leave(task)
            return
        words = task.command(self.cache_dir)
        command = [sys.executable, "-m", "skipless.cli.child", str(os.getpid()), *words]
        slot = next(number for number in range(self.jobs) if number not in {child.slot for child in self.children})
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the child has ended)
        # In a session of its own, so that Ctrl-C reaches this process alone, which passes it on once: a second signal
        # would end a training before it has saved.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=self._environment(slot),
            start_new_session=True,
        )
        self.children.append(Child(task, process, errors, slot))
        self.watcher.started(task, self.progress)

    def _environment(self, slot: int) -> dict[str, str]:
        """A child has its share of the cores, unless that was decided outside, and one GPU where there are several."""
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        given = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        devices = visible_devices()
        if len(devices) > 1:
            given["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        return {**os.environ, **given}

    def _ended(self, child: Child) -> None:
        self.children.remove(child)
        task, reason = child.task, child.reason()
        child.errors.close()
        if child.process.returncode == 0:
            self._finish(task)
        elif IN_USE in reason:
            self._leave(task)
        else:
            self.progress.failed[task.name] = reason
            self.progress.running.pop(task.name, None)
            self.watcher.failed(task, reason, self.progress)

    def _finish(self, task: Task) -> None:
        self.progress.running.pop(task.name, None)
        self.progress.finished.add(task.name)
        self.done(task)
        self.watcher.finished(task, self.progress)

    def _leave(self, task: Task) -> None:
        self.elsewhere.append(task)
        self.watcher.waiting(task, self.progress)

    def _stop(self) -> None:
        """Ask the children to save and end, and wait until they have."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in list(self.children):
            child.process.wait()
            child.errors.close()
            if child.process.returncode == 0:
                self._finish(child.task)
        self.children.clear()
