"""`skipless family`: every block with every seed, every checkpoint an export, and nothing done twice."""

import contextlib
import io
import json
import re
import signal

import pytest
import torch

import skipless
from skipless.cli import run as command
from skipless.config.run import RunConfig
from skipless.errors import UserError
from skipless.experiments.family import Family, check_output, folder_name
from skipless.runs import Run
from skipless.storage.atomic_files import STAGING_PREFIX
from skipless.storage.lock import FolderLock
from tests.helpers.tiny_runs import records

pytestmark = pytest.mark.usefixtures("forked_workers")


def words_of(folder, small, seeds=2):
    """Of a small family: two blocks, some seeds, three checkpoints."""
    where = ["--runs", str(folder / "runs"), "--output", str(folder / "family")]
    return ["family", "--seeds", str(seeds), "--checkpoints", "3", "--to", "safetensors", *small(), *where]


@pytest.fixture
def family(tmp_path, small):
    """A command line; everything goes below `tmp_path`."""
    return words_of(tmp_path, small)


@pytest.fixture(scope="module")
def made(tmp_path_factory, small, forked_workers):
    """A family that was made, and what was said."""
    folder = tmp_path_factory.mktemp("made")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert command([*words_of(folder, small), "--json"]) == 0
    return folder, json.loads(out.getvalue())


def models(folder):
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("model.safetensors"))


def content(folder):
    """Every file of every model."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_family_is_whole_and_matched(made):
    place, said = made
    folder = place / "family"
    expected = [
        f"{block}/seed-{seed}/step-{step}" for block in ("pre-ln", "sas-p") for seed in (0, 1) for step in (12, 4, 8)
    ]
    assert models(folder) == sorted(said["models"]) == expected
    assert (said["failed"], said["left"]) == ({}, [])
    index = json.loads((folder / "index.json").read_text())
    assert set(index["blocks"]) == {"pre-ln", "sas-p"}
    assert index["blocks"]["sas-p"]["parameters"] < index["blocks"]["pre-ln"]["parameters"]
    by_path = {one["path"]: one for one in index["models"]}
    configs: list[RunConfig] = []
    for run in map(Run, (place / "runs").iterdir()):
        cfg = run.config()
        configs.append(cfg)
        block = run.name.partition("-s0-")[0].partition("-s1-")[0]
        for record in records(run.folder):
            if "valid_loss" in record and record["step"]:
                one = by_path[f"{block}/seed-{cfg.train.seed}/step-{record['step']}"]
                assert (one["valid_loss"], one["tokens"]) == (record["valid_loss"], record["tokens"])
        weights = skipless.load(run.folder, checkpoint=8).embedding.weight
        exported = skipless.load(folder / f"{block}/seed-{cfg.train.seed}/step-8").embedding.weight
        assert torch.equal(weights, exported)
    # what differs is the block, its learning rate and the seed
    plain = {"model.block": "pre-ln", "train.lr": 1.0, "train.seed": 0}
    assert len({cfg.override(plain).digest for cfg in configs}) == 1
    assert len({cfg.digest for cfg in configs}) == 4


def test_the_index_is_for_people_too(made, monkeypatch):
    folder = made[0] / "family"
    text = (folder / "README.md").read_text()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert sorted(links) == models(folder)
    assert all((folder / link / "README.md").exists() for link in links)
    assert str(folder.parent) not in text
    assert "Taken out of the standard block" in (folder / "sas-p/seed-0/step-4/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102


def test_killed_anywhere_the_same_command_goes_on(small, tmp_path, fork_server):
    """Once while it trains, once while it exports; the end is as if nothing had happened."""
    start = fork_server.start_with_forked_workers
    family = words_of(tmp_path, small, seeds=1)
    folder, runs = tmp_path / "family", tmp_path / "runs"
    first = start([*family, "--json"])
    first.wait_until(lambda: any(runs.glob("*/checkpoints/step-*")))
    first.send(signal.SIGKILL)
    first.wait()
    second = start([*family, "--json"])
    second.wait_until(lambda: len(models(folder)) >= 2 if folder.exists() else False)
    second.send(signal.SIGKILL)
    second.wait()
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors") if not hidden(path)}
    assert start([*family, "--json"]).wait() == 0
    assert len(models(folder)) == 6
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    assert not [path for path in folder.rglob("*") if hidden(path)]
    whole = content(folder)
    assert start([*family, "--json"]).wait() == 0  # nothing is left to do, and nothing changes
    assert content(folder) == whole


def hidden(path):
    return any(part.startswith(STAGING_PREFIX) for part in path.parts)


def test_with_no_time_nothing_is_trained_and_the_index_says_so(family, tmp_path, capsys):
    assert command([*family, "--minutes", "0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["models"], len(said["left"])) == ([], 4)
    assert "0 models" in (tmp_path / "family" / "README.md").read_text()


def test_a_folder_belongs_to_one_family(family, tmp_path, capsys):
    assert command([*family, "--minutes", "0"]) == 0
    capsys.readouterr()
    for other in (["--seeds", "1"], ["--checkpoints", "2"], ["--set", "train.lr=0.5"], ["--to", "hf"]):
        assert command([*family, "--minutes", "0", *other]) == 2
        assert "holds another family" in capsys.readouterr().err


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no family's folder, for it holds 'notes\.txt'"):
        check_output(Family(("pre-ln",)), tmp_path)


def test_two_at_a_time(family, tmp_path, capsys):
    with FolderLock(tmp_path / "family"):
        assert command([*family, "--minutes", "0"]) == 4
    assert "in use by" in capsys.readouterr().err


def test_a_training_that_fails_is_said_and_the_others_are_exported(family, tmp_path, capsys):
    sick = "sas-p:beta_sa=1e30"
    assert command([*family, "--seeds", "1", "--set", "train.clip=null", "pre-ln", sick, "--json"]) == 3
    out, err = capsys.readouterr()
    said = json.loads(out)
    [(name, reason)] = said["failed"].items()
    assert f"skipless: {name} failed: {reason}" in err
    assert {path.partition("/")[0] for path in said["models"]} == {"pre-ln"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["saz"], "did you mean 'sas'"),
        (["--to", "pickle"], "unknown format 'pickle'"),
        (["--checkpoints", "0"], "--checkpoints"),
        (["--recipe", "demoo"], "did you mean 'demo'"),
        (["--set", "train.tokens=1000", "--set", "train.steps=null"], "counted in steps"),
        (["--output", "/dev/null/family"], "cannot write into the folder"),
    ],
)
def test_bad_input_is_one_line(words, message, family, capsys):
    assert command([*family, *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_folders_have_names_that_every_file_system_takes():
    assert folder_name("sas:beta_ff=0.2,alpha=1") == "sas_beta_ff=0.2,alpha=1"
    with pytest.raises(UserError, match="would share one"):
        Family(("sas:beta_ff=0.2", "sas_beta_ff=0.2"))


def test_checkpoints_are_evenly_spaced():
    for steps, wanted, every in ((2000, 4, 500), (10, 3, 4), (5, 9, 1)):
        (cfg,) = Family(("pre-ln",), checkpoints=wanted, changes={"train.steps": steps}).configs().values()
        assert (cfg.train.save_every, cfg.train.eval_every, cfg.train.keep_last) == (every, every, wanted)
