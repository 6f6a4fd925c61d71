"""`skipless compare`, and blocks of one's own in the experiments of the paper."""

import json

import pytest

from skipless.cli import run as command
from skipless.config.block import BLOCKS as PRESETS
from skipless.config.plugins import load_plugin
from skipless.errors import UserError
from skipless.experiments.beside import beside
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.comparison import Comparison, cache_bytes, costs
from skipless.experiments.evidence import Evidence, History
from skipless.experiments.run_index import RunIndex
from skipless.experiments.scale import Scale
from skipless.experiments.timings import NO_TIMINGS
from skipless.recipes.rates import packaged_rates
from tests.helpers.plugins import EXAMPLE_BLOCKS, example, no_plugins

LAPTOP = Scale("laptop")
pytestmark = pytest.mark.usefixtures("forked_workers")
PLUGINS = [word for name in EXAMPLE_BLOCKS for word in ("--plugin", example(name))]


@pytest.fixture(autouse=True)
def _examples():
    with no_plugins():
        for name in EXAMPLE_BLOCKS:
            load_plugin(example(name))
        yield


# ---------------------------------------------------------------------------------- rates


def test_a_block_has_its_tuned_rate_or_the_references():
    tuned = {block: values["train.lr"] for block, values in packaged_rates()["study"].items()}
    reference = tuned["pre-ln"]
    other = next(block for block in PRESETS if tuned.get(block, reference) != reference)
    asked = Comparison(("pre-ln", other, "pre-ln-dyt", f"{other}:norm=dyt"), LAPTOP)
    rates = [cfg.train.lr for cfg in asked.configs().values()]
    assert rates == [reference, tuned[other], reference, reference]
    said = asked.rates()
    assert said[other] == f"{tuned[other]:g} (tuned for it)"
    assert said["pre-ln-dyt"] == said[f"{other}:norm=dyt"] == f"{reference:g} (the reference’s)"
    assert f"pre-ln-dyt {reference:g} (the reference’s)" in asked.paper()


def test_rates_of_a_sweep_and_of_the_user_come_first():
    swept = Scale("laptop", {"study": {"pre-ln-dyt": {"train.lr": 1e-4}}})
    asked = Comparison(("pre-ln", "pre-ln-dyt"), swept)
    assert asked.configs()["pre-ln-dyt"].train.lr == 1e-4
    assert asked.rates()["pre-ln-dyt"] == "0.0001 (as given by --rates)"
    given = Comparison(("pre-ln", "sas-p"), Scale("laptop", None, {"train.lr": 5e-4}))
    assert {cfg.train.lr for cfg in given.configs().values()} == {5e-4}
    assert given.rates()["sas-p"] == "0.0005 (as given)"


def test_runs_are_those_of_reproduce():
    asked = Comparison(("pre-ln", "sas-p"), LAPTOP)
    fig5 = EXPERIMENTS["fig5"].configs(LAPTOP)
    assert asked.configs() == {block: fig5[block] for block in ("pre-ln", "sas-p")}


def test_one_block_is_no_comparison():
    with pytest.raises(UserError, match="two blocks at least"):
        Comparison(("pre-ln", "pre-ln"), LAPTOP)


def test_costs():
    asked = Comparison(("pre-ln", "sas-p", "sas-p:qk_norm=true"), LAPTOP).configs()
    whole = 2 * 64 * 12 * 4
    assert [cache_bytes(cfg) for cfg in asked.values()] == [whole, whole // 2, whole]
    assert costs(asked["sas-p"])["parameters"] < costs(asked["pre-ln"])["parameters"]
    encoder = Comparison(("pre-ln", "sas-p"), LAPTOP, "encoder").configs()["pre-ln"]
    assert "cache" not in costs(encoder)


def test_all_blocks_are_counted_with_the_vocabulary_of_those_that_are_trained():
    asked = Comparison(("pre-ln", "sas-p"), LAPTOP)
    cfg = asked.configs()["pre-ln"].override({"model.vocab_size": 777})
    found = asked.trained(Evidence({"pre-ln": {0: History(cfg, ())}}))
    assert {one.model.vocab_size for one in found.values()} == {777}
    assert {one.model.vocab_size for one in asked.trained(Evidence({})).values()} == {cfg.data.vocab_size}


def test_without_runs_nothing_is_said(tmp_path):
    finding = Comparison(("pre-ln", "sas-p"), LAPTOP).judge(RunIndex(tmp_path), 1, NO_TIMINGS, "")
    assert {verdict.outcome for verdict in finding.verdicts} == {"not decidable"}
    assert "no verdict yet" in finding.answer
    assert {plot.key for plot in finding.plots} >= {"parameters", "cache", "signal-cosine"}


# -------------------------------------------------------------------------------- the command


def test_end_to_end(tmp_path, small, capsys):
    words = ["compare", "pre-ln", *EXAMPLE_BLOCKS.values(), *PLUGINS, *small(), "--seeds", "2", "--rounds", "2"]
    words += ["--set", "train.health_every=6", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    assert command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left"] == []
    assert found["failed"] == {}
    assert len(found["finding"]["verdicts"]) == 9
    assert found["finding"]["seeds"] == [0, 1]
    assert all(one["numbers"]["seeds"] >= 2 for one in found["finding"]["verdicts"])
    page = (tmp_path / "out" / "comparison.html").read_text()
    for text in (
        *("pre-ln-dyt", "pre-ln-contrast", "pre-ln-bilinear", "the reference’s", "Held-out loss", "Parameters"),
        *("Memory of a training step", "Cache of decoding", "Time of a training token", "Outliers at the end"),
        *("Similarity of tokens at initialisation", "minutes at the measured time of a token"),
    ):
        assert text in page, text
    # again: nothing is trained, nothing is measured, and the page is the same
    assert command([*words, "--minutes", "0"]) == 0
    assert "pre-ln-dyt" in capsys.readouterr().out
    again = (tmp_path / "out" / "comparison.html").read_text()
    assert again.split("Run it again")[0] == page.split("Run it again")[0]
    # times that were measured of other blocks are not shown of these
    other = [
        "compare",
        "pre-ln",
        "sas-p",
        *small(),
        "--minutes",
        "0",
        "--rounds",
        "0",
        "--output",
        str(tmp_path / "out"),
    ]
    assert command([*other, "--runs", str(tmp_path / "runs"), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["finding"]["verdicts"]
    assert not any("seeds" in one["numbers"] for one in verdicts if "less time" in one["claim"])
    # times that were damaged are said, and not a traceback
    times = tmp_path / "out" / "token-time.json"
    measured = json.loads(times.read_text())
    fewer = {block: rounds[block == "pre-ln" :] for block, rounds in measured["seconds"]["here"].items()}
    for seconds in (None, {"here": {"pre-ln": ["x"]}}, {"here": fewer}):
        times.write_text(json.dumps({**measured, "seconds": seconds}))
        assert command([*words, "--minutes", "0"]) == 2
        assert "token-time.json' does not hold the times of tokens" in capsys.readouterr().err


def test_bad_input(tmp_path, capsys):
    def refused(*words):
        assert command(["compare", *words, "--output", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "two blocks at least" in refused("pre-ln")
    assert "unknown block 'pre-nl'" in refused("pre-ln", "pre-nl")
    assert "unknown scale" in refused("pre-ln", "sas", "--scale", "moon")


# ---------------------------------------------------------------------------- in experiments


def test_a_block_beside_the_known_ones():
    (fig5,) = beside([EXPERIMENTS["fig5"]], ["pre-ln-dyt"], LAPTOP)
    configs = fig5.configs(LAPTOP)
    assert list(configs)[-1] == "pre-ln-dyt"
    assert configs["pre-ln-dyt"].model.block.norm.name == "dyt"
    assert configs["pre-ln-dyt"].train.lr == configs["pre-ln"].train.lr
    assert {**configs, "pre-ln-dyt": None} == {**EXPERIMENTS["fig5"].configs(LAPTOP), "pre-ln-dyt": None}
    assert fig5.claims(LAPTOP)[-1].text == "pre-ln-dyt matches pre-ln per step"
    (fig6,) = beside([EXPERIMENTS["fig6"]], ["pre-ln-bilinear"], LAPTOP)
    assert list(fig6.configs(LAPTOP))[-2:] == ["pre-ln-bilinear, shallow", "pre-ln-bilinear, deep"]


def test_an_experiment_without_the_reference_has_no_place():
    without = next(one for one in EXPERIMENTS.values() if not any("pre-ln" in label for label in one.configs(LAPTOP)))
    with pytest.raises(UserError, match="does not train pre-ln"):
        beside([without], ["pre-ln-dyt"], LAPTOP)


def test_reproduce_with_a_plugin(tmp_path, small, capsys):
    words = ["reproduce", "fig8", "--beside", "pre-ln-dyt", "--plugin", example("dynamic_tanh"), *small(), "--json"]
    assert command([*words, "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left"] == []
    verdicts = found["findings"][0]["verdicts"]
    assert verdicts[-1]["claim"] == "pre-ln-dyt matches pre-ln per step"
    assert verdicts[-1]["own"]
    assert len(list((tmp_path / "runs").glob("pre-ln-dyt-s0-*"))) == 1


def test_sweep_with_a_plugin(tmp_path, small, capsys):
    words = ["sweep", "--over", "train.lr=1e-3,2e-3", "--block", "pre-ln-dyt", "--plugin", example("dynamic_tanh")]
    assert command([*words, *small(), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "sweep")]) == 0
    best = json.loads((tmp_path / "sweep" / "best.json").read_text())
    assert set(best["study"]) == {"pre-ln-dyt"}
    capsys.readouterr()
