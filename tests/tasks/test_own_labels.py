"""Labelled rows of one's own: a classifier that is kept, opened, exported and asked."""

import io
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import skipless as package
from skipless.cli import run as skipless
from skipless.config.run import FinetuneConfig
from skipless.data.glue import TASKS, read_task
from skipless.data.own_task import read_own_task
from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError
from skipless.interop.export import export_model
from skipless.nn.model import SequenceClassifier
from skipless.runs import Run, load
from skipless.tasks.classifier_fit import ClassifierFit
from skipless.tasks.own_labels import OwnFinetuning
from skipless.tasks.predict import predict
from skipless.tasks.task_rows import TaskRows
from skipless.training.train import train
from tests.helpers.glue_files import write_tsv
from tests.helpers.labelled_files import CLASSES, rows, three_classes, write
from tests.helpers.tiny_runs import Stop, records, tiny, write_text

QUICK = FinetuneConfig(epochs=3, batch_size=8, lr=5e-3, dropout=0.1)


def own(run: Run, folder: Path, parts, *, cfg: FinetuneConfig = QUICK, label: str = "mood", **more) -> OwnFinetuning:
    data = read_own_task("mine", *map(str, parts), texts=["body"], label=label)
    return OwnFinetuning(run, data, folder, cfg, **more)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return three_classes(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    cfg = tiny(write_text(folder / "modules"), {"model.max_seq_len": 32, "data.seq_len": 32}, steps=6, eval_every=0)
    return train(cfg, folder / "run", trackers=[], cache_dir=folder / "cache").folder


@pytest.fixture(scope="module")
def mood(encoder, parts, tmp_path_factory):
    """A trained classifier of three classes and what its training said; nothing may change it."""
    folder = tmp_path_factory.mktemp("mood") / "mood"
    return folder, own(Run(encoder), folder, parts).train()


def texts_of(path: Path) -> list[tuple[str]]:
    return [(row["body"],) for row in rows(18, 2)]


def scores_of(answers) -> np.ndarray:
    return np.array([list(answer["probabilities"].values()) for answer in answers])


# ------------------------------------------------------------------------------ what it learns


def test_it_learns_and_says_how_well(mood, parts):
    folder, results = mood
    assert results["labels"] == list(CLASSES)
    assert results["best"]["accuracy"] > 0.9
    assert results["test"]["accuracy"] > 0.9
    lines = records(folder)
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert results["last"] == lines[-1]
    answers = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert [answer["row"] for answer in answers] == list(range(2, 20))
    right = [answer["label"] == row["mood"] for answer, row in zip(answers, rows(18, 2), strict=True)]
    assert np.mean(right) == results["test"]["accuracy"]


def test_glue_is_one_case_of_it(run, glue):
    """SST-2 by its columns gives the updates of GLUE's SST-2, to the last bit."""
    folder, length = glue / "SST-2", 32
    data = read_own_task(
        "sst2", str(folder / "train.tsv"), str(folder / "dev.tsv"), None, texts=["sentence"], label="label"
    )
    assert data.task.labels == ("0", "1")
    task = read_task(glue, TASKS["sst2"])
    found = []
    for one in (data, task):
        made = TaskRows.make(one.train, run.tokenizer(), length)
        fit = ClassifierFit(run.config(), QUICK, run.tokenizer(), load(run.folder), one.task, made, 0)
        for _ in range(4):
            fit.step()
        found.append((fit.state.loss_sum, fit.model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("task", ["cola", "stsb"])
def test_the_classifier_of_one_glue_task_is_kept(task, encoder, glue, tmp_path, capsys):
    """It is the one that `--glue-dir` alone scores; the best checkpoint is the one with the best score."""
    runs = tmp_path / "runs"
    shutil.copytree(encoder, runs / "encoder")
    how = ["--glue-dir", str(glue), "--tasks", task, "--runs", str(runs), "--device", "cpu", "--json", "--seeds", "1"]
    how += ["--set", "epochs=3", "--set", "batch_size=8", "--set", "lr=5e-3"]
    assert skipless(["finetune", "encoder", *how]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert skipless(["finetune", "encoder", *how, "--name", "kept"]) == 0
    kept = json.loads(capsys.readouterr().out)["classifiers"][0]
    metric = TASKS[task].metrics[0]
    assert kept["last"]["loss"] == scored["fits"][task]["0"]["train_loss"]
    lines = list(Run(runs / "kept").metrics())
    assert kept["best"][metric] == max(line[metric] for line in lines)
    assert len(load(runs / "kept").labels) == len(TASKS[task].labels)
    assert skipless(["finetune", "encoder", *how, "--tasks", "cola,stsb", "--name", "both"]) == 2
    assert "one task" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_other_formats_are_the_same(suffix, encoder, mood, tmp_path):
    """The rows, and so the classifier."""
    parts = three_classes(tmp_path / "rows", suffix)
    made = own(Run(encoder), tmp_path / "mood", parts).content()
    kept = json.loads((mood[0] / "classifier.json").read_text())
    assert made == {key: kept[key] for key in made}


def test_numbers_that_are_not_whole_are_a_regression(encoder, parts, tmp_path):
    results = own(Run(encoder), tmp_path / "grade", parts, label="grade").train()
    assert results["labels"] == []
    assert results["best"]["rmse"] < 0.5
    assert results["test"]["pearson"] > 0.8
    model = load(tmp_path / "grade", checkpoint="best")
    answers = np.array([answer["value"] for answer in predict(model, texts_of(parts[2]))])
    assert np.abs(answers - [float(row["grade"]) for row in rows(18, 2)]).mean() < 0.5
    transformers = pytest.importorskip("transformers")
    export_model(model, "hf", tmp_path / "out")
    pipe = transformers.pipeline("text-classification", model=str(tmp_path / "out"))
    scores = [one["score"] for one in pipe([text for (text,) in texts_of(parts[2])])]
    np.testing.assert_allclose(scores, answers, atol=1e-5)
    fine = own(Run(encoder), tmp_path / "grade", parts, label="grade")
    fine.train()
    last = fine.fit.answers(fine.valid)  # restored from the last checkpoint: in units of the file too
    again = [answer["value"] for answer in predict(load(tmp_path / "grade"), fine.data.dev["valid"].texts)]
    np.testing.assert_allclose(again, last, atol=1e-5)


@pytest.mark.parametrize("label", ["mood", "grade"])
def test_a_decoder_is_a_classifier_too(label, decoder, parts, tmp_path):
    """Its head sees the last real token, wherever the padding stands."""
    results = own(Run(decoder), tmp_path / "mine", parts, label=label, cfg=QUICK.replace(epochs=6)).train()
    assert results["test"]["accuracy" if label == "mood" else "pearson"] > 0.7
    model = load(tmp_path / "mine")
    assert model.causal
    ids = torch.randint(model.config.vocab_size, (2, 9))
    alone = model(ids[:, :5])
    for left, right in ((0, 4), (4, 0), (2, 2)):
        padded = torch.nn.functional.pad(ids[:, :5], (left, right))
        mask = torch.nn.functional.pad(torch.ones(2, 5, dtype=torch.long), (left, right))
        torch.testing.assert_close(model(padded, mask), alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids.flip(1)[:, :5]), alone)


# -------------------------------------------------------------- kept, opened, exported, asked


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("to", ["safetensors", "hf", "onnx"])
def test_the_scores_are_the_same_wherever_it_is_opened(to, kind, mood, decoder, parts, tmp_path, capsys):
    if kind == "encoder":
        folder = mood[0]
    else:
        folder = tmp_path / "mine"
        own(Run(decoder), folder, parts, cfg=QUICK.replace(epochs=1)).train()
    model, asked = load(folder), texts_of(parts[2])
    assert isinstance(model, SequenceClassifier)
    assert model.labels == CLASSES
    expected = scores_of(predict(model, asked))
    one_by_one = np.concatenate([scores_of(predict(model, [text])) for text in asked])
    np.testing.assert_allclose(one_by_one, expected, atol=1e-6)

    assert skipless(["export", str(folder), str(tmp_path / "out"), "--to", to]) == 0
    if to == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(tmp_path / "out" / "model.onnx")
        ids = [[*model.tokenizer.encode(text), model.tokenizer.end_id] for (text,) in asked]
        feeds = [{"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)} for row in ids]
        found = torch.softmax(torch.tensor(np.concatenate([session.run(None, feed)[0] for feed in feeds])), -1).numpy()
    else:
        opened = package.load(tmp_path / "out")
        assert (opened.labels, opened.texts, opened.causal) == (CLASSES, ("body",), kind == "decoder")
        found = scores_of(predict(opened, asked))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if to == "hf":
        from skipless.interop.hf.wrapping import unwrap

        transformers = pytest.importorskip("transformers")
        pipe = transformers.pipeline("text-classification", model=str(tmp_path / "out"), top_k=None, truncation=True)
        back = unwrap(pipe.model)
        assert (back.labels, back.causal) == (CLASSES, kind == "decoder")
        back.tokenizer = model.tokenizer
        np.testing.assert_allclose(scores_of(predict(back, asked)), expected, atol=1e-5)
        for batch_size in (1, 4):
            answers = pipe([text for (text,) in asked], batch_size=batch_size)
            scores = [[{one["label"]: one["score"] for one in row}[name] for name in CLASSES] for row in answers]
            np.testing.assert_allclose(scores, expected, atol=1e-5)

    capsys.readouterr()
    for place in [folder] if to == "onnx" else [folder, tmp_path / "out"]:
        assert skipless(["predict", str(place), "--input", str(parts[2]), "--batch-size", "5"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        np.testing.assert_allclose(scores_of(lines), expected, atol=1e-6)
        assert [line["row"] for line in lines] == list(range(2, 20))
        assert all(line["probability"] == max(line["probabilities"].values()) for line in lines)


def test_the_best_the_last_and_one_of_a_step(mood):
    folder, results = mood
    best, last = (load(folder, checkpoint=which) for which in ("best", results["last"]["step"]))
    fine_best = load(folder / "checkpoints" / f"step-{results['best']['step']:08}")
    assert all(torch.equal(fine_best.state_dict()[name], tensor) for name, tensor in best.state_dict().items())
    assert all(torch.equal(load(folder).state_dict()[name], tensor) for name, tensor in last.state_dict().items())


def test_lines_of_text_on_standard_input(mood, capsys, monkeypatch, tmp_path):
    class Input:
        buffer = io.BytesIO("alpha ( )\ngamma + é\n".encode())
        closed = False

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdin", Input())
    out = tmp_path / "answers.jsonl"
    assert skipless(["predict", "mood", "--runs", str(mood[0].parent), "--output", str(out)]) == 0
    assert [json.loads(line)["label"] for line in out.read_text().splitlines()] == ["bad", "good"]
    assert list(tmp_path.iterdir()) == [out]


def test_rows_are_answered_as_they_are_read(mood):
    """Nothing waits for the end of the input."""
    read = []

    def endless():
        for number in range(10**9):
            read.append(number)
            yield ("alpha + +",)

    answers = predict(load(mood[0]), endless(), batch_size=4)
    assert next(answers)["label"] == "bad"
    assert len(read) == 4


# ------------------------------------------------------------------------------ stopped, killed


class StopAfter:
    """An observer that leaves the training after some steps, without a save."""

    def __init__(self, steps):
        self.left = steps

    def message(self, text):
        pass

    def progress(self, what, share, seconds_left):
        self.left -= 1
        if not self.left:
            raise Stop

    def end(self):
        pass


@pytest.mark.parametrize("steps", [1, 12, 13, 20, 36])
def test_left_at_any_step_it_goes_on_bit_for_bit(steps, encoder, parts, mood, tmp_path):
    folder = tmp_path / "mood"
    with pytest.raises(Stop):
        own(Run(encoder), folder, parts, observer=StopAfter(steps), save_seconds=0.0).train()
    own(Run(encoder), folder, parts).train()
    assert_same(folder, mood[0])


def assert_same(folder: Path, reference: Path) -> None:
    kept = [sorted(path.name for path in (one / "checkpoints").iterdir()) for one in (folder, reference)]
    assert kept[0] == kept[1]
    for name in kept[0]:
        for file in ("model.safetensors", "optimizer0.safetensors"):
            assert (folder / "checkpoints" / name / file).read_bytes() == (
                reference / "checkpoints" / name / file
            ).read_bytes()
    lines = [[{**line, "seconds": 0} for line in records(one)] for one in (folder, reference)]
    assert lines[0] == lines[1]
    assert (folder / "test.jsonl").read_text() == (reference / "test.jsonl").read_text()


def command(run: Path, parts, runs: Path, *more: str) -> list[str]:
    train, valid, test = map(str, parts)
    files = ["--train", train, "--valid", valid, "--test", test, "--text", "body", "--label", "mood"]
    quick = ["--set", "epochs=3", "--set", "batch_size=8", "--set", "lr=5e-3", "--device", "cpu"]
    return ["finetune", str(run), *files, "--runs", str(runs), "--name", "mine", *quick, *more]


def test_killed_as_a_command_it_goes_on(encoder, parts, mood, tmp_path, fork_server):
    words = command(encoder, parts, tmp_path)
    for _ in range(2):
        child = fork_server.start(words)
        saved = len(list(tmp_path.glob("mine/checkpoints/step-*")))
        child.wait_until(lambda saved=saved: len(list(tmp_path.glob("mine/checkpoints/step-*"))) > saved or saved)
        child.send(signal.SIGKILL)
        child.wait()
    child = fork_server.start(words)
    assert child.wait() == 0, child.err
    assert_same(tmp_path / "mine", mood[0])


def test_the_command_and_again(encoder, parts, tmp_path, capsys):
    runs = tmp_path / "runs"
    words = command(encoder, parts, runs, "--json", "--seeds", "2")
    assert skipless(words) == 0
    out = capsys.readouterr()
    first, second = json.loads(out.out)["classifiers"]
    assert "96 rows, 3 classes: bad, fair, good" in out.err
    assert (first["seed"], second["seed"]) == (0, 1)
    assert Path(second["folder"]).name == "mine-seed-1"
    assert first["last"]["loss"] != second["last"]["loss"]
    assert skipless(words) == 0
    assert json.loads(capsys.readouterr().out)["classifiers"] == [first, second]
    assert skipless([*words, "--set", "lr=1e-3"]) == 2
    assert "holds another fine-tuning (finetune differ)" in capsys.readouterr().err
    assert skipless([word for word in command(encoder, parts, runs, "--fresh") if word != "--json"]) == 0
    assert "next: skipless predict" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ bad input


def bad(tmp_path, change) -> list[Path]:
    """The three files with one of them changed."""
    parts = list(three_classes(tmp_path / "rows"))
    change({path.stem: path for path in parts})
    return parts


def with_row(part: str, **changes):
    def change(paths):
        made = rows(12, 3)
        made[4] |= changes
        write(paths[part], made)

    return change


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (
            lambda p: None,
            ["--text", "boddy"],
            "train.tsv, row 2: there is no column 'boddy'; columns: id, body, mood, grade; did you mean 'body'?",
        ),
        (
            lambda p: None,
            ["--label", "moot"],
            "there is no column 'moot'; columns: id, body, mood, grade; did you mean 'mood'?",
        ),
        (with_row("valid", mood="ugly"), [], "valid.tsv, row 6: label 'ugly' is not one of bad, fair, good"),
        (with_row("test", mood="ugly"), [], "test.tsv, row 6: label 'ugly' is not one of bad, fair, good"),
        (with_row("train", mood=" "), [], "train.tsv, row 6: the column 'mood' is empty"),
        (
            lambda p: None,
            ["--labels", "bad,fair,good,great"],
            "train.tsv: the class 'great' has no row; labels there: bad, fair, good",
        ),
        (lambda p: None, ["--labels", "bad,good"], "train.tsv, row 2: label 'fair' is not one of bad, good"),
        (lambda p: write(p["train"], [{**row, "mood": "bad"} for row in rows(9, 3)]), [], "one label only, 'bad'"),
        (lambda p: p["valid"].write_text("id\tbody\tmood\n"), [], "valid.tsv has no rows"),
        (lambda p: p["valid"].write_text(""), [], "valid.tsv is empty"),
        (lambda p: p["valid"].write_text("body\tmood\nx\n"), [], "valid.tsv, row 2: 1 fields, and the header has 2"),
        (lambda p: p["valid"].write_text("body\tbody\nx\ty\n"), [], "the column 'body' is there twice"),
        (lambda p: p["valid"].write_bytes(b"body\tmood\n\xff\tbad\n"), [], "valid.tsv, row 2: not UTF-8"),
        (lambda p: p["valid"].unlink(), [], "valid.tsv' is missing"),
        (lambda p: None, ["--valid", "rows.parquet"], "rows are read from .tsv, .csv, .jsonl"),
        (lambda p: None, ["--kind", "ranking"], "classification or regression, got 'ranking'"),
        (lambda p: None, ["--kind", "regression"], "train.tsv, row 2: mood 'fair' is not a number"),
        (lambda p: None, ["--glue-dir", "x"], "--glue-dir for GLUE: give one of them"),
        (lambda p: None, ["--tasks", "cola"], "--tasks goes with --glue-dir"),
        (lambda p: None, ["--name", "../x"], "--name is the name of a folder"),
    ],
)
def test_bad_input_is_one_line(change, more, said, encoder, tmp_path, capsys):
    words = command(encoder, bad(tmp_path, change), tmp_path / "runs", *more)
    assert skipless(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/checkpoints"))


def test_keys_that_came_later_are_not_another_fine_tuning(encoder, parts, mood, tmp_path):
    folder = Path(shutil.copytree(mood[0], tmp_path / "mood"))
    about = json.loads((folder / "classifier.json").read_text())
    del about["classifier"]["causal"], about["finetune"]["from_scratch"]
    (folder / "classifier.json").write_text(json.dumps(about))
    assert own(Run(encoder), folder, parts).train()["last"] == mood[1]["last"]


def test_a_folder_of_something_else_is_left_alone(encoder, parts, tmp_path, capsys):
    shutil.copytree(encoder, tmp_path / "mine")
    assert skipless(command(encoder, parts, tmp_path, "--fresh")) == 2
    assert "is no classifier's folder" in capsys.readouterr().err
    assert Run(tmp_path / "mine").config() == Run(encoder).config()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "{test}", "--text", "bodi"], "row 2: there is no column 'bodi'"),
        (["--input", "{test}", "--text", "body", "--text-pair", "id"], "was trained on 1 text(s), body; got 2"),
        (["--input", "{test}", "--text-pair", "id"], "--text-pair goes with --text"),
        (["--input", "nowhere.tsv"], "'nowhere.tsv' is missing"),
    ],
)
def test_bad_questions_are_one_line(words, said, mood, parts, capsys):
    assert skipless(["predict", str(mood[0]), *(word.format(test=parts[2]) for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_what_is_no_classifier_is_not_asked(encoder, parts, capsys):
    assert skipless(["predict", str(encoder), "--input", str(parts[2])]) == 2
    assert "is no classifier" in capsys.readouterr().err


def test_a_damaged_description_is_one_line(mood, tmp_path):
    folder = Path(shutil.copytree(mood[0], tmp_path / "mood"))
    about = json.loads((folder / "classifier.json").read_text())
    about["classifier"]["labels"] = ["a", "a"]
    (folder / "classifier.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="labels must be two or more, all different"):
        load(folder)


def test_names_are_kept_by_a_classifier_of_ones_own(tmp_path):
    model = SequenceClassifier(tiny("python-stdlib").model, 2)
    model.labels = ("no", "yes")
    export_model(model, "safetensors", tmp_path / "out")
    assert load(tmp_path / "out").labels == ("no", "yes")


def test_whole_numbers_are_classes_unless_there_are_many(tmp_path):
    for count, kind in ((20, False), (21, True)):
        made = [["text", "label"], *([f"t{n}", n % count] for n in range(42))]
        path = str(write_tsv(tmp_path / "x.tsv", made))
        task = read_own_task("mine", path, path, None, texts=["text"], label="label").task
        assert task.is_regression == kind
        assert task.labels == (() if kind else tuple(map(str, range(20))))


# ------------------------------------------------------------------------------ damage


class Messages(StopAfter):
    """An observer that keeps what it is told."""

    def __init__(self):
        super().__init__(10**9)
        self.said = []

    def message(self, text):
        self.said.append(text)


@pytest.fixture
def copied(mood, tmp_path):
    """A copy of the classifier that a test may damage."""
    return Path(shutil.copytree(mood[0], tmp_path / "mood"))


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_where_no_checkpoint_is_valid_it_stops_and_changes_nothing(damage, encoder, parts, mood, copied):
    for checkpoint in (copied / "checkpoints").iterdir():
        if damage == "gone":
            shutil.rmtree(checkpoint)
        else:
            (checkpoint / "state.json").write_text("{}")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"none of them can be resumed .* add --fresh") as caught:
        own(Run(encoder), copied, parts).train()
    assert caught.value.status == 3
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    own(Run(encoder), copied, parts).train(fresh=True)
    assert_same(copied, mood[0])


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(encoder, parts, tmp_path):
    folder, steps = tmp_path / "mood", []

    def kept() -> list[Path]:
        return sorted((folder / "checkpoints").glob("step-*"))

    class StopWithTwo(StopAfter):
        def progress(self, what, share, seconds_left):
            if len(kept()) == 2:
                raise Stop

    with pytest.raises(Stop):
        own(Run(encoder), folder, parts, observer=StopWithTwo(0), save_seconds=0.0).train()
    steps = [path.name for path in kept()]
    (kept()[-1] / "state.json").write_text("{}")
    told = Messages()
    own(Run(encoder), folder, parts, observer=told).train()
    assert any(f"skipped the damaged checkpoint {steps[-1]}" in line for line in told.said)


@pytest.mark.parametrize("left", [b"", b'{"step": 12, "tokens": 1, "seconds": 1}\n', b"\xff"])
def test_lost_lines_of_metrics_are_said_and_measured_again(left, encoder, parts, mood, copied):
    (copied / "metrics.jsonl").write_bytes(left)
    told = Messages()
    results = own(Run(encoder), copied, parts, observer=told).train()
    assert any("metrics.jsonl has" in line and "lost" in line for line in told.said)
    kept = {key: value for key, value in results["last"].items() if key != "seconds"}
    assert kept == {key: value for key, value in mood[1]["last"].items() if key != "seconds"}
    assert results["test"]["accuracy"] == mood[1]["test"]["accuracy"]


@pytest.mark.parametrize("gone", [["classifier.json"], ["tokenizer.json"], ["classifier.json", "tokenizer.json"]])
def test_killed_while_it_describes_itself_it_goes_on(gone, encoder, parts, mood, tmp_path, monkeypatch):
    """Whichever of the two files comes first: the next one finds its own folder."""
    import skipless.tasks.own_labels as module

    for name, path in (("classifier.json", "write_json"), ("tokenizer.json", "Tokenizer.save")):
        if name in gone:
            owner = module if path == "write_json" else Tokenizer
            monkeypatch.setattr(owner, path.rpartition(".")[2], leave)
    folder = tmp_path / "mood"
    with pytest.raises(Stop):
        own(Run(encoder), folder, parts).train()
    monkeypatch.undo()
    own(Run(encoder), folder, parts).train()
    assert_same(folder, mood[0])


def leave(*_: object) -> None:
    raise Stop


def test_killed_while_it_clears_a_folder_it_goes_on(encoder, parts, mood, copied, monkeypatch):
    import skipless.tasks.own_labels as module

    removed = []

    def remove(path, *_, **__):
        removed.append(path.name)
        if len(removed) > 3:
            raise Stop
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    monkeypatch.setattr(module, "remove_folder", remove)
    monkeypatch.setattr(Path, "unlink", remove)
    with pytest.raises(Stop):
        own(Run(encoder), copied, parts).train(fresh=True)
    monkeypatch.undo()
    own(Run(encoder), copied, parts).train(fresh=True)
    assert_same(copied, mood[0])


def test_a_folder_that_vanishes_is_status_3(encoder, parts, tmp_path):
    folder = tmp_path / "mood"

    class Vanish(StopAfter):
        def progress(self, what, share, seconds_left):
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(UserError, match="is no longer there, so step 1 is not saved") as caught:
        own(Run(encoder), folder, parts, observer=Vanish(0), save_seconds=0.0).train()
    assert caught.value.status == 3
    assert not folder.exists()


# ------------------------------------------------------------------------------ where answers go


def test_answers_go_through_a_link_and_appear_in_one_piece(mood, parts, tmp_path, capsys):
    (tmp_path / "real.jsonl").write_text("old\n")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    words = ["predict", str(mood[0]), "--input", str(parts[2]), "--text", "body", "--output"]
    assert skipless([*words, str(tmp_path / "link.jsonl")]) == 0
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "real.jsonl").read_text().count("\n") == 18
    (tmp_path / "rows.tsv").write_text("body\nalpha + +\nalpha\ttoo many\n")
    bad = ["predict", str(mood[0]), "--input", str(tmp_path / "rows.tsv"), "--text", "body", "--batch-size", "1"]
    before = (tmp_path / "real.jsonl").read_text()
    assert skipless([*bad, "--output", str(tmp_path / "real.jsonl")]) == 2
    assert (tmp_path / "real.jsonl").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.jsonl", "real.jsonl", "rows.tsv"]


def test_a_device_or_a_pipe_is_not_replaced_by_answers(mood, parts, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    words = ["predict", str(mood[0]), "--input", str(parts[2]), "--text", "body", "--output", str(tmp_path / "pipe")]
    assert skipless(words) == 2
    assert "is not a file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_the_next_command_can_be_pasted(encoder, parts, tmp_path, capsys):
    words = command(encoder, parts, tmp_path / "my runs")
    assert skipless([*words, "--name", "it's; mine", "--set", "epochs=1"]) == 0
    said = capsys.readouterr().out
    pasted = shlex.split(said[said.index("next: skipless ") :].removeprefix("next: skipless "))
    assert pasted == ["predict", str(tmp_path / "my runs" / "it's; mine"), "--input", "FILE", "--text", "body"]
