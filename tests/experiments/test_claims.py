"""Claims can hold, can fail, and can stay open."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.claims import Claim, compare, interval, outcome
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.experiment import find
from skipless.experiments.outcome import FAILS, HOLDS, OPEN
from skipless.experiments.recipes import Scale
from skipless.experiments.shelf import with_seed
from skipless.finetune import summarise
from skipless.runs import Run
from tests.experiments.made_up import AGAINST, ALWAYS, LAPTOP, PAPER, Made, evidence, glue, history

IDS = [
    *("fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "tab1", "tab2", "fig8", "vp-lr", "schedule", "matrix"),
    *("mlp-gain", "tied", "gains", "preln-identity", "first-value", "mlp-skipless", "languini"),
]


def judge(id, *worlds):
    found = evidence(id, *worlds)
    return [claim.judge(found) for claim in EXPERIMENTS[id].claims(LAPTOP)]


def test_all_of_the_papers_experiments_are_there_in_its_order():
    assert list(EXPERIMENTS) == IDS
    assert set(PAPER) == set(AGAINST) == set(IDS)


@pytest.mark.parametrize("id", IDS)
def test_every_claim_holds_where_the_paper_is_right(id):
    for verdict in judge(id, PAPER[id], PAPER[id], PAPER[id]):
        assert verdict.outcome == HOLDS, (verdict.claim, verdict.reason)
        assert verdict.claim
        assert verdict.paper


@pytest.mark.parametrize("id", IDS)
def test_every_claim_fails_in_some_world(id):
    failed = {
        verdict.claim for world in AGAINST[id] for verdict in judge(id, world, world, world) if verdict.outcome == FAILS
    }
    assert failed == {claim.text for claim in EXPERIMENTS[id].claims(LAPTOP)} - set(ALWAYS.get(id, []))


@pytest.mark.parametrize("id", IDS)
def test_every_claim_is_open_where_seeds_disagree(id):
    for world in AGAINST[id]:
        false = {verdict.claim for verdict in judge(id, world, world) if verdict.outcome == FAILS}
        mixed = judge(id, PAPER[id], world, PAPER[id], world)
        for verdict in mixed:
            assert verdict.outcome == (OPEN if verdict.claim in false else HOLDS), (verdict.claim, verdict.reason)


@pytest.mark.parametrize("id", IDS)
def test_without_runs_every_claim_is_open_and_nothing_breaks(id):
    empty = Evidence({})
    for claim in EXPERIMENTS[id].claims(LAPTOP):
        verdict = claim.judge(empty)
        assert verdict.outcome == OPEN
        assert "no finished run of" in verdict.reason
    assert all(not plot.series for plot in EXPERIMENTS[id].plots(LAPTOP, empty))


@pytest.mark.parametrize("id", IDS)
def test_plots_are_drawable(id):
    found = EXPERIMENTS[id].plots(LAPTOP, evidence(id, PAPER[id], PAPER[id]))
    assert found
    assert len({plot.key for plot in found}) == len(found)
    for plot in found:
        assert plot.series, plot.key
        for series in plot.series:
            assert all(len(series.x[axis]) == len(series.y) for axis in plot.axes)
            assert series.sd is None or len(series.sd) == len(series.y)
            assert all(math.isfinite(value) for value in series.y)


@pytest.mark.parametrize("scale", ["laptop", "paper"])
@pytest.mark.parametrize("id", IDS)
def test_claims_are_about_runs_of_the_experiment(id, scale):
    scale = Scale(scale)
    labels = set(EXPERIMENTS[id].configs(scale))
    for claim in EXPERIMENTS[id].claims(scale):
        assert set(claim.labels) <= labels


# ------------------------------------------------------------------------------- the rule

CLAIM = compare("a is below b", "so", "sas", "sas-p", below=0.0)


def of_losses(*pairs):
    cfg = LAPTOP.decoder("sas")
    return Evidence(
        {
            "sas": {seed: history(cfg, Made(first)) for seed, (first, _) in enumerate(pairs)},
            "sas-p": {seed: history(cfg, Made(second)) for seed, (_, second) in enumerate(pairs)},
        }
    )


def test_one_seed_decides_only_beyond_the_assumed_spread():
    assert CLAIM.judge(of_losses((2.9, 3.0))).outcome == HOLDS
    assert CLAIM.judge(of_losses((3.1, 3.0))).outcome == FAILS
    small = CLAIM.judge(of_losses((2.98, 3.0)))
    assert small.outcome == OPEN
    assert "its spread is unknown and ±2.0% is assumed" in small.reason


def test_seeds_are_paired():
    """Losses that vary a lot from seed to seed, but always in the same way, decide."""
    assert CLAIM.judge(of_losses((2.0, 2.05), (3.0, 3.07), (4.0, 4.1))).outcome == HOLDS
    assert CLAIM.judge(of_losses((2.0, 3.07), (3.0, 2.05), (4.0, 4.1))).outcome == OPEN


def test_the_reason_has_the_numbers():
    verdict = CLAIM.judge(of_losses((2.9, 3.0), (2.8, 3.0)))
    assert verdict.numbers["sas"] == pytest.approx(2.85)
    assert verdict.numbers["mean"] == pytest.approx(-0.05)
    assert verdict.numbers["seeds"] == 2
    assert "sas 2.85, sas-p 3" in verdict.reason
    assert "seeds 0, 1" in verdict.reason


def test_unfinished_runs_do_not_count():
    found = of_losses((2.9, 3.0))
    run = found.histories["sas"][0]
    cut = replace(run, records=run.records[:-1])
    verdict = CLAIM.judge(Evidence({**found.histories, "sas": {0: cut}}))
    assert (verdict.outcome, verdict.reason) == (OPEN, "no finished run of sas")


def test_averages_over_different_tasks_are_not_compared():
    fewer = glue(90.0)
    fewer = summarise({**fewer, "tasks": {"sst2": fewer["tasks"]["sst2"]}})
    assert fewer["mean"] == pytest.approx(91.0)
    for id in ("tab1", "tab2"):
        sas, sas_p, *_ = judge(id, {**PAPER[id], "sas": replace(PAPER[id]["sas"], glue=fewer)})
        assert (sas.outcome, sas.reason) == (OPEN, "sas is not fine-tuned on all of sst2, stsb yet")
        assert sas_p.outcome == HOLDS


def test_models_that_were_not_fine_tuned_leave_glue_open():
    world = {block: replace(made, glue=None) for block, made in PAPER["tab1"].items()}
    verdicts = judge("tab1", world, world)
    assert [verdict.outcome for verdict in verdicts] == [OPEN, OPEN, HOLDS, HOLDS, HOLDS, HOLDS]
    assert verdicts[0].reason == "not all of the fine-tunings of sas, pre-ln are there; --glue-dir DIR makes them"


def test_a_fine_tuning_that_failed_has_no_average():
    failed = summarise({**glue(70.0), "failures": {"rte": {"0": {"message": "the loss is nan"}}}})
    world = {**PAPER["tab1"], "sas": replace(PAPER["tab1"]["sas"], glue=failed)}
    verdicts = judge("tab1", world)
    assert [verdict.outcome for verdict in verdicts[:2]] == [OPEN, HOLDS]
    bars, *_ = EXPERIMENTS["tab1"].plots(LAPTOP, evidence("tab1", world))
    assert "sas" not in bars.series[0].x["block"]
    assert "sas-p" in bars.series[0].x["block"]


def test_with_one_pre_training_the_seeds_are_those_of_the_fine_tuning():
    scores = {"pre-ln": (70.0, 71.0, 72.0), "sas": (70.5, 71.5, 72.5), "sas-p": (60.0, 71.0, 80.0)}
    world = {block: Made(glue=glue(*scores.get(block, (70.0,)))) for block in PAPER["tab1"]}
    sas, sas_p, *_ = judge("tab1", world)
    assert (sas.outcome, sas.numbers["mean"], sas.numbers["seeds"]) == (HOLDS, pytest.approx(0.5), 3)
    assert "90% interval over fine-tuning seeds 0, 1, 2" in sas.reason
    assert sas_p.outcome == OPEN
    (bars,) = EXPERIMENTS["tab2"].plots(LAPTOP, evidence("tab2", world))
    named = {series.name: series for series in bars.series}
    assert named["sas"].x["column"] == ("GLUE", "sst2", "stsb")
    assert named["sas"].y == pytest.approx((71.5, 72.5, 70.5))
    assert named["sas"].sd == pytest.approx((1.0, 1.0, 1.0))
    assert named["parallel"].sd is None


def with_seeds(results, column, *scores):
    """Results with other scores in a task, one for each seed."""
    seeds = {str(seed): {"m": score / 100} for seed, score in enumerate(scores)}
    return summarise({**results, "tasks": {**results["tasks"], column: {"seeds": seeds}}})


def test_what_pre_training_gave_is_judged_seed_against_seed_and_task_by_task():
    tuned, random = with_seeds(glue(70.0, 71.0), "sst2", 71.0, 74.0, 68.0, 72.0), glue(60.0, 61.0)
    world = {"sas": Made(glue=tuned, scratch=with_seeds(random, "sst2", 70.0, 73.0, 67.1, 70.9, 60.0))}
    verdicts = {verdict.claim: verdict for verdict in judge("tab2", world)}
    sst2, stsb = (
        verdicts[f"pre-training helps sas in {task} (points above a random encoder)"] for task in ("SST-2", "STS-B")
    )
    assert (sst2.outcome, sst2.numbers["mean"], sst2.numbers["seeds"]) == (HOLDS, pytest.approx(1.0), 4)
    assert (stsb.outcome, stsb.numbers["mean"], stsb.numbers["seeds"]) == (HOLDS, pytest.approx(10.0), 2)
    spread = {"sas": Made(glue=tuned, scratch=with_seeds(random, "sst2", 73.9, 70.0, 71.0, 66.1))}
    sst2, *_ = (
        verdict for verdict in judge("tab2", spread) if verdict.claim.startswith("pre-training helps sas in SST")
    )
    assert (sst2.outcome, sst2.numbers["mean"]) == (OPEN, pytest.approx(1.0))


def test_loss_at_a_time_lies_on_the_line():
    run = history(LAPTOP.decoder("sas"), Made(3.0, seconds=100.0))
    assert run.loss_at(95.0) == pytest.approx(3.2)
    assert run.loss_at(1000.0) == pytest.approx(3.0)
    assert run.loss_at(0.0) == pytest.approx(7.0)


def test_training_loss_is_that_of_the_end():
    run = history(LAPTOP.decoder("sas"), Made(3.0, train=2.5))
    assert run.train_loss == pytest.approx(2.5)


def test_ratios_follow_the_names_of_the_model():
    run = history(LAPTOP.decoder("sas-gains"), Made(ratios={"projection 12": 0.4}))
    assert sorted(run.ratios("value")) == list(range(1, 13))
    assert run.ratios("projection")[12][-1][1] == pytest.approx(0.4)
    assert isinstance(run, History)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_the_interval_holds_its_mean(values):
    mean, low, high = interval(values, 0.02)
    assert low <= mean <= high


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(-1, 1))
def test_a_claim_and_its_opposite_never_both_hold(middle, half, bound):
    low, high = middle - half, middle + half
    below, above = outcome(low, high, -math.inf, bound), outcome(low, high, bound, math.inf)
    assert {below, above} in ({HOLDS, FAILS}, {OPEN})


def test_quantiles_are_students():
    scipy = pytest.importorskip("scipy.stats")
    for freedom in range(1, 60):
        assert t_95(freedom) == pytest.approx(scipy.t.ppf(0.95, freedom), abs=2e-3)


def test_a_claim_is_not_decided_by_nan():
    claim = Claim("c", "p", ("sas",), lambda seed: float("nan"), below=0.0)
    assert claim.judge(of_losses((2.9, 3.0))).outcome == OPEN


# ---------------------------------------------------------------------------- read from folders


def write_run(folder, made: History) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": made.config.model_dump(mode="json")}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made.records))


def test_a_finding_is_read_from_the_folders_of_runs(tmp_path):
    """With as many seeds as there are, under whatever names."""
    for label, cfg in EXPERIMENTS["matrix"].configs(LAPTOP).items():
        for seed in range(2):
            shift = 0.01 * seed
            made = history(with_seed(cfg, seed), Made(PAPER["matrix"][label].loss + shift))
            write_run(tmp_path / f"{seed} {label}", made)
    finding = find("matrix", "laptop", tmp_path)
    assert (finding.id, finding.scale, finding.seeds) == ("matrix", "laptop", (0, 1))
    assert finding.command == "skipless reproduce matrix --scale laptop --seeds 2"
    assert [verdict.outcome for verdict in finding.verdicts] == [HOLDS, HOLDS]
    assert finding.verdicts[0].numbers["sas"] == pytest.approx(3.005)
    assert len(finding.runs) == 8
    assert finding.plots[0].series[0].sd[-1] == pytest.approx(0.01 / math.sqrt(2))
    nothing = find("fig5", "laptop", tmp_path / "nowhere")
    assert (nothing.seeds, nothing.plots, nothing.runs) == ((), (), ())
    assert {verdict.outcome for verdict in nothing.verdicts} == {OPEN}


def test_scores_of_fine_tuning_are_read_beside_the_run(tmp_path):
    cfg = LAPTOP.run("encoder", "sas")
    write_run(tmp_path / "run", history(cfg, Made()))
    assert History.read(Run(tmp_path / "run")).glue is None
    (tmp_path / "run" / "glue.json").write_text(json.dumps({"tasks": {}, "mean": 71.5, "sd": 0.4}))
    (tmp_path / "run" / "glue-from-scratch.json").write_text(json.dumps({"tasks": {}, "mean": 50.5, "sd": 0.4}))
    read = History.read(Run(tmp_path / "run"))
    assert (read.glue["mean"], read.scratch["mean"]) == (71.5, 50.5)
