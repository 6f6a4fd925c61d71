"""What version 0.1.0 wrote still opens: a run, its checkpoint, a prepared corpus, an encoder with GLUE, an export."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import skipless
from skipless.config.run import FinetuneConfig
from skipless.data.corpus import Corpus
from skipless.data.glue import TASKS
from skipless.experiments.evidence import History
from skipless.experiments.report.summary import summarise
from skipless.runs import Run
from skipless.tasks.finetune import finetune
from skipless.training.observer import Observer
from skipless.training.train import train

OLD = Path(__file__).parent / "fixtures" / "v0_1_0"


def last_logits(model) -> torch.Tensor:
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        return model(ids)[0, -1]


@pytest.mark.parametrize("what", ["run", "run/checkpoints/step-00000008", "export"])
def test_a_model_opens_with_the_same_logits(what):
    expected = torch.tensor(json.loads((OLD / "logits.json").read_text()))
    model = skipless.load(OLD / what)
    torch.testing.assert_close(last_logits(model), expected, rtol=1e-4, atol=2e-5)
    assert model.tokenizer.decode(model.tokenizer.encode("def alpha")) == "def alpha"


def test_an_export_opens_in_transformers():
    transformers = pytest.importorskip("transformers")
    assert skipless.hf  # makes the Auto classes know its models
    model = transformers.AutoModelForCausalLM.from_pretrained(OLD / "export")
    expected = torch.tensor(json.loads((OLD / "logits.json").read_text()))
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[0, -1], expected, rtol=1e-4, atol=2e-5)


def test_a_run_is_read_and_reported():
    summary = summarise(Run(OLD / "run"))
    assert (summary.steps, summary.finished) == (8, True)
    assert summary.valid_loss == pytest.approx(list(Run(OLD / "run").metrics())[-1]["valid_loss"])


def test_an_encoder_has_its_scores():
    glue = History.read(Run(OLD / "encoder")).glue
    assert glue is not None
    assert set(glue["tasks"]) == {"sst2", "stsb"}
    assert isinstance(skipless.load(OLD / "encoder"), skipless.MaskedLM)


def test_a_prepared_corpus_opens():
    cfg = Run(OLD / "run").config()
    corpus = Corpus.open(OLD / "corpus", cfg.data)
    assert corpus.fingerprint == Run(OLD / "run").info()["data"]["fingerprint"]
    assert len(corpus.train) > 100


def test_a_run_goes_on(tmp_path, monkeypatch):
    """On the same text, from its checkpoint: steps 9 to 12 follow step 8."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD / "modules", "modules")
    shutil.copytree(OLD / "run", "run")
    before = list(Run(Path("run")).metrics())
    cfg = Run(Path("run")).config().override({"train.steps": 12})
    train(cfg, "run", resume=True, accept_changes=True, trackers=[], cache_dir=tmp_path / "cache")
    after = list(Run(Path("run")).metrics())
    assert after[: len(before)] == before
    assert after[-1]["step"] == 12


def test_a_fine_tuning_goes_on(tmp_path):
    """From its checkpoint, whose optimiser had no number: steps 5 and 6 follow step 4."""

    class Steps(Observer):
        def __init__(self):
            self.seen = []

        def progress(self, what, share, seconds_left):
            self.seen.append(what)

    run, steps = tmp_path / "run", Steps()
    shutil.copytree(OLD / "encoder", run, ignore=shutil.ignore_patterns("glue.json"))
    shutil.copytree(OLD / "unfinished-glue" / "run", run, dirs_exist_ok=True)
    cfg = FinetuneConfig(epochs=2, batch_size=8, lr=3e-3)
    data = OLD / "unfinished-glue" / "data"
    results = finetune(run, data, [TASKS["cola"]], seeds=1, cfg=cfg, observer=steps)
    assert steps.seen == ["cola, seed 0: step 5 of 6", "cola, seed 0: step 6 of 6"]
    assert results["fits"]["cola"]["0"]["train_loss"] == pytest.approx(0.68783442, abs=2e-4)
