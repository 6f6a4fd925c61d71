"""`skipless reproduce`: what is there is reused, what was interrupted goes on, what fails stops nothing else."""

import json
import signal
import time
from dataclasses import replace

import pytest

from skipless.cli import run as skipless
from skipless.experiments import pool
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.estimates import cost
from skipless.experiments.jobs import Job, choose, plan, plan_fine_tunings
from skipless.experiments.pool import Pool
from skipless.experiments.run_index import RunIndex, completion, run_key, run_name
from skipless.experiments.scale import PROTOCOLS, Protocol, Scale
from skipless.runs import Run
from skipless.storage.lock import FolderLock, is_locked
from skipless.training.train import train
from tests.helpers.glue_files import small_glue
from tests.helpers.tiny_runs import MASKED, Stop, assert_same_run, stop_at, tiny

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def start(fork_server):
    """Starts the command in a process of its own, its workers in others."""
    return lambda *arguments: fork_server.start_with_forked_workers(["reproduce", *arguments, "--json"])


def finish(child):
    assert child.wait(1200) == 0, child.err
    return json.loads(child.out)


def finished(runs):
    return [path.parent for path in runs.glob("*/config.json") if completion(Run(path.parent)).finished]


def stamps(folder):
    """When the files of a run were last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_killed_half_way_and_started_again_it_repeats_nothing(tmp_path, small, start):
    runs = tmp_path / "runs"
    arguments = ["fig2", *small(), "--runs", str(runs), "--output", str(tmp_path / "results")]
    first = start(*arguments)
    first.wait_until(lambda: len(finished(runs)) >= 1, 1200)
    first.send(signal.SIGKILL)
    first.wait()
    while any(is_locked(path.parent) for path in runs.glob("*/config.json")):  # its worker ends after it
        time.sleep(0.01)
    done = finished(runs)
    before = {folder: stamps(folder) for folder in done}
    assert 1 <= len(done) < 3
    report = finish(start(*arguments))
    assert len(finished(runs)) == 3
    for folder in done:  # nothing is written anew; what the kill left half done may have been swept away
        assert stamps(folder).items() <= before[folder].items()
        assert folder / "metrics.jsonl" in stamps(folder)
    assert (report["failed"], report["left"]) == ({}, [])
    (finding,) = report["findings"]
    assert finding["id"] == "fig2"
    assert finding["seeds"] == [0]
    assert len(finding["runs"]) == 3
    assert len(finding["verdicts"]) == len(EXPERIMENTS["fig2"].claims(Scale("laptop")))
    assert all(verdict["numbers"]["seeds"] == 1 for verdict in finding["verdicts"])
    # and a third time nothing at all is trained
    again = {folder: stamps(folder) for folder in finished(runs)}
    finish(start(*arguments))
    assert {folder: stamps(folder) for folder in finished(runs)} == again


@pytest.mark.slow
def test_asked_to_end_it_saves_goes_on_and_ends_as_if_nothing_had_been(tmp_path, small, cache_dir, start):
    runs = tmp_path / "runs"
    arguments = ["fig4", *small(400, 1000), "--runs", str(runs), "--jobs", "2", "--output", str(tmp_path / "results")]
    first = start(*arguments)
    files = lambda: [path for path in runs.glob("*/metrics.jsonl") if path.stat().st_size > 300]  # noqa: E731
    first.wait_until(lambda: len(files()) == 2, 1200)
    first.send(signal.SIGTERM)
    assert first.wait(1200) == 143
    assert "the same command continues" in first.err
    stopped = [Run(path.parent) for path in files()]
    assert not any(is_locked(run.folder) for run in stopped)
    for run in stopped:
        assert len(run.checkpoints().all()) == 1  # which only the signal can have made
        assert not completion(run).finished
        assert 0 < completion(run).share < 1
    one = stopped[0]
    train(one.config(), one.folder, resume=True, trackers=[], cache_dir=cache_dir)
    train(one.config(), tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    assert_same_run(one.folder, tmp_path / "reference")


@pytest.mark.slow
def test_two_on_one_folder_share_the_work(tmp_path, small, start):
    runs = tmp_path / "runs"
    arguments = ["fig4", *small(), "--runs", str(runs), "--output"]
    both = [start(*arguments, str(tmp_path / name)) for name in "ab"]
    reports = [finish(child) for child in both]
    assert reports[0]["findings"] == reports[1]["findings"]
    assert len(finished(runs)) == 2
    begun = [line for child in both for line in child.err.splitlines() if ": begins" in line]
    trained = {line.split(":")[0] for line in begun}
    assert len(trained) == 2
    for folder in finished(runs):
        steps = [record["step"] for record in Run(folder).metrics() if "valid_loss" in record]
        assert steps == [0, 4, 8, 12]


def test_a_run_that_fails_is_reported_and_stops_no_other(tmp_path, small, capsys, monkeypatch):
    monkeypatch.setattr("skipless.experiments.report.results.write_results", lambda findings, out: out)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    broken = plan(choose(["fig4"]), Scale("laptop", None, tiny_changes(small())), 1, RunIndex(tmp_path), 1.0)[0]
    folder = tmp_path / run_name(broken.cfg)
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way")
    assert skipless(["reproduce", "fig4", *small(), "--runs", str(tmp_path), "--json"]) == 3
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert list(report["failed"]) == report["left"] == [folder.name]
    assert f"{folder.name}: FAILED" in said.err
    assert f"skipless: {folder.name} failed: " in said.err
    assert len(finished(tmp_path)) == 1
    outcomes = [verdict["reason"] for verdict in report["findings"][0]["verdicts"]]
    assert "no finished run of sas-gains" in outcomes


def test_a_spent_budget_is_an_end_with_verdicts(tmp_path, small, capsys, monkeypatch):
    monkeypatch.setattr("skipless.experiments.report.results.write_results", lambda findings, out: out)
    assert skipless(["reproduce", "fig2", *small(), "--runs", str(tmp_path), "--minutes", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["left"]) == 3
    assert {verdict["outcome"] for verdict in report["findings"][0]["verdicts"]} == {"not decidable"}
    assert not list(tmp_path.glob("*/config.json"))


def test_what_was_noted_beside_the_results_is_shown_with_them(tmp_path, small, capsys):
    arguments = ["reproduce", "fig2", *small(), "--runs", str(tmp_path / "runs"), "--minutes", "0"]
    (tmp_path / "notes.yaml").write_text("fig2: It was too short.\nfig3: Not asked for.\n")
    assert skipless([*arguments, "--output", str(tmp_path)]) == 0
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "It was too short." in text
        assert "Not asked for." not in text
    capsys.readouterr()
    (tmp_path / "notes.yaml").write_text("- a list")
    assert skipless([*arguments, "--output", str(tmp_path)]) == 2
    assert "notes.yaml' must hold keys and values" in capsys.readouterr().err


# ------------------------------------------------------------------------------ with fine-tuning


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    """A little GLUE; nothing may change it."""
    return small_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def encoder(tmp_path, source, cache_dir):
    """The one run of an experiment on GLUE, finished, and the scale at which it is that."""
    cfg = tiny(source, MASKED, {"model.max_seq_len": 32, "data.seq_len": 32}, steps=4, eval_every=0)
    run = train(cfg, tmp_path / "runs" / "encoder", trackers=[], cache_dir=cache_dir)
    return run, replace(EXPERIMENTS["tab2"], configs=lambda scale: {"sas-p": cfg})


def test_what_is_trained_is_fine_tuned_and_nothing_twice(encoder, glue, monkeypatch):
    run, experiment = encoder
    protocol = Protocol("rte,stsb", {"epochs": 1}, seeds=2, baselines=("sas-p",), more=(("rte", 3),))
    monkeypatch.setitem(PROTOCOLS, "laptop", protocol)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    index = RunIndex(run.folder.parent)
    tasks = plan_fine_tunings([experiment], Scale("laptop"), 3, index, str(glue))
    assert [(task.seeds, task.protocol.tasks, task.from_scratch) for task in tasks] == [
        (1, "rte,stsb", False),
        (1, "rte,stsb", True),
        (2, "rte,stsb", False),
        (3, "rte", False),
        (3, "rte", True),
    ]
    assert [task.completion().share for task in tasks] == [0.0] * 5
    monkeypatch.setitem(PROTOCOLS, "laptop", replace(protocol, once=("sas-p",)))
    assert plan_fine_tunings([experiment], Scale("laptop"), 3, index, str(glue)) == [
        replace(task, protocol=replace(task.protocol, once=("sas-p",))) for task in (*tasks[:2], *tasks[3:])
    ]
    done = Pool(size=2).run(tasks)
    assert done.failed == {}
    assert done.finished == {task.name for task in tasks}
    results = {name: json.loads((run.folder / f"{name}.json").read_text()) for name in ("glue", "glue-from-scratch")}
    assert [len(one["tasks"]["rte"]["seeds"]) for one in results.values()] == [3, 3]
    assert [len(one["tasks"]["stsb"]["seeds"]) for one in results.values()] == [2, 1]
    assert results["glue"]["settings"]["finetune"]["epochs"] == 1
    monkeypatch.setattr(pool.subprocess, "Popen", lambda *given, **more: pytest.fail("all of it is there"))
    left = [run.folder / "glue" / name for name in ("rte-seed-0", ".tmp-rte-seed-1-0123abcd")]
    other = run.folder / "glue" / "rte-seed-7"  # of somebody who wants more seeds
    for folder in (*left, other):
        folder.mkdir()
    assert Pool().run(tasks).finished == done.finished
    assert [folder.exists() for folder in (*left, other)] == [False, False, True]


def test_a_run_that_is_not_finished_is_not_fine_tuned(encoder, glue):
    run, experiment = encoder
    (last,) = run.checkpoints().all()
    last.rename(last.with_name("step-00000002"))
    assert plan_fine_tunings([experiment], Scale("laptop"), 1, RunIndex(run.folder.parent), str(glue)) == []


def test_a_mistake_in_glue_is_told_before_anything_is_trained(tmp_path, glue, capsys):
    arguments = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--glue-dir"]
    assert skipless(["reproduce", "tab1", *arguments, str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert skipless(["reproduce", "fig5", *arguments, str(glue)]) == 2
    assert "--glue-dir is for tab1, tab2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------- what it is made of


def tiny_changes(options):
    from skipless.config.overrides import parse_overrides

    return parse_overrides([word for word in options if "=" in word])


def test_list_names_all_experiments_with_costs(capsys):
    assert skipless(["reproduce", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["experiments"]
    assert [row["id"] for row in rows] == list(EXPERIMENTS)
    assert len([row for row in rows if not row["own"]]) == 19
    for row in rows:
        assert row["paper"]
        if row["own"]:
            continue
        assert all(row["scales"][scale]["runs"] >= 2 for scale in ("laptop", "paper"))
        assert row["scales"]["laptop"]["seconds"] > 0
        assert row["scales"]["paper"]["seconds"] > 3600
    assert skipless(["reproduce", "fig5", "matrix", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "fig5" in shown
    assert "matrix" in shown
    assert "fig6" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the ids of experiments"),
        (["fig55"], "did you mean 'fig5'"),
        (["fig5", "--scale", "lap"], "unknown scale 'lap'; known: laptop, paper"),
        (["fig5", "--set", "train.stepz=3"], "did you mean 'train.steps'"),
        (["fig5", "--rates", "nowhere.json"], "cannot read 'nowhere.json'"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, message, capsys):
    assert skipless(["reproduce", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_plan_has_each_run_once_and_the_first_seed_first(tmp_path):
    tasks = plan(choose(["fig5", "fig2", "matrix"]), Scale("laptop"), 2, RunIndex(tmp_path), 1e9)
    assert len({run_key(task.cfg) for task in tasks}) == len(tasks) == 2 * (6 + 1 + 2)
    assert [task.cfg.train.seed for task in tasks] == [0] * 9 + [1] * 9
    assert len({task.run.name for task in tasks}) == len(tasks)
    assert choose(["all"]) == list(EXPERIMENTS.values())


def test_cost_follows_the_budget():
    cfg = Scale("laptop").decoder("sas")
    longer = cfg.override({"train.steps": 2 * cfg.train.steps})
    assert cost(longer, 1e9) == pytest.approx(2 * cost(cfg, 1e9))
    assert cost(cfg, 2e9) == pytest.approx(cost(cfg, 1e9) / 2)
    assert cost(cfg.override({"train.steps": None, "train.minutes": 2.0}), 1e9) == 120


@pytest.mark.parametrize("budget", ["train.steps", "train.tokens", "train.minutes"])
@pytest.mark.parametrize("own", [None, {"train.tokens": 5000}, {"train.steps": 7, "train.lr": 1e-3}])
def test_a_budget_that_is_given_takes_the_place_of_every_other(budget, own):
    """Of the recipe's and of the one that the experiment sets for a kind of run."""
    train = Scale("laptop", None, {budget: 12}).run("encoder", "sas", own).train
    given = {"train.steps": train.steps, "train.tokens": train.tokens, "train.minutes": train.minutes}
    assert {key: value for key, value in given.items() if value is not None} == {budget: 12}


def test_a_run_is_found_by_its_configuration(tmp_path, source, cache_dir):
    cfg = tiny(source, {"train.steps": 4})
    train(cfg, tmp_path / "any name", trackers=[], cache_dir=cache_dir)
    found = RunIndex(tmp_path).find(cfg)
    assert found.folder == tmp_path / "any name"
    assert completion(found).finished
    other = RunIndex(tmp_path).find(cfg.override({"train.seed": 1}))
    assert (other.exists, other.folder.name) == (False, f"sas-p-s1-{run_key(cfg.override({'train.seed': 1}))}")
    with pytest.raises(Stop):
        train(cfg.override({"train.seed": 1}), other.folder, trackers=[], cache_dir=cache_dir, observer=stop_at(3))
    assert not completion(other).finished


def killed_at_its_end(run):
    """What a process leaves that is killed while it removes old checkpoints; their names."""
    checkpoints = run.folder / "checkpoints"
    for name in (".tmp-step-00000001-0123abcd", f".old-{max(checkpoints.glob('step-*')).name}"):
        (checkpoints / name).mkdir()
    (run.folder / ".tmp-config.json-0123abcd").touch()
    return run.leftovers()


def test_what_was_left_in_a_finished_run_is_removed(tmp_path, source, cache_dir, monkeypatch):
    cfg = tiny(source, steps=4, eval_every=2)
    run = train(cfg, tmp_path / run_name(cfg), trackers=[], cache_dir=cache_dir)
    before, jobs = stamps(run.folder), [Job(cfg, run, 1.0)]
    assert len(killed_at_its_end(run)) == 3
    with FolderLock(run.folder):  # somebody is at work there
        Pool().run(jobs)
        assert len(run.leftovers()) == 3
    monkeypatch.setattr(pool.subprocess, "Popen", lambda *given, **more: pytest.fail("it is finished"))
    assert Pool().run(jobs).finished == {run.name}
    assert run.leftovers() == []
    assert stamps(run.folder) == before


def test_a_run_without_its_last_weights_is_not_finished(tmp_path, source, cache_dir):
    run = train(tiny(source, {"train.steps": 4}), tmp_path / "run", trackers=[], cache_dir=cache_dir)
    assert completion(run).finished
    (last,) = run.checkpoints().all()
    last.rename(last.with_name("step-00000002"))
    assert not completion(run).finished


def test_children_share_cores_and_gpus(monkeypatch):
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    pool = Pool(size=3)
    assert [pool._environment(0)[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")] == ["2", "2"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [pool._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [pool._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["5", "7"]
    assert pool._environment(0)["OMP_NUM_THREADS"] == "1"
