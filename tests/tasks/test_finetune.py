"""Fine-tuning: one protocol, results that can be told apart, and a kill that changes nothing."""

import json
import re
import shutil
import signal
import statistics
from pathlib import Path

import pytest
import torch

from skipless import cli
from skipless.config.run import FinetuneConfig
from skipless.data.glue import TASKS, parse_tasks, read_task
from skipless.errors import UserError
from skipless.runs import Run, load
from skipless.storage.checkpoints import Checkpoints
from skipless.tasks.classifier_fit import ClassifierFit
from skipless.tasks.finetune import GlueRunner, finetune
from skipless.tasks.glue_results import summarise
from skipless.training.observer import Observer
from tests.helpers.glue_files import small_glue
from tests.helpers.glue_fits import QUICK
from tests.helpers.tiny_runs import Stop

TASK_NAMES = "cola,stsb,mnli"


def outcome(run: Run, name: str = "glue") -> dict:
    """The results without the time they took, and the files for the leaderboard."""
    results = json.loads((run.folder / f"{name}.json").read_text())
    for fits in results["fits"].values():
        for fit in fits.values():
            del fit["seconds"]
    files = sorted((run.folder / name).rglob("*.tsv"))
    return {"results": results, "files": {str(path.relative_to(run.folder)): path.read_text() for path in files}}


@pytest.fixture(scope="session")
def reference(encoder, glue, tmp_path_factory):
    """What an uninterrupted fine-tuning gives."""
    run = Run(Path(shutil.copytree(encoder, tmp_path_factory.mktemp("reference") / "run")))
    finetune(run, glue, parse_tasks(TASK_NAMES), seeds=2, cfg=QUICK)
    return run


# ------------------------------------------------------------------------------ tasks and seeds


def test_each_seed_draws_its_rows_and_a_random_encoder_has_the_same(run, glue, monkeypatch):
    trained = []
    monkeypatch.setattr(ClassifierFit, "step", lambda fit: pytest.fail("no step is needed"))
    monkeypatch.setattr(GlueRunner, "_train", lambda self, fit, checkpoints: trained.append((fit.task.name, fit.train)))
    cfg = QUICK.replace(rows={"cola": 10, "rte": 10_000})
    for one in (cfg, cfg.replace(from_scratch=True)):
        finetune(run, glue, [TASKS["cola"], TASKS["rte"]], seeds=2, cfg=one)
    chosen = {name: [rows.chosen.tolist() for task, rows in trained if task == name] for name in ("cola", "rte")}
    assert [len(rows) for rows in chosen["cola"]] == [10] * 4
    assert chosen["cola"][:2] == chosen["cola"][2:]
    assert chosen["cola"][0] != chosen["cola"][1]
    assert chosen["rte"] == [list(range(len(read_task(glue, TASKS["rte"]).train)))] * 4


def test_a_subset_of_one_task_alone(run, glue, capsys):
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola,rte", "--seeds", "1"]
    assert cli.run([*words, "--rows", "cola=16", "--set", "epochs=1"]) == 0
    assert "cola: trained on 16 of 48 rows" in capsys.readouterr().out
    data = json.loads((run.folder / "glue.json").read_text())["data"]
    assert data["cola"]["rows"] == 16
    assert data["rte"]["rows"] == data["rte"]["of"]
    assert cli.run([*words, "--rows", "cola=16", "--set", "epochs=1"]) == 0, "it is the same again"


def test_it_learns_what_a_word_tells(run, tmp_path):
    """The answer is the first word, so a working fine-tuning is right about rows that it has not seen."""
    glue = small_glue(tmp_path / "glue", rows=400)
    cfg = FinetuneConfig(epochs=6, batch_size=16, lr=5e-3)
    results = finetune(run, glue, parse_tasks("sst2,stsb,rte"), seeds=1, cfg=cfg)
    assert results["tasks"]["sst2"]["score_mean"] > 95
    assert results["tasks"]["rte"]["score_mean"] > 95
    assert results["tasks"]["stsb"]["score_mean"] > 90


# -------------------------------------------------------------------------------- the results


def test_the_file_of_results(reference):
    results = json.loads((reference.folder / "glue.json").read_text())
    assert sorted(results["tasks"]) == ["cola", "mnli", "mnli-mm", "stsb"]
    averages = []
    for seed in ("0", "1"):
        scores = [100 * statistics.fmean(one["seeds"][seed].values()) for one in results["tasks"].values()]
        averages.append(statistics.fmean(scores))
    assert results["mean"] == pytest.approx(statistics.fmean(averages))
    assert results["sd"] == pytest.approx(statistics.stdev(averages))
    assert set(results["tasks"]["stsb"]["seeds"]["0"]) == {"pearson", "spearman"}
    assert results["tasks"]["cola"]["score_mean"] == pytest.approx(
        100 * statistics.fmean(one["matthews"] for one in results["tasks"]["cola"]["seeds"].values())
    )
    assert results["data"]["cola"]["rows"] == results["data"]["cola"]["of"] == 48
    assert not [path for path in (reference.folder / "glue").iterdir() if "seed" in path.name]


def test_the_average_is_the_papers():
    """Table 2's columns give the average of table 1 only if both parts of MNLI count."""
    columns = ("mnli", "mnli-mm", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")
    for average, row in (
        (78.9, (81.2, 81.6, 89.9, 87.6, 56.3, 88.9, 87.1, 88.3, 49.4)),
        (78.4, (79.7, 80.1, 90.3, 84.7, 58.4, 87.5, 86.8, 87.5, 50.6)),
    ):
        tasks = {name: {"seeds": {"0": {"m": value / 100}}} for name, value in zip(columns, row, strict=True)}
        found = summarise({"tasks": tasks, "failures": {}})
        assert round(found["mean"], 1) == average
        assert found["sd"] is None
        assert tuple(found["tasks"]) == columns


def test_a_seed_that_lacks_a_task_is_not_in_the_average():
    tasks = {"rte": {"seeds": {"0": {"m": 0.5}, "1": {"m": 0.7}}}, "cola": {"seeds": {"0": {"m": 0.3}}}}
    found = summarise({"tasks": tasks, "failures": {}})
    assert found["mean"] == pytest.approx(40)
    assert found["tasks"]["rte"]["score_mean"] == pytest.approx(60)


def test_the_leaderboards_files(reference):
    folder = reference.folder / "glue" / "predictions"
    names = {"CoLA.tsv", "STS-B.tsv", "MNLI-m.tsv", "AX.tsv"}
    for seed in (0, 1):
        assert {path.name for path in (folder / f"seed-{seed}").iterdir()} == names
    text = (folder / "seed-0" / "AX.tsv").read_text()
    assert re.fullmatch(r"index\tprediction\n(?:[017]\t(?:entailment|neutral|contradiction)\n){3}", text)
    assert re.fullmatch(
        r"index\tprediction\n(?:[017]\t[0-5]\.\d{3}\n){3}", (folder / "seed-0" / "STS-B.tsv").read_text()
    )


def test_what_is_finished_is_not_done_again(run, glue):
    class Counter(Observer):
        steps = 0

        def progress(self, what, share, seconds_left):
            self.steps += 1

    counts = []
    for tasks, seeds in (("cola", 1), ("cola", 1), ("cola,stsb", 1), ("cola,stsb", 2)):
        counter = Counter()
        finetune(run, glue, parse_tasks(tasks), seeds=seeds, cfg=QUICK, observer=counter)
        counts.append(counter.steps)
    assert counts == [12, 0, 12, 24]


def test_baselines_have_files_of_their_own(run, glue):
    for more in ([], ["--from-scratch"], ["--head-only"]):
        words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola", "--seeds", "1", *more]
        assert cli.run([*words, "--set", "epochs=1"]) == 0
    files = {path.name for path in run.folder.glob("glue*.json")}
    assert files == {"glue.json", "glue-from-scratch.json", "glue-head-only.json"}
    results = json.loads((run.folder / "glue-from-scratch.json").read_text())
    assert results["settings"]["encoder"] == "random"


def test_other_settings_are_refused_unless_fresh(run, glue, capsys):
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola", "--seeds", "1"]
    words += ["--set", "epochs=1"]
    assert cli.run(words) == 0
    assert cli.run([*words, "--rows", "16", "--set", "lr=1e-3"]) == 2
    line = capsys.readouterr().err
    assert "lr: 0.00015 → 0.001" in line
    assert "rows: None → 16" in line
    assert "--fresh" in line
    assert line.count("\n") == 1
    assert cli.run([*words, "--rows", "16", "--set", "lr=1e-3", "--fresh"]) == 0
    assert "cola: trained on 16 of 48 rows" in capsys.readouterr().out


def test_other_data_and_another_encoder_are_refused(run, tmp_path):
    glue = small_glue(tmp_path / "glue")
    finetune(run, glue, parse_tasks("cola"), seeds=1, cfg=QUICK)
    small_glue(glue, seed=1)
    with pytest.raises(UserError, match="results of cola on other rows"):
        finetune(run, glue, parse_tasks("cola"), seeds=2, cfg=QUICK)
    _change_encoder(run, lambda tensors: tensors["norm.weight"].mul_(1.01))
    with pytest.raises(UserError, match="the encoder was trained further"):
        finetune(run, glue, parse_tasks("cola"), seeds=1, cfg=QUICK)


def test_json_and_table(run, glue, capsys):
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola,stsb", "--seeds", "2"]
    assert cli.run([*words, "--set", "epochs=1", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["results"] == str(run.folder / "glue.json")
    assert cli.run([*words, "--set", "epochs=1"]) == 0
    shown = capsys.readouterr().out
    for one in (out["tasks"]["cola"], out["tasks"]["stsb"]):
        assert f"{one['score_mean']:.1f} ± {one['score_sd']:.1f}" in shown
    assert f"{out['mean']:.1f} ± {out['sd']:.1f}" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "colla"], "unknown GLUE task 'colla'; known: all, mnli,.*did you mean 'cola'"),
        (["--tasks", "all"], r"there is no folder '.*QNLI'"),
        (["--set", "epoch=3"], "unknown key 'epoch'.*did you mean 'epochs'"),
        (["--set", "lr=-1"], "lr: input should be greater than 0"),
        (["--seeds", "0"], "--seeds"),
        (["--glue-dir", "nowhere"], r"there is no folder 'nowhere/CoLA'"),
    ],
)
def test_bad_input_is_one_line(run, glue, capsys, more, message):
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola", *more]
    assert cli.run(words) == 2
    line = capsys.readouterr().err
    assert re.search(message, line)
    assert line.count("\n") == 1
    assert not (run.folder / "glue.json").exists()


def test_a_causal_run_is_refused(run, glue, capsys):
    path = run.folder / "config.json"
    path.write_text(path.read_text().replace('"task": "masked"', '"task": "causal"'))
    assert cli.run(["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola"]) == 2
    assert "holds a causal model; GLUE needs an encoder" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("stop", [7, 25, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 12, 40))])
def test_left_at_any_step_it_goes_on_bit_for_bit(run, glue, reference, stop):
    class Leave(Observer):
        count = 0

        def progress(self, what, share, seconds_left):
            self.count += 1
            if self.count == stop:
                raise Stop

    tasks = parse_tasks(TASK_NAMES)
    with pytest.raises(Stop):
        finetune(run, glue, tasks, seeds=2, cfg=QUICK, observer=Leave(), save_seconds=0)
    kept = [path.name for path in (run.folder / "glue").iterdir() if "seed" in path.name]
    assert len(kept) == (stop % 12 != 1)  # nothing was saved yet at the first step of one
    finetune(run, glue, tasks, seeds=2, cfg=QUICK, save_seconds=0)
    assert outcome(run) == outcome(reference)


def test_a_checkpoint_of_unknown_settings_is_not_gone_on_from(run, glue, tmp_path):
    """The file that names the settings is gone, and the ones asked for now may be others."""

    class Told(Observer):
        def __init__(self, stop):
            self.count, self.stop, self.lines = 0, stop, []

        def message(self, text):
            self.lines.append(text)

        def progress(self, what, share, seconds_left):
            self.count += 1
            if self.count == self.stop:
                raise Stop

    clean = Run(Path(shutil.copytree(run.folder, tmp_path / "clean")))
    high = QUICK.replace(lr=0.05)
    with pytest.raises(Stop):
        finetune(run, glue, parse_tasks("cola"), seeds=1, cfg=high, observer=Told(5), save_seconds=0)
    (run.folder / "glue.json").unlink()
    told = Told(None)
    for one, observer in ((run, told), (clean, None)):
        finetune(one, glue, parse_tasks("cola"), seeds=1, cfg=QUICK, observer=observer)
    assert outcome(run) == outcome(clean)
    assert told.count == 12
    assert re.search(r"cola-seed-0 begins anew: .*glue\.json is gone", told.lines[0])


def test_killed_with_checkpoints_it_goes_on_bit_for_bit(run, glue, reference, fork_server):
    child = fork_server.start(command(run, glue), "tests.helpers.frequent_saves:finetune")
    child.stop_when(lambda: any((run.folder / "glue").glob("stsb-seed-?/step-0000000[5-9]")))
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    (at_work,) = (run.folder / "glue").glob("stsb-seed-?")
    assert Checkpoints(at_work).latest_valid()[0].step >= 5
    finetune(run, glue, parse_tasks(TASK_NAMES), seeds=2, cfg=QUICK, save_seconds=0)
    assert outcome(run) == outcome(reference)


def command(run: Run, glue: Path) -> list[str]:
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", TASK_NAMES, "--seeds", "2"]
    return [*words, "--set", "epochs=2", "--set", "batch_size=8", "--set", "lr=3e-3"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_stopped_goes_on(run, glue, reference, fork_server, number):
    child = fork_server.start(command(run, glue))
    child.wait_until(lambda: "seed 0: stsb" in child.out)
    child.send(number)
    status = child.wait()
    if number == signal.SIGKILL:
        assert status in (-number, 0)
    elif status != 0:  # it had not finished before the signal came
        assert status == 128 + number
        assert re.fullmatch(rf"skipless: {number.name}: saved at step \d+; continue with the same command\n", child.err)
    again = fork_server.start(command(run, glue))
    assert again.wait() == 0, again.err
    assert outcome(run) == outcome(reference)


# ----------------------------------------------------------------------------------- stability


def _change_encoder(run: Run, change) -> None:
    checkpoint, _ = run.checkpoints().latest_valid()
    tensors = {stem: checkpoint.tensors(stem) for stem in checkpoint.stems}
    change(tensors["model"])
    run.checkpoints().save(checkpoint.step + 1, tensors, checkpoint.state)


def test_inputs_that_are_not_finite_are_named(run, with_a_word, capsys, monkeypatch):
    """A word whose embedding overflows makes the rows that hold it fail, and nothing else."""
    glue = with_a_word
    word = run.tokenizer().encode("return")[-1]

    def spoilt(*given, **how):  # behind the opening of the run, which refuses weights that are not finite
        encoder = load(*given, **how)
        with torch.no_grad():
            encoder.embedding.weight[word] = float("inf")
        return encoder

    monkeypatch.setattr("skipless.tasks.finetune.load", spoilt)
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", "cola,rte", "--seeds", "1"]
    assert cli.run([*words, "--set", "epochs=1", "--json"]) == 3
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    report = results["failures"]["cola"]["0"]
    assert report["rows"] == [5, 21]
    assert (report["count"], report["of"], report["first_in"]) == (2, 40, "the embedding")
    assert report["file"].endswith("CoLA/train.tsv")
    assert "2 of 40 rows" in captured.err
    assert "cola" not in results["tasks"]
    assert results["mean"] is None
    assert cli.run([*words, "--set", "epochs=1"]) == 3  # it stays failed, and is shown so
    assert "cola failed" in capsys.readouterr().out
