"""Fine-tuning: one protocol, results that can be told apart, and a kill that changes nothing."""

import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless import cli
from skipless.checkpoint import Checkpoints
from skipless.config import FinetuneConfig
from skipless.data.glue import TASKS, parse_tasks, read_task
from skipless.errors import UserError
from skipless.finetune import (
    Fit,
    Observer,
    Rows,
    Session,
    Unstable,
    epoch_batches,
    finetune,
    make_classifier,
    summarise,
)
from skipless.optim import learning_rate
from skipless.runs import Run, load
from tests.finetune.glue import small_glue, write_tsv
from tests.train.processes import ENVIRONMENT, ROOT
from tests.train.tiny import Stop

TASK_NAMES = "cola,stsb,mnli"
QUICK = FinetuneConfig(epochs=2, batch_size=8, lr=3e-3)


@pytest.fixture
def run(encoder, tmp_path):
    """A copy of the run that a test may write into."""
    return Run(Path(shutil.copytree(encoder, tmp_path / "run")))


def fit_of(run, glue, task="cola", cfg=QUICK, seed=0, encoder=True):
    data, tokenizer = read_task(glue, TASKS[task]), run.tokenizer()
    rows = Rows.make(data.train, tokenizer, 32, cfg.rows_of(task), seed)
    return Fit(run.config(), cfg, tokenizer, load(run.folder) if encoder else None, TASKS[task], rows, seed)


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


# ------------------------------------------------------------------------------- the protocol


def test_the_protocol_is_the_papers():
    cfg = FinetuneConfig()
    assert (cfg.epochs, cfg.batch_size, cfg.lr, cfg.dropout, cfg.seq_len) == (5, 32, 1.5e-4, 0.1, 128)
    assert (cfg.betas, cfg.eps, cfg.weight_decay, cfg.clip) == ((0.9, 0.98), 1e-6, 0.0, None)
    training = cfg.training(1000, seed=0)
    assert learning_rate(training, 0.05) == pytest.approx(0.5 * 1.5e-4)
    assert learning_rate(training, 0.1) == pytest.approx(1.5e-4)
    assert learning_rate(training, 0.55) == pytest.approx(0.5 * 1.5e-4)
    assert learning_rate(training, 1.0) == pytest.approx(0)


def test_dropout_is_where_the_paper_has_it(run, glue):
    model = fit_of(run, glue).model
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert run.config().model.dropout == 0.0


@settings(max_examples=50)
@given(count=st.integers(1, 400), size=st.integers(1, 16), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_an_epoch_sees_every_row_once(count, size, seed, epoch):
    lengths = np.random.default_rng(count).integers(1, 50, count)
    batches = epoch_batches(lengths, size, [seed, epoch])
    assert len(batches) == math.ceil(count / size)
    assert sorted(np.concatenate(batches)) == list(range(count))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    again = epoch_batches(lengths, size, [seed, epoch])
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))


def test_epochs_differ_and_rows_of_a_batch_are_of_one_length():
    lengths = np.random.default_rng(0).integers(5, 100, 5000)
    first, second = (epoch_batches(lengths, 32, [0, epoch]) for epoch in (0, 1))
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))
    padded = sum(len(batch) * lengths[batch].max() for batch in first)
    assert padded < 1.1 * lengths.sum()  # at random it would be 1.8


def test_a_batch_is_padded_to_its_longest(run, glue):
    rows = fit_of(run, glue).train
    order = np.argsort([len(ids) for ids in rows.ids])
    ids, mask = rows.batch(order[[0, -1]], pad_id=0)
    assert ids.shape == mask.shape == (2, len(rows.ids[order[-1]]))
    assert mask.sum(1).tolist() == [len(rows.ids[row]) for row in order[[0, -1]]]
    assert ids[0][mask[0]].tolist() == rows.ids[order[0]]
    assert rows.batch(order[[0, 0]], pad_id=0)[1] is None


def test_the_classifier_has_the_encoder_of_the_run(run):
    encoder, config = load(run.folder), run.config()
    model = make_classifier(config, FinetuneConfig(dropout=0.0), encoder, 3)
    ids = torch.randint(config.model.vocab_size, (2, 9))
    assert torch.equal(model.hidden(ids), encoder.hidden(ids))
    scratch = make_classifier(config, FinetuneConfig(dropout=0.0), None, 3)
    assert not torch.allclose(scratch.hidden(ids), encoder.hidden(ids), atol=1e-2)


def test_head_only_moves_the_head_alone(run, glue):
    fit = fit_of(run, glue, cfg=QUICK.replace(head_only=True))
    before = {name: value.clone() for name, value in fit.model.state_dict().items()}
    fit.step()
    changed = {name for name, value in fit.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"}


def test_a_subset_follows_the_file(run, glue):
    rows = fit_of(run, glue, cfg=QUICK.replace(rows=10)).train
    assert len(rows.ids) == 10
    lines = rows.lines(range(10))
    assert lines == sorted(set(lines))
    labels = read_task(glue, TASKS["cola"]).train.labels
    assert rows.labels.tolist() == [labels[line - 1] for line in lines]


def test_each_seed_draws_its_rows_and_a_random_encoder_has_the_same(run, glue, monkeypatch):
    trained = []
    monkeypatch.setattr(Fit, "step", lambda fit: pytest.fail("no step is needed"))
    monkeypatch.setattr(Session, "_train", lambda self, fit, checkpoints: trained.append((fit.task.name, fit.train)))
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


def test_seeds_differ_and_one_seed_is_the_same(run, glue):
    fits = []
    for seed in (0, 0, 1):
        fits.append(fit_of(run, glue, seed=seed))
        fits[-1].step()
        fits[-1].step()
    same, other = ([fits[0].model.state_dict(), fits[n].model.state_dict()] for n in (1, 2))
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    assert not torch.equal(other[0]["pooler.weight"], other[1]["pooler.weight"])


def test_it_learns_what_a_word_tells(run, tmp_path):
    """The answer is the first word, so a working fine-tuning is right about rows that it has not seen."""
    glue = small_glue(tmp_path / "glue", rows=400)
    cfg = FinetuneConfig(epochs=6, batch_size=16, lr=5e-3)
    results = finetune(run, glue, parse_tasks("sst2,stsb,rte"), seeds=1, cfg=cfg)
    assert results["tasks"]["sst2"]["score_mean"] > 95
    assert results["tasks"]["rte"]["score_mean"] > 95
    assert results["tasks"]["stsb"]["score_mean"] > 90


def test_regression_answers_are_in_the_units_of_the_file(run, tmp_path):
    glue = small_glue(tmp_path / "glue", rows=400)
    fit = fit_of(run, glue, "stsb", FinetuneConfig(epochs=6, batch_size=16, lr=5e-3))
    while fit.state.step < fit.steps:
        fit.step()
    found = fit.answers(fit.train)
    assert np.abs(found - fit.train.labels).mean() < 0.7


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


@pytest.mark.parametrize("stop", [1, 7, 12, 25, 40])
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


SCRIPT = """
import sys
from skipless.config import FinetuneConfig
from skipless.data.glue import parse_tasks
from skipless.finetune import finetune
cfg = FinetuneConfig(epochs=2, batch_size=8, lr=3e-3)
finetune(sys.argv[1], sys.argv[2], parse_tasks(sys.argv[3]), seeds=2, cfg=cfg, save_seconds=0)
"""


def test_killed_with_checkpoints_it_goes_on_bit_for_bit(run, glue, reference):
    command = [sys.executable, "-c", SCRIPT, str(run.folder), str(glue), TASK_NAMES]
    process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT)
    try:
        while not any((run.folder / "glue").glob("stsb-seed-0/step-0000000[5-9]")):
            assert process.poll() is None
        process.kill()
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert Checkpoints(run.folder / "glue" / "stsb-seed-0").latest_valid()[0].step >= 5
    finetune(run, glue, parse_tasks(TASK_NAMES), seeds=2, cfg=QUICK, save_seconds=0)
    assert outcome(run) == outcome(reference)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_stopped_goes_on(run, glue, reference, nursery, number):
    words = ["finetune", str(run.folder), "--glue-dir", str(glue), "--tasks", TASK_NAMES, "--seeds", "2"]
    words += ["--set", "epochs=2", "--set", "batch_size=8", "--set", "lr=3e-3"]
    child = nursery.start(words)
    child.wait_until(lambda: "seed 0: stsb" in child.out)
    child.send(number)
    status = child.wait()
    if number == signal.SIGKILL:
        assert status in (-number, 0)
    elif status != 0:  # it had not finished before the signal came
        assert status == 128 + number
        assert re.fullmatch(rf"skipless: {number.name}: saved at step \d+; go on with the same command\n", child.err)
    again = nursery.start(words)
    assert again.wait() == 0, again.err
    assert outcome(run) == outcome(reference)


# ----------------------------------------------------------------------------------- stability


def _change_encoder(run: Run, change) -> None:
    checkpoint, _ = run.checkpoints().latest_valid()
    tensors = {stem: checkpoint.tensors(stem) for stem in checkpoint.stems}
    change(tensors["model"])
    run.checkpoints().save(checkpoint.step + 1, tensors, checkpoint.state)


@pytest.fixture
def with_a_word(tmp_path):
    """A little GLUE whose CoLA has a word in its lines 5 and 21 alone."""
    glue = small_glue(tmp_path / "glue")
    rows = [["x", n % 2, "", "alpha beta" if n not in (4, 20) else "alpha return"] for n in range(40)]
    write_tsv(glue / "CoLA" / "train.tsv", rows)
    return glue


def test_a_gradient_that_is_not_finite_is_named_with_its_rows(run, with_a_word):
    fit = fit_of(run, with_a_word, cfg=FinetuneConfig(epochs=1, batch_size=40))
    word = run.tokenizer().encode("return")[-1]

    def spoil(gradient):
        spoilt = gradient.clone()
        spoilt[word] = torch.where(gradient[word] == 0, 0.0, math.inf)
        return spoilt

    fit.model.embedding.weight.register_hook(spoil)
    with pytest.raises(Unstable, match=r"the gradient's norm is \w+, first in embedding.weight") as caught:
        fit.step()
    report = caught.value.report
    assert sorted(report["rows"][:2]) == [5, 21]
    assert (len(report["rows"]), report["first_in"], report["count"]) == (20, None, 0)
    assert "every row of" in report["message"]


def test_inputs_that_are_not_finite_are_named(run, with_a_word, capsys):
    """A word whose embedding overflows makes the rows that hold it fail, and nothing else."""
    glue = with_a_word
    word = run.tokenizer().encode("return")[-1]

    def spoil(tensors):
        tensors["embedding.weight"][word] = float("inf")

    _change_encoder(run, spoil)
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
