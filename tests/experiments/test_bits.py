"""What low bits cost: how it is measured, kept and judged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import skipless
from skipless.data import prepare
from skipless.errors import UserError
from skipless.experiments.archive import archive
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import judge
from skipless.experiments.jobs import LowBits, plan
from skipless.experiments.messages import TrainWork
from skipless.experiments.run_index import RunIndex
from skipless.experiments.scale import Scale
from skipless.experiments.worker import StepObserver, do
from skipless.interop.onnx_bits import pack
from skipless.nn.model import CausalLM
from skipless.runs import Run, load
from skipless.tasks.low_bits import FILE, FORMS, eight_bits, measure, rounded, rounded_inputs
from tests.helpers.tiny_runs import tiny, write_text
from tests.helpers.weights import disturbed

LAPTOP = Scale("laptop")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps that was measured, by the work of a job."""
    folder = tmp_path_factory.mktemp("bits")
    changes = {"model.block": "sas-p", "train.sample_every": 0}
    cfg = tiny(write_text(folder / "text"), changes, steps=30, eval_every=15, save_every=15)
    work = TrainWork(folder=folder / "runs" / "run", config=cfg, cache_dir=folder / "cache", low_bits=True)
    do(work, StepObserver())
    return Run(folder / "runs" / "run"), folder / "cache"


def test_a_worker_trains_and_measures(trained):
    run, cache = trained
    found = json.loads((run.folder / FILE).read_text())
    assert found["loss"].keys() == {"32", *FORMS}
    assert found["loss"]["32"] == pytest.approx(list(run.metrics())[-1]["valid_loss"], rel=1e-5)
    assert found["agreement"]["32"] == 1
    assert abs(found["loss"]["w8"] / found["loss"]["32"] - 1) < 0.01
    assert all(0.5 < share <= 1 for share in found["agreement"].values())
    assert found["agreement"]["w4"] <= found["agreement"]["w8"]
    assert found["kurtosis"]["neuron_kurtosis"] >= 1
    cfg = run.config()
    assert measure(load(run.folder), cfg, prepare(cfg.data, cache_dir=cache)) == found


def test_a_rounded_model_has_the_matrices_of_an_export():
    torch.manual_seed(0)
    model = disturbed(CausalLM(skipless.ModelConfig(block="sas", n_layer=2, d_model=32, n_head=2, vocab_size=50)), 0.1)
    small = rounded(model, 4)
    weight = model.blocks[1].mlp.up.weight
    assert torch.equal(small.blocks[1].mlp.up.weight, torch.from_numpy(pack(weight, 4, 32, symmetric=False).dense()))
    first = model.blocks[0].attention.value.matrix()
    assert torch.equal(
        small.blocks[0].attention.value.weight, torch.from_numpy(pack(first, 4, 32, symmetric=False).dense())
    )
    assert not torch.equal(small.embedding.weight, model.embedding.weight)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        exact, coarse = model.eval()(ids), small(ids)
        with rounded_inputs(small):
            coarser = small(ids)
        assert torch.equal(small(ids), coarse)  # only within the context
    assert 0 < (coarse - exact).norm() < (exact - exact.mean(-1, keepdim=True)).norm()
    assert not torch.equal(coarser, coarse)


def test_one_outlier_makes_all_others_coarse():
    x = torch.tensor([[1.0, 0.5, 100.0], [1.0, 0.5, 1.0]])
    assert eight_bits(x)[0].tolist() == pytest.approx([100 / 127, 100 / 127, 100], rel=1e-5)
    assert (eight_bits(x)[1] - x[1]).abs().max() <= 0.5 / 127
    assert not eight_bits(torch.zeros(2, 3)).any()


def test_figures_are_archived_and_stay(trained, tmp_path):
    run, _ = trained
    assert archive(run, tmp_path)
    (place,) = tmp_path.iterdir()
    kept = History.read(Run(place)).bits
    assert kept == json.loads((run.folder / FILE).read_text())
    (run.folder / FILE).rename(run.folder / "aside.json")
    try:
        assert not archive(run, tmp_path)
        assert (place / FILE).exists()
        (place / "metrics.jsonl.gz").unlink()  # so that it is written again
        assert archive(run, tmp_path)
        assert History.read(Run(place)).bits == kept
    finally:
        (run.folder / "aside.json").rename(run.folder / FILE)


def test_what_is_published_without_figures_is_trained_again(trained, tmp_path):
    run, _ = trained
    one = replace(EXPERIMENTS["bits"], configs=lambda scale: {"sas-p": run.config()})
    published, here = tmp_path / "published", tmp_path / "runs"
    archive(run, published)
    (job,) = plan([one], LAPTOP, 1, RunIndex(here, published), 1e9)
    assert isinstance(job, LowBits)
    assert job.completion().finished
    (next(published.iterdir()) / FILE).unlink()
    (job,) = plan([one], LAPTOP, 1, RunIndex(here, published), 1e9)
    assert job.folder.parent == here
    assert not job.completion().finished
    assert job.work(None).low_bits
    # beside an experiment that needs the run alone, it is one job
    other = replace(one, id="other", low_bits=False)
    assert [type(job) for job in plan([other, one], LAPTOP, 1, RunIndex(here, published), 1e9)] == [LowBits]


# ------------------------------------------------------------------------------------ claims


def made(rises, kurtosis=2.0, exact=3.0):
    loss = {"32": exact, **{form: exact * (1 + rise) for form, rise in rises.items()}}
    return {"loss": loss, "kurtosis": {"neuron_kurtosis": kurtosis}, "agreement": {}}


LITTLE = {"w8": 0.0005, "w4": 0.01, "w8a8": 0.001, "w4a8": 0.012}
MUCH = {"w8": 0.001, "w4": 0.05, "w8a8": 0.02, "w4a8": 0.08}


def evidence(simple, plain, seeds=3):
    """Every simpler block as one, the others as another; seeds differ a little."""
    found = {}
    for label, cfg in EXPERIMENTS["bits"].configs(LAPTOP).items():
        bits = simple if label.startswith("sas") else plain
        records = [{"step": cfg.train.steps, "tokens": 1, "seconds": 1.0, "valid_loss": 3.0}]
        for seed in range(seeds):
            shaken = bits and made(
                {form: rise * (1 + 0.02 * seed) for form, rise in bits["rise"].items()}, bits["size"]
            )
            found.setdefault(label, {})[seed] = History(cfg, records, bits=shaken)
    return Evidence(found)


def outcomes(found):
    return {claim.text: claim.judge(found).outcome for claim in EXPERIMENTS["bits"].claims(LAPTOP)}


def test_claims_hold_and_fail_where_they_should():
    simple, plain = {"rise": LITTLE, "size": 1.5}, {"rise": MUCH, "size": 6.0}
    fewer, more = outcomes(evidence(simple, plain)), outcomes(evidence(plain, simple))
    assert set(fewer.values()) == {"holds"}
    compared = [text for text in more if "than pre-ln" in text]
    assert len(compared) == 2 * 9
    assert {more[text] for text in compared} == {"does not hold"}
    coarse = outcomes(evidence({"rise": {**MUCH, "w8": 0.01}, "size": 2.0}, plain))
    assert coarse["8 bits cost sas-p nearly nothing, width 64"] == "does not hold"


def test_nothing_is_said_of_what_was_not_measured():
    found = evidence(None, {"rise": MUCH, "size": 6.0})
    claims = EXPERIMENTS["bits"].claims(LAPTOP)
    verdicts = [claim.judge(found) for claim in claims if "than pre-ln" in claim.text]
    assert {verdict.outcome for verdict in verdicts} == {"not decidable"}
    assert all("not measured at low bits" in verdict.reason for verdict in verdicts)


def test_plots_show_every_block_at_both_sizes():
    found = evidence({"rise": LITTLE, "size": 1.5}, {"rise": MUCH, "size": 6.0})
    plots = EXPERIMENTS["bits"].plots(LAPTOP, found)
    assert [len(plot.series) for plot in plots] == [5] * 4
    assert all(series.x["value"] == (64, 128) for plot in plots for series in plot.series)


def test_its_runs_are_those_of_other_experiments():
    runs = {label: cfg.digest for label, cfg in EXPERIMENTS["bits"].configs(LAPTOP).items()}
    fig5 = {cfg.digest for cfg in EXPERIMENTS["fig5"].configs(LAPTOP).values()}
    trend = {cfg.digest for cfg in EXPERIMENTS["trend"].configs(LAPTOP).values()}
    assert all(digest in fig5 for label, digest in runs.items() if "64" in label)
    assert {label for label, digest in runs.items() if digest in trend and "128" in label} == {
        "pre-ln, width 128",
        "sas-p, width 128",
    }


def test_the_trend_begins_at_the_runs_of_everything_else():
    fig5 = {cfg.digest for cfg in EXPERIMENTS["fig5"].configs(LAPTOP).values()}
    first = {label: cfg.digest for label, cfg in EXPERIMENTS["trend"].configs(LAPTOP).items() if "× 1," in label}
    assert len(first) == 2
    assert set(first.values()) < fig5


def test_it_is_judged_from_a_folder(trained, tmp_path):
    run, _ = trained
    one = replace(EXPERIMENTS["bits"], configs=lambda scale: {"pre-ln, width 64": run.config()})
    finding = judge(one, LAPTOP, 1, RunIndex(run.folder.parent), "")
    eight = next(
        verdict for verdict in finding.verdicts if verdict.claim == "8 bits cost pre-ln nearly nothing, width 64"
    )
    assert "one seed" in eight.reason


@pytest.mark.parametrize("change", [{"loss": {}}, {"loss": []}, {"loss": {"32": 0.0}}, {"kurtosis": {}}], ids=str)
def test_figures_that_are_none_are_said(trained, tmp_path, change):
    run, _ = trained
    (tmp_path / FILE).write_text(json.dumps({**json.loads((run.folder / FILE).read_text()), **change}))
    (tmp_path / "config.json").write_text(run.config_file.read_text())
    with pytest.raises(UserError, match="figures at low bits"):
        History.read(Run(tmp_path))


def test_a_run_whose_origin_is_lost_is_archived(trained, tmp_path):
    run, _ = trained
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    info = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"config": info["config"], "data": info["data"]}))
    assert archive(Run(folder), tmp_path / "archive")
    assert RunIndex(tmp_path / "archive").find(run.config()).exists
