"""Warm-up, stable, decay; and a decay that branches off a checkpoint."""

import shutil

import pytest

from skipless.cli import run as skipless
from skipless.config.run import TrainConfig
from skipless.errors import UserError
from skipless.runs import Run
from skipless.training.branch import Branch
from skipless.training.schedule import learning_rate
from skipless.training.train import train
from tests.helpers.tiny_runs import Stop, assert_same_run, newest, records, stop_at, tiny

WSD = {"train.schedule": "wsd", "train.warmup": 3, "train.log_every": 1, "train.save_every": 1, "train.keep_last": 99}


def rates(**changes) -> list[float]:
    cfg = TrainConfig(**{"schedule": "wsd", "steps": 20, "warmup": 4, "decay": 5, "lr": 1.0, **changes})
    return [learning_rate(cfg, (step + 1) / (cfg.steps + 1)) for step in range(cfg.steps)]


def test_a_line_up_the_peak_and_a_line_to_zero():
    assert rates() == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 12 + [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(warmup=0.2, decay=0.25)[5:15] == [1.0] * 10
    assert rates(decay=None)[15] == 1.0 > rates(decay=None)[17]
    assert rates(warmup_from=0.5)[0] == pytest.approx(0.625)


@pytest.mark.parametrize("steps", [11, 97, 1000, 12345])
def test_rates_of_any_length_are_the_same_until_they_decay(steps):
    """To the last bit: or a branch would not be what a training of its length is."""
    assert rates(steps=steps, lr=3e-4, warmup=3, decay=2)[:8] == rates(steps=10, lr=3e-4, warmup=3, decay=2)[:8]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "linear", "decay": 0.1}, "decay belongs to schedule 'wsd'"),
        ({"schedule": "wsd", "steps": None, "tokens": 100, "decay": 5}, "budget in steps"),
        ({"schedule": "wsd", "steps": 10, "warmup": 6, "decay": 5}, "longer than the training"),
    ],
)
def test_a_decay_that_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig(**changes)


@pytest.fixture(scope="module")
def stable(tmp_path_factory, source, cache_dir):
    """A run whose decay would begin at step 14 of 20, left at 12."""
    folder = tmp_path_factory.mktemp("stable") / "run"
    cfg = tiny(source, WSD, {"train.steps": 20, "train.decay": 6, "model.dropout": 0.1})
    with pytest.raises(Stop):
        train(cfg, folder, trackers=[], cache_dir=cache_dir, observer=stop_at(12))
    return folder


def test_a_branch_is_what_a_training_of_its_length_is(stable, tmp_path, source, cache_dir):
    """And one that was killed in the middle too."""
    branch = Branch.find(f"{stable}@8")
    cfg = branch.config(decay=4)
    assert (cfg.train.steps, cfg.train.decay, cfg.train.branch) == (12, 4, f"{Run(stable).config().digest}@8")
    run = train(cfg, tmp_path / "branch", trackers=[], cache_dir=cache_dir, branch=branch)

    whole = cfg.override({"train.branch": None})
    reference = train(whole, tmp_path / "whole", trackers=[], cache_dir=cache_dir)
    lines, expected = ([line for line in records(one.folder) if line["step"] > 8] for one in (run, reference))
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([3e-3 * n / 5 for n in (4, 3, 2, 1)])
    for one in (*lines, *expected):
        del one["seconds"]
    assert lines == expected
    for name in ("model.safetensors", "optimizer0.safetensors"):
        assert (newest(run.folder) / name).read_bytes() == (newest(reference.folder) / name).read_bytes()

    for stop in (9, 11):  # the first time before it has a checkpoint of its own
        with pytest.raises(Stop):
            train(
                cfg,
                tmp_path / "k",
                trackers=[],
                cache_dir=cache_dir,
                branch=branch,
                observer=stop_at(stop),
                resume=True,
            )
    train(cfg, tmp_path / "k", trackers=[], cache_dir=cache_dir, branch=branch, resume=True)
    assert_same_run(tmp_path / "k", run.folder)


def test_the_command(stable, tmp_path, cache_dir, capsys):
    where = ["--runs", str(stable.parent), "--cache-dir", str(cache_dir), "--track", "none"]
    branch = ["train", "--name", "mine", "--branch", "run@6", "--decay", "3", *where]
    assert skipless(branch) == 0
    found = Run(stable.parent / "mine")
    assert found.config().train.steps == 9
    assert records(found.folder)[0]["step"] == 7
    assert skipless([*branch, "--resume"]) == 0
    capsys.readouterr()
    for words, said in (
        (["--branch", "run@6"], "--branch takes --decay STEPS"),
        (["--branch", "run@6", "--decay", "3", "--steps", "50"], "everything else from the run"),
        (["--decay", "3"], "--decay goes with --branch"),
        (["--branch", "run@77", "--decay", "3"], "there is no checkpoint of step 77"),
        (["--branch", "run@1", "--decay", "3"], "at 67% of its peak rate at step 1"),
        (["--branch", "mine", "--decay", "3"], "of its peak rate at step 9"),
    ):
        assert skipless(["train", "--name", "other", *words, *where]) == 2, words
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def test_a_branch_goes_on_when_the_run_has_removed_its_checkpoint(stable, tmp_path, cache_dir, capsys):
    runs = tmp_path / "runs"
    shutil.copytree(stable, runs / "run")
    words = ["train", "--name", "mine", "--branch", "run@6", "--decay", "4", "--runs", str(runs), "--track", "none"]
    words += ["--cache-dir", str(cache_dir), "--resume"]
    branch = Branch.find(f"{runs / 'run'}@6")
    with pytest.raises(Stop):
        train(branch.config(4), runs / "mine", trackers=[], cache_dir=cache_dir, branch=branch, observer=stop_at(8))
    shutil.rmtree(runs / "run" / "checkpoints" / "step-00000006")
    assert skipless(words) == 0
    assert records(runs / "mine")[-1]["step"] == 10
    capsys.readouterr()
    for other in ({"run@6": "run@7"}, {"4": "5"}):
        assert skipless([other.get(word, word) for word in words]) == 2
        assert "is no decay of" in capsys.readouterr().err


def test_a_branch_without_its_checkpoint_says_so(stable, tmp_path, cache_dir):
    branch, other = Branch.find(f"{stable}@8"), Branch.find(f"{stable}@7")
    for given in (None, other):
        with pytest.raises(UserError, match="this run continues from the checkpoint"):
            train(branch.config(4), tmp_path / "run", trackers=[], cache_dir=cache_dir, branch=given)
