"""The worked examples of training: a plain loop, `skipless.fit`, a classifier, accelerate."""

import importlib.util
from pathlib import Path

import pytest
import torch

import skipless
from skipless.training.train import train
from tests.helpers.labelled_files import rows, write
from tests.helpers.tiny_runs import MASKED, tiny

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plain_loop(tmp_path, capsys):
    losses = example("plain_loop").main(tmp_path / "saved", steps=60)
    assert losses[-1] < losses[0] - 1.5
    assert capsys.readouterr().out.startswith("import ")
    assert isinstance(skipless.load(tmp_path / "saved"), skipless.CausalLM)


def test_fit_with_own_data(tmp_path, capsys):
    """A few steps, and the rest in a second call."""
    module, quick = example("fit_own_data"), {"batch_size": 32, "eval_every": 20, "save_every": 20, "device": "cpu"}
    module.main(tmp_path / "sums", steps=40, **quick)
    told = capsys.readouterr().out
    assert "step 40 is kept in" in told
    losses = [float(line.split()[-1]) for line in told.splitlines() if "held-out" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_fit_learns_to_add(tmp_path):
    assert example("fit_own_data").main(tmp_path / "sums") > 0.9


def test_an_own_classifier(tmp_path, source, cache_dir):
    shape = {"model.max_seq_len": 32, "data.seq_len": 32}
    run = train(tiny(source, MASKED, shape, steps=6, eval_every=0), tmp_path / "run", trackers=[], cache_dir=cache_dir)
    files = []
    for name, count, seed in (("train", 96, 0), ("valid", 24, 1)):
        made = [{"text": row["body"], "label": row["mood"]} for row in rows(count, seed)]
        files.append(str(write(tmp_path / f"{name}.tsv", made)))
    answers = example("own_classifier").main(run.folder, *files, tmp_path / "mine", epochs=3, batch_size=8, lr=5e-3)
    assert len(answers) == 5
    assert set(answers.values()) <= {"bad", "fair", "good"}


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    losses = example("accelerate_loop").main(tmp_path / "saved", epochs=6, cpu=True)
    assert losses[-1] < losses[0] - 1
    with torch.no_grad():
        assert skipless.load(tmp_path / "saved")(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 256)
