"""A worker does one job and reports in data: a result and an exit status; a pool reads those and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from skipless.config.run import FinetuneConfig, RunConfig
from skipless.data.sources import corpus_variable
from skipless.errors import UserError
from skipless.experiments import pool as pool_module
from skipless.experiments import worker
from skipless.experiments.jobs import FineTuning, Job
from skipless.experiments.messages import FinetuneWork, JobFile, Result, TrainWork
from skipless.experiments.pool import Pool
from skipless.experiments.run_index import completion
from skipless.experiments.scale import PROTOCOLS
from skipless.experiments.watcher import Watcher
from skipless.runs import Run
from skipless.storage.atomic_files import DiskFull
from skipless.storage.lock import FolderLock, InUse
from skipless.training.stopping import Interrupted, NonFinite
from skipless.training.train import train
from tests.helpers.glue_files import small_glue
from tests.helpers.processes import ENVIRONMENT, ROOT
from tests.helpers.tiny_runs import MASKED, assert_same_run, records, state_of, tiny


@pytest.fixture
def job_file(tmp_path):
    """Writes a job file, and says where it and its result are."""

    def write(work, parent=None):
        file, result = tmp_path / "job.json", tmp_path / "result.json"
        JobFile(work=work, result=result, parent=parent or os.getpid(), command=("skipless", "typed")).write(file)
        return file, result

    return write


@pytest.fixture
def do_here(job_file, monkeypatch):
    """Does work as a worker does, in this process; the exit status and the result."""
    monkeypatch.setattr(worker, "end_with", lambda parent: None)
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def do(work):
        file, result = job_file(work)
        return worker.main(file), json.loads(result.read_text())

    return do


@pytest.fixture
def start(job_file):
    """Starts a worker as a pool does."""
    started = []

    def begin(work, parent=None):
        file, result = job_file(work, parent)
        command = [sys.executable, "-m", "skipless.experiments.worker", str(file)]
        started.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True))
        return started[-1], result

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, timeout=600):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def training(source, folder, cache_dir, **changes):
    return TrainWork(folder=folder, config=tiny(source, **changes), cache_dir=cache_dir)


# ----------------------------------------------------------------------------------- what a worker reports


def test_finished(do_here, source, tmp_path, cache_dir):
    work = training(source, tmp_path / "run", cache_dir)
    assert do_here(work) == (0, {"status": "finished", "message": "", "step": 12})
    run = Run(tmp_path / "run")
    assert completion(run).finished
    assert run.info()["command"] == ["skipless", "typed"]
    assert not (run.folder / "tensorboard").exists()
    train(work.config, tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    assert_same_run(run.folder, tmp_path / "reference")


def test_what_is_there_goes_on(do_here, source, tmp_path, cache_dir):
    work = training(source, tmp_path / "run", cache_dir)
    assert do_here(work)[0] == 0
    before = records(tmp_path / "run")
    assert do_here(work) == (0, {"status": "finished", "message": "", "step": 12})
    assert records(tmp_path / "run") == before


def test_bad_input(do_here, source, tmp_path, cache_dir):
    train(tiny(source), tmp_path / "run", trackers=[], cache_dir=cache_dir)
    code, result = do_here(training(source, tmp_path / "run", cache_dir, lr=1.0))
    assert (code, result["status"], result["step"]) == (2, "bad-input", None)
    assert "was started with another configuration" in result["message"]
    assert "train.lr" in result["message"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("in the way")
    code, result = do_here(training(source, tmp_path / "other", cache_dir))
    assert (code, result["status"]) == (2, "bad-input")
    assert "checkpoints" in result["message"]


def test_in_use(do_here, source, tmp_path, cache_dir):
    with FolderLock(tmp_path / "run"):
        code, result = do_here(training(source, tmp_path / "run", cache_dir))
    assert (code, result["status"]) == (4, "in-use")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_loss_that_is_not_finite(do_here, source, tmp_path, cache_dir):
    code, result = do_here(training(source, tmp_path / "run", cache_dir, lr=1e30))
    assert (code, result["status"]) == (3, "failed")
    assert "finite" in result["message"] or "nan" in result["message"]
    assert result["step"] < 12


def test_an_error_that_nobody_expected_has_its_place(do_here, source, tmp_path, cache_dir, monkeypatch, capsys):
    def fail(*_, **__):
        raise ZeroDivisionError("of\n  nothing")

    monkeypatch.setattr("skipless.training.train.train", fail)
    code, result = do_here(training(source, tmp_path / "run", cache_dir))
    assert (code, result["status"]) == (1, "failed")
    assert result["message"].startswith("ZeroDivisionError: of nothing (test_worker.py, line ")
    assert "Traceback" in capsys.readouterr().err


def validation_error():
    try:
        RunConfig.model_validate({"modle": {}})
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("so"), ("bad-input", 2, "so")),
        (validation_error(), ("bad-input", 2, "did you mean 'model'")),
        (PermissionError(13, "Permission denied", "/a/run"), ("bad-input", 2, "Permission denied: /a/run")),
        (OSError(28, "No space left on device", "/a/run"), ("failed", 3, "No space left on device: /a/run")),
        (DiskFull("no room"), ("failed", 3, "no room")),
        (NonFinite("step 7: the loss is nan"), ("failed", 3, "step 7: the loss is nan")),
        (InUse(ROOT, 7), ("in-use", 4, "in use by process 7")),
        (Interrupted(signal.SIGTERM, 8), ("stopped", 143, "SIGTERM: saved at step 8")),
        (Interrupted(signal.SIGINT, 8), ("stopped", 130, "SIGINT: saved at step 8")),
        (KeyboardInterrupt(), ("stopped", 130, "")),
        (RuntimeError("is in use by process 7"), ("failed", 1, "is in use by process 7")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_type_of_an_error_says_what_came_of_a_job(error, expected):
    status, code, said = expected
    assert worker.judge(error) == (status, code)
    assert said in worker.describe(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"work": {"kind": "cook"}}', "cook"),
        ('{"work": {"kind": "train"}, "result": "r", "parent": 1}', "work.train.folder: field required"),
    ],
)
def test_a_job_file_that_is_none_is_told(tmp_path, text, message):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UserError, match=message):
        worker.main(tmp_path / "job.json")
    with pytest.raises(UserError, match="cannot read"):
        worker.main(tmp_path / "nowhere.json")


# --------------------------------------------------------------------------------------- fine-tuning


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return small_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def encoder(tmp_path, source, cache_dir):
    cfg = tiny(source, MASKED, {"model.max_seq_len": 32, "data.seq_len": 32}, steps=2, eval_every=0)
    return train(cfg, tmp_path / "encoder", trackers=[], cache_dir=cache_dir)


def test_an_encoder_is_fine_tuned(do_here, encoder, glue):
    how = {"run": encoder.folder, "glue": str(glue), "seeds": 1, "config": FinetuneConfig(epochs=1)}
    assert do_here(FinetuneWork(tasks=("rte",), **how)) == (0, {"status": "finished", "message": "", "step": None})
    results = json.loads((encoder.folder / "glue.json").read_text())
    assert list(results["tasks"]) == ["rte"]
    assert results["settings"]["finetune"]["epochs"] == 1
    code, result = do_here(FinetuneWork(tasks=("rte", "cake"), **how))
    assert (code, result["status"]) == (2, "bad-input")
    assert "unknown GLUE task 'cake'" in result["message"]
    results["failures"] = {"rte": {"0": {"message": "the loss is nan"}}}
    (encoder.folder / "glue.json").write_text(json.dumps(results))
    code, result = do_here(FinetuneWork(tasks=("rte",), **how))
    assert (code, result["status"]) == (3, "failed")
    assert "1 of the fine-tunings failed; the first: the loss is nan" in result["message"]


def test_a_protocol_is_a_configuration(tmp_path, source):
    job = FineTuning(tiny(source), Run(tmp_path / "run"), 1.0, "glue", PROTOCOLS["laptop"], 3)
    assert job.finetune_config == FinetuneConfig(rows={"sst2": 1000}, lr=1e-3)
    assert job.folder == tmp_path / "run" / "glue"
    work = job.work(None)
    assert (work.tasks, work.seeds) == (("sst2", "stsb", "rte", "mrpc", "cola"), 3)
    assert FinetuneWork.model_validate_json(work.model_dump_json()) == work


# ------------------------------------------------------------------------------------------- signals

LONG = {"steps": 20_000, "save_every": 10_000, "eval_every": 10_000}


@pytest.mark.slow
def test_asked_to_end_it_saves_and_says_where(start, source, tmp_path, cache_dir):
    process, result = start(training(source, tmp_path / "run", cache_dir, **LONG))
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(records(tmp_path / "run")) > 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 143
    found = Result.read(result)
    assert found.status == "stopped"
    (saved,) = Run(tmp_path / "run").checkpoints().all()
    assert state_of(saved)["step"] == found.step
    assert found.step > 3


def test_a_worker_whose_parent_is_gone_does_nothing(start, source, tmp_path, cache_dir):
    process, result = start(training(source, tmp_path / "run", cache_dir), parent=2**22 + 1)
    assert process.wait(600) == 143
    assert not result.exists()
    assert not (tmp_path / "run").exists()


def test_without_a_job_there_is_no_result(tmp_path):
    command = [sys.executable, "-m", "skipless.experiments.worker", str(tmp_path / "job.json")]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("skipless: cannot read")
    assert ended.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------- what a pool reads


class Told(Watcher):
    """Remembers what it was told, and does something at every tick."""

    def __init__(self, at_tick=lambda: None):
        self.said, self.at_tick = [], at_tick

    def started(self, job, progress):
        self.said.append("started")

    def finished(self, job, progress):
        self.said.append("finished")

    def failed(self, job, reason, progress):
        self.said.append(reason)

    def waiting(self, job, progress):
        self.said.append("waiting")

    def tick(self, progress):
        self.at_tick()


@pytest.fixture
def job(source, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(**changes):
        return Job(tiny(source, **changes), Run(tmp_path / "run"), 1.0)

    return make


@pytest.fixture
def a_forked_worker(fork_server, monkeypatch):
    """For tests of which the start of a worker is not the point; the others start it as a user's command does."""
    monkeypatch.setattr(pool_module, "subprocess", SimpleNamespace(Popen=fork_server.start_worker, DEVNULL=None))


def test_a_killed_worker_is_reported_with_its_signal_and_goes_on_bit_for_bit(job, tmp_path, cache_dir):
    wanted = job(steps=400, save_every=20, eval_every=50)

    def kill():
        for one in pool.workers if wanted.run.checkpoints().all() else []:
            one.process.kill()

    watcher = Told(kill)
    pool = Pool(cache_dir=cache_dir, watcher=watcher)
    progress = pool.run([wanted])
    assert list(progress.failed) == ["run"]
    assert "SIGKILL" in progress.failed["run"]
    assert watcher.said == ["started", progress.failed["run"]]
    assert not completion(wanted.run).finished
    watcher = Told()
    assert Pool(cache_dir=cache_dir, watcher=watcher).run([wanted]).finished == {"run"}
    assert watcher.said == ["started", "finished"]
    train(wanted.cfg, tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    assert_same_run(wanted.folder, tmp_path / "reference")


def test_a_worker_that_cannot_even_begin_is_reported_with_its_last_words(job, cache_dir, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    progress = Pool(cache_dir=cache_dir).run([job()])
    assert progress.failed == {"run": "the worker exited with status 1 and left no result; its last line: none"}


@pytest.mark.usefixtures("a_forked_worker")
def test_what_another_process_has_is_waited_for(job, cache_dir, monkeypatch):
    """It takes the lock after the pool has looked, and ends without having done the job."""
    wanted = job()
    monkeypatch.setattr(pool_module, "is_locked", lambda folder: False)
    lock = FolderLock(wanted.folder)
    lock.acquire()

    def free():
        if "waiting" in watcher.said:
            lock.release()

    watcher = Told(free)
    progress = Pool(cache_dir=cache_dir, watcher=watcher).run([wanted])
    assert (progress.finished, progress.failed) == ({"run"}, {})
    assert watcher.said[:2] == ["started", "waiting"]
    assert watcher.said[-1] == "finished"


@pytest.mark.usefixtures("a_forked_worker")
def test_a_worker_knows_where_corpora_are(source, tmp_path, cache_dir, monkeypatch):
    monkeypatch.setenv(corpus_variable("code"), source)
    wanted = Job(tiny("corpus:code", steps=2), Run(tmp_path / "run"), 1.0)
    progress = Pool(cache_dir=cache_dir).run([wanted])
    assert (progress.finished, progress.failed) == ({"run"}, {})
    assert wanted.run.config().data.source == "corpus:code"


@pytest.mark.usefixtures("a_forked_worker")
def test_no_message_is_left_behind(job, tmp_path, cache_dir, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    seen = set()
    watcher = Told(lambda: seen.update(path.name for path in (tmp_path / "tmp").glob("*/*")))
    assert Pool(cache_dir=cache_dir, watcher=watcher).run([job(steps=2)]).finished == {"run"}
    assert {"job.json", "stderr"} <= seen
    assert not list((tmp_path / "tmp").iterdir())
