"""`skipless sweep`: workers share the points, what a killed one leaves is taken over, and recipes read the outcome."""

import json
import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.cli import run as skipless
from skipless.errors import UserError
from skipless.experiments.run_index import completion
from skipless.experiments.sweep import Sweep
from skipless.experiments.sweep_axes import Axis, parse_axis
from skipless.recipes import load_rates, recipe
from skipless.runs import Run
from skipless.storage.lock import is_locked
from skipless.training.train import train
from tests.helpers.tiny_runs import assert_same_run, newest

pytest.importorskip("optuna")
TRIAL = re.compile(r"^(?P<block>\S+): trial (?P<number>\d+): tuning loss", re.M)


@pytest.fixture
def arguments(tmp_path, small):
    """Of a sweep over six points."""

    def made(steps, *more, save_every=4):
        over = ["--over", "train.lr=1e-3,3e-3,1e-2", "--block", "pre-ln", "--block", "sas"]
        folders = ["--output", str(tmp_path / "sweep"), "--runs", str(tmp_path / "runs")]
        return ["sweep", *over, *folders, *small(steps, save_every), *more]

    return made


def done_by(child) -> set[tuple[str, str]]:
    return {(match["block"], match["number"]) for match in TRIAL.finditer(child.out)}


def journal(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "sweep" / "journal.log").read_text().splitlines()]


def created(tmp_path) -> int:
    return sum(entry["op_code"] == 4 for entry in journal(tmp_path))


@pytest.mark.slow
def test_two_workers_share_a_grid_and_no_point_is_done_twice(tmp_path, fork_server, arguments):
    workers = [fork_server.start(arguments(60, save_every=60)) for _ in range(2)]
    assert [worker.wait(1200) for worker in workers] == [0, 0], [worker.err for worker in workers]
    first, second = map(done_by, workers)
    assert first
    assert second
    assert not first & second
    assert len(first | second) == 6
    assert created(tmp_path) == 6
    assert all("takes over" not in worker.out for worker in workers)
    folders = [path.parent for path in (tmp_path / "runs").glob("*/config.json")]
    assert len(folders) == 6
    for folder in folders:
        assert completion(Run(folder)).finished
        steps = [record["step"] for record in Run(folder).metrics() if "valid_loss" in record]
        assert steps == list(range(0, 61, 4))


def test_one_worker_is_killed_and_the_other_finishes(tmp_path, fork_server, arguments, cache_dir):
    def left_half_done():
        begun = [p for p in (tmp_path / "runs").glob("*") if is_locked(p) and list(p.glob("checkpoints/step-*"))]
        return [folder for folder in begun if not completion(Run(folder)).finished]

    first = fork_server.start(arguments(40, save_every=8))
    first.stop_when(lambda: len(done_by(first)) >= 1 and left_half_done())
    victim = left_half_done()[0]
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    before = done_by(first)
    assert not completion(Run(victim)).finished
    second = fork_server.start(arguments(40, "--json", save_every=8))
    assert second.wait(1200) == 0, second.err
    report = json.loads(second.out)
    assert [point["state"] for point in report["points"]] == ["complete"] * 6
    assert created(tmp_path) == 6
    assert "takes over trial" in second.err
    told = {(match["block"], match["number"]) for match in TRIAL.finditer(second.err)}
    assert len(told) == 6 - len(before)
    assert not told & before
    reference = train(Run(victim).config(), tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    assert_same_run(victim, reference.folder)
    assert newest(victim).name == "step-00000040"


def test_the_best_is_what_recipes_read(tmp_path, arguments, capsys):
    assert skipless([*arguments(8), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rates = load_rates(tmp_path / "sweep" / "best.json")
    assert rates == report["best"]
    for block in ("pre-ln", "sas"):
        losses = {point["values"]["train.lr"]: point["loss"] for point in report["points"] if point["block"] == block}
        assert set(losses) == {1e-3, 3e-3, 1e-2}
        best = min(losses, key=lambda lr: losses[lr])
        assert recipe("study", block, rates).train.lr == best
        assert recipe("study-long", f"{block}:norm=layernorm", rates).train.lr == best
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    before = created(tmp_path)
    # more points on the same folder: only those are done
    assert skipless([*arguments(8), "--over", "train.lr=3e-3,5e-3"]) == 2
    wider = [word if word != "train.lr=1e-3,3e-3,1e-2" else "train.lr=3e-3,2e-2" for word in arguments(8)]
    assert skipless(wider) == 0
    assert created(tmp_path) == before + 2
    assert "←" in capsys.readouterr().out
    # other settings are another sweep
    assert skipless(arguments(12)) == 2
    assert "choose another --output" in capsys.readouterr().err


def sweep_of(tmp_path, *over, cache_dir=None, source=None, **options):
    from tests.experiments.conftest import TINY

    changes = {**TINY, "train.steps": 8, "train.save_every": 8, **({"data.source": source} if source else {})}
    axes = [parse_axis(text) for text in over]
    options = {"blocks": ["sas"], "recipe": "study", "changes": changes, "cache_dir": cache_dir, **options}
    return Sweep(tmp_path / "sweep", tmp_path / "runs", axes=axes, **options)


def test_a_point_that_diverges_is_told_and_stops_no_other(tmp_path, source, cache_dir):
    said = []
    sweep = sweep_of(tmp_path, "train.lr=1e30,1e-3", source=source, cache_dir=cache_dir, message=said.append)
    sweep.work()
    bad, good = sweep.results()
    assert (bad.state, bad.values, good.state) == ("fail", {"train.lr": 1e30}, "complete")
    assert "not finite" in bad.reason or "nan" in bad.reason
    assert any("trial 0 failed" in line for line in said)
    assert sweep.best() == {"study": {"sas": {"train.lr": 1e-3}}}


def test_a_range_has_as_many_trials_as_asked_for(tmp_path, source, cache_dir):
    sweep = sweep_of(
        *(tmp_path, "train.lr=log:1e-4:1e-2", "model.n_layer=int:1:3"), trials=3, source=source, cache_dir=cache_dir
    )
    sweep.work()
    points = sweep.results()
    assert len(points) == 3
    assert len({point.values["train.lr"] for point in points}) == 3
    for point in points:
        assert 1e-4 <= point.values["train.lr"] <= 1e-2
        assert point.values["model.n_layer"] in (1, 2, 3)
        assert Run(tmp_path / "runs" / point.run).config().model.n_layer == point.values["model.n_layer"]


def test_a_trial_far_behind_is_given_up_if_asked(tmp_path, source, cache_dir):
    options = {"source": source, "cache_dir": cache_dir, "prune": True}
    sweep = sweep_of(tmp_path, "train.lr=3e-3,2e-3,1e-9", **options)
    sweep.work()
    assert [point.state for point in sweep.results()] == ["complete", "complete", "pruned"]
    assert not completion(Run(tmp_path / "runs" / sweep.results()[2].run)).finished


def test_a_finished_run_is_not_trained_again(tmp_path, source, cache_dir):
    sweep = sweep_of(tmp_path, "train.lr=3e-3", source=source, cache_dir=cache_dir)
    cfg = sweep.config("sas", {"train.lr": 3e-3})
    run = train(cfg, tmp_path / "runs" / "mine", trackers=[], cache_dir=cache_dir)
    written = run.metrics_file.stat().st_mtime_ns
    (run.folder / "checkpoints" / ".tmp-step-00000001-0123abcd").mkdir()  # killed while it removed an old one
    sweep.work()
    (point,) = sweep.results()
    assert (point.run, run.metrics_file.stat().st_mtime_ns) == ("mine", written)
    assert run.leftovers() == []


@pytest.mark.parametrize(
    ("over", "options", "message"),
    [
        (["train.lr=1e-3"], {"trials": 3}, "give --trials if, and only if"),
        (["train.lr=log:1e-3:1e-2"], {}, "a range needs a number of trials"),
        (["train.lr=1e-3", "train.lr=1e-2"], {}, "each key can be swept once"),
        (["train.lrr=1e-3"], {}, "did you mean 'train.lr'"),
        (["train.lr=1e-3"], {"blocks": ["sax"]}, "did you mean 'sas'"),
        (["train.lr=1e-3"], {"recipe": "studdy"}, "did you mean 'study'"),
    ],
)
def test_mistakes_show_before_anything_runs(tmp_path, over, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        sweep_of(tmp_path, *over, **options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["train.lr", "train.lr=", "=1", "train.lr=log:1", "train.lr=log:0:1", "a=lin:2:1"])
def test_axes_that_are_none(text):
    with pytest.raises(UserError, match="--over"):
        parse_axis(text)


def test_axes():
    assert parse_axis("train.lr=1e-3,3e-3") == Axis("train.lr", (1e-3, 3e-3))
    assert parse_axis("model.n_layer=2,4") == Axis("model.n_layer", (2, 4))
    assert parse_axis("train.schedule=linear,cosine") == Axis("train.schedule", ("linear", "cosine"))
    assert parse_axis("train.clip=null,1") == Axis("train.clip", (None, 1))
    assert parse_axis("train.lr=log:1e-4:1e-2") == Axis("train.lr", (), 1e-4, 1e-2, "log")


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5, unique=True))
def test_values_of_a_grid_are_read_as_written(values):
    assert parse_axis("train.lr=" + ",".join(map(repr, values))).values == tuple(values)
