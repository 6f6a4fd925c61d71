"""The archive of published runs: small, complete, found by configuration, and enough to write every result again."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from skipless.cli import run as skipless
from skipless.errors import UserError
from skipless.experiments.archive import archive
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.checks import RATES, best_rates, rate
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import MANY, find
from skipless.experiments.outcome import published
from skipless.experiments.report.results import read_notes, with_note
from skipless.experiments.run_index import RunIndex, completion, run_key
from skipless.experiments.scale import SCALES, Scale
from skipless.recipes.rates import packaged_rates
from skipless.runs import Run
from skipless.training.train import train
from tests.helpers.tiny_runs import tiny

LAPTOP = Scale("laptop")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
PUBLISHED = sorted(path.parent for path in (RESULTS / "runs").glob("*/config.json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, source, cache_dir):
    folder = tmp_path_factory.mktemp("archive")
    cfg = tiny(source, {"train.steps": 6, "train.eval_every": 2, "train.health_every": 3, "train.gains_every": 2})
    return train(cfg, folder / "runs" / "mine", trackers=[], cache_dir=cache_dir)


def test_a_run_is_the_same_in_the_archive(trained, tmp_path):
    assert archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    kept = Run(place)
    assert kept.config() == trained.config()
    assert completion(kept).finished
    mine, other = list(trained.metrics()), list(kept.metrics())
    assert [record.keys() for record in mine] == [record.keys() for record in other]
    for a, b in zip(mine, other, strict=True):
        assert {key: a[key] for key in ("step", "tokens")} == {key: b[key] for key in ("step", "tokens")}
        for key in {"loss", "valid_loss"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5)
        for name, value in a.get("gains", {}).items():
            assert value == pytest.approx(b["gains"][name], rel=1e-3)
    assert kept.info()["data"] == trained.info()["data"]
    assert History.read(kept).valid_loss == pytest.approx(History.read(trained).valid_loss, rel=1e-5)


def test_what_a_killed_process_left_in_the_archive_is_removed(trained, tmp_path):
    archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    for name in ("old", "0123abcd"):
        (tmp_path / f".tmp-{place.name}-{name}").mkdir()
    assert not archive(trained, tmp_path)
    assert list(tmp_path.iterdir()) == [place]


def test_it_has_no_weights_no_path_and_no_command_line(trained, tmp_path):
    archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "metrics.jsonl.gz"]
    content = (place / "config.json").read_text()
    assert "command" not in json.loads(content)
    assert str(trained.folder.parent) not in content
    assert sum(path.stat().st_size for path in place.iterdir()) < 10_000


def test_what_is_there_is_not_written_again_and_what_is_new_is(trained, tmp_path):
    assert archive(trained, tmp_path)
    assert not archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    copy = Run(tmp_path / "elsewhere" / "mine")
    shutil.copytree(trained.folder, copy.folder)
    (copy.folder / "glue.json").write_text('{"tasks": {}, "mean": null}')
    assert archive(copy, tmp_path)
    assert json.loads((place / "glue.json").read_text()) == {"tasks": {}, "mean": None}
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_what_is_published_stays_when_the_run_is_trained_again(trained, tmp_path):
    assert archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    again = Run(tmp_path / "elsewhere" / "again")
    shutil.copytree(trained.folder, again.folder)
    lines = [json.loads(line) for line in again.metrics_file.read_text().splitlines()]
    lines[-1]["valid_loss"] += 0.01
    again.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not archive(again, tmp_path)
    (again.folder / "bits.json").write_text('{"loss": {}}')
    assert archive(again, tmp_path)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before | {"bits.json": b'{\n  "loss": {}\n}\n'}
    shutil.rmtree(place)
    assert archive(again, tmp_path)
    assert (place / "metrics.jsonl.gz").read_bytes() != before["metrics.jsonl.gz"]


def test_an_unfinished_run_is_left_out(trained, tmp_path):
    copy = Run(tmp_path / "mine")
    shutil.copytree(trained.folder, copy.folder)
    lines = copy.metrics_file.read_text().splitlines(keepends=True)
    copy.metrics_file.write_text("".join(lines[:-1]))
    assert not archive(copy, tmp_path / "archive")
    assert not (tmp_path / "archive").exists()


def test_a_finished_run_of_ones_own_comes_before_the_archives(trained, tmp_path):
    archive(trained, tmp_path)
    (kept,) = tmp_path.iterdir()
    cfg = trained.config()
    assert RunIndex(trained.folder.parent, tmp_path).find(cfg).folder == trained.folder
    copy = Run(tmp_path / "unfinished" / "mine")
    shutil.copytree(trained.folder, copy.folder)
    lines = copy.metrics_file.read_text().splitlines(keepends=True)
    copy.metrics_file.write_text("".join(lines[:-1]))
    assert RunIndex(copy.folder.parent, tmp_path).find(cfg).folder == kept


def test_a_published_run_that_cannot_be_read_is_an_error(trained, tmp_path):
    archive(trained, tmp_path)
    (place,) = tmp_path.iterdir()
    content = json.loads((place / "config.json").read_text())
    content["config"]["train"]["colour"] = "red"
    (place / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train\.colour: unknown key"):
        RunIndex(tmp_path)


@pytest.mark.usefixtures("forked_workers")
def test_reproduce_fills_an_archive_and_then_needs_nothing_else(tmp_path, small, capsys):
    words = ["reproduce", "matrix", *small(), "--archive", str(tmp_path / "archive"), "--json"]
    assert skipless([*words, "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    assert len(list((tmp_path / "archive").glob("*/metrics.jsonl.gz"))) == 4
    for more in (["--runs", str(tmp_path / "archive")], ["--runs", str(tmp_path / "empty")]):
        assert skipless([*words, *more, "--minutes", "0", "--output", str(tmp_path / "again")]) == 0
        assert json.loads(capsys.readouterr().out)["left"] == []
        assert _content(tmp_path / "again") == _content(tmp_path / "one")
        shutil.rmtree(tmp_path / "again")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------- what is published


def wanted() -> set[str]:
    return {run_key(cfg) for one in EXPERIMENTS.values() for _, _, cfg in one.runs(LAPTOP, MANY)}


def test_every_published_run_is_found_by_its_configuration():
    assert PUBLISHED
    index, keys = RunIndex(RESULTS / "runs"), wanted()
    assert len(index.known) == len(PUBLISHED)
    for folder in PUBLISHED:
        run = Run(folder)
        assert run_key(run.config()) in keys, f"{folder.name} belongs to no experiment"
        assert completion(run).finished, folder.name
        assert index.find(run.config()).folder == folder


def test_every_published_run_keeps_its_digest():
    """Its folder carries the one that it had when it was published; keys that came later must not change it."""
    for folder in PUBLISHED:
        assert folder.name.rpartition("-")[2] == Run(folder).config().digest


def test_published_runs_are_small_and_hold_what_later_experiments_ask_for():
    for folder in PUBLISHED:
        assert sum(path.stat().st_size for path in folder.iterdir()) < 60_000, folder.name
        records = list(Run(folder).metrics())
        healthy = [record["health"] for record in records if "health" in record]
        assert healthy, folder.name
        assert {"kurtosis", "attention_entropy", "token_similarity"} <= healthy[-1].keys()
        if Run(folder).config().model.block.mixing != "softmax":
            assert any("gains" in record for record in records), folder.name


def test_the_written_results_are_of_the_published_runs():
    """Not of other runs, nor left from an earlier form: what is there is what `reproduce all` writes."""
    found = json.loads((RESULTS / "summary.json").read_text())
    written = (RESULTS / "report.md").read_text()
    assert int(re.search(r"(\d+) experiments at laptop scale, (\d+) runs", written)[2]) == len(PUBLISHED)
    findings = [find(name, "laptop", RESULTS / "runs") for name in EXPERIMENTS]
    assert found == published([with_note(one, read_notes(RESULTS).get(one.id)) for one in findings])
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert folders - {"runs"} <= set(EXPERIMENTS)


def test_rates_are_those_that_were_tuned():
    index = RunIndex(RESULTS / "runs")
    histories = {
        label: {seed: History.read(index.find(cfg))}
        for label, seed, cfg in EXPERIMENTS["rates"].runs(LAPTOP, 1)
        if index.find(cfg).exists
    }
    tuned = best_rates(LAPTOP, Evidence(histories))
    assert tuned
    for kind, blocks in tuned.items():
        packaged = packaged_rates()[SCALES["laptop"][kind]]
        for block, lr in blocks.items():
            assert packaged[block] == {"train.lr": lr}, (kind, block)


@pytest.mark.parametrize(("last", "chosen"), [(3.991, 0.00566), (3.98, 0.008), (4.1, 0.00566)])
def test_of_rates_that_are_alike_the_smallest_is_taken(last, chosen):
    """8e-3 has to be better than 5.66e-3 by more than seeds differ."""
    losses = dict(zip(map(rate, RATES["decoder"]["sas"]), (4.2, 4.0, last), strict=True))
    histories = {f"sas, decoder, {lr:g}": {0: SimpleNamespace(tuning_loss=loss)} for lr, loss in losses.items()}
    evidence = SimpleNamespace(finished=lambda label: histories.get(label, {}))
    assert best_rates(LAPTOP, evidence) == {"decoder": {"sas": chosen}}
