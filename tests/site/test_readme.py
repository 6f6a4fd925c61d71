"""The README: every figure in it comes from a file, and says what that file says."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from skipless import BLOCKS
from skipless.cli import run
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.experiments.evidence import Evidence
from skipless.experiments.outcome import Verdict
from skipless.experiments.report.draw import to_csv
from tools.site import readme, speeds

TEXT = readme.README.read_text(encoding="utf-8")


def part(name):
    return TEXT.split(f"<!-- {name}: written by `make readme` -->\n")[1].split(f"<!-- end of {name} -->")[0]


def test_what_code_writes_is_up_to_date():
    assert readme.filled(TEXT) == TEXT, "run `make readme`"


def test_another_figure_is_noticed():
    number = re.search(r"held-out loss is (\d\.\d+)", part("losses")).group(1)
    changed = TEXT.replace(number, "1.234", 1)
    assert readme.filled(changed) == TEXT


@pytest.mark.parametrize("name", ["losses", "blocks", "claims", "speed", "demo"])
def test_a_part_without_its_marks_is_an_error(name):
    with pytest.raises(ValueError, match=f"no place for {name}"):
        readme.filled(TEXT.replace(f"<!-- end of {name} -->", ""))


def test_the_figure_is_of_the_named_runs():
    names = json.loads(readme.FACTS.read_text())["runs"]
    assert {run.name for run in readme.evidence().runs()} == set(names)
    plot = readme.losses(readme.evidence())
    assert [series.name for series in plot.series] == list(readme.SHOWN)
    kept = (readme.FIGURES / "losses.csv").read_text()
    assert kept == to_csv(plot), "run `make readme`"
    last = {row["series"]: float(row["y"]) for row in csv.DictReader(io.StringIO(kept))}
    assert f"{last['pre-ln']:.3f}" in part("losses")
    assert f"{last['sas-p']:.3f}" in part("losses")


def test_the_pictures_are_those_of_the_blocks():
    for dark, look in ((False, "light"), (True, "dark")):
        assert (readme.FIGURES / f"blocks-{look}.svg").read_text() == readme.picture(dark=dark), "run `make readme`"


def test_the_tables_name_what_there_is():
    assert re.findall(r"^\| `([\w-]+)`", part("blocks"), flags=re.M) == list(BLOCKS)
    figures = speeds.speed("T=128: sas-p", "pre-ln")
    assert len(figures.values) >= 5
    assert figures.text in part("speed")
    assert figures.text in part("blocks")


@pytest.mark.parametrize(
    ("seeds", "waiting", "said"),
    [
        (0, 4, "Of the paper's 13 claims, 9 hold; 4 are not tested yet ("),
        (1, 2, "9 hold; 2 are undecided, mostly with one seed; 2 are not tested yet ("),
        (2, 0, "9 hold; 4 are undecided, mostly with 2 seeds ("),
        (3, 2, "9 hold; 2 are undecided; 2 are not tested yet ("),
        (3, 0, "of the paper's 13 claims, most of them over 3 seeds: 9 hold, 4 not decidable ("),
    ],
)
def test_how_far_the_trainings_are_is_said(monkeypatch, tmp_path, seeds, waiting, said):
    facts = {"seeds": seeds, "waiting": waiting, "verdicts": {"holds": 9, "not decidable": 4}}
    (tmp_path / "readme.json").write_text(json.dumps({"claims": facts}))
    monkeypatch.setattr(readme, "FACTS", tmp_path / "readme.json")
    assert said in readme.verdicts()
    assert ("incomplete" in readme.verdicts()) == (seeds < 3 or waiting > 0)


def test_what_is_said_of_the_claims_is_what_the_archive_says():
    assert readme.claims() == json.loads(readme.FACTS.read_text())["claims"], "run `make readme`"


def test_the_list_of_experiments_says_what_the_archive_says(capsys):
    found = readme.came_out()
    assert found == json.loads(readme.PUBLISHED.read_text()), "run `make readme`"
    assert found["fig5"]["status"]
    assert run(["reproduce", "--list"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert listed.count("here: ") == len(EXPERIMENTS)
    assert listed.count("here: not run yet") == len(EXPERIMENTS) - len(found)
    assert f"here: {found['fig5']['status']}" in listed.replace(f"{found['fig5']['answer'].rstrip('.')}. ", "")


def test_rounds_of_a_measurement_are_no_seeds(monkeypatch):
    """Nor does a claim without runs have any."""
    said = [
        Verdict("in run time", "", "holds", "", {"seeds": 9.0}, seed="round"),
        Verdict("matches", "", "not decidable", "", {"seeds": 2.0}),
        Verdict("matches, too", "", "not decidable", "", {"seeds": 1.0}),
        Verdict("not trained", "", "not decidable", ""),
    ]
    finding = replace(next(iter(readme.findings().values())), verdicts=tuple(said), own=False)
    monkeypatch.setattr(readme, "findings", lambda: {"one": finding})
    assert readme.claims() == {"seeds": 1, "waiting": 1, "verdicts": {"holds": 1, "not decidable": 3}}


def test_a_block_with_one_seed_among_others_with_more_says_so():
    found = readme.evidence()
    one = Evidence({name: dict(list(of.items())[:1]) for name, of in found.histories.items()}, found.timings)
    assert "| loss (one seed) |" in readme.blocks(one)
    twice = {name: of | {7: next(iter(of.values()))} if name != "sas-p" else of for name, of in one.histories.items()}
    row = next(
        line for line in readme.blocks(Evidence(twice, one.timings)).splitlines() if line.startswith("| `sas-p` ")
    )
    assert row.endswith("(one seed) |")
    assert "| loss |" in readme.blocks(Evidence(twice, one.timings))


def test_runs_that_it_does_not_name_change_nothing(monkeypatch, tmp_path):
    facts, kept = tmp_path / "readme.json", sorted(run.name for run in readme.evidence().runs())[:-1]
    facts.write_text(json.dumps({"runs": kept}))
    monkeypatch.setattr(readme, "FACTS", facts)
    assert sorted(run.name for run in readme.evidence().runs()) == kept


def test_runs_that_are_gone_are_an_error(monkeypatch, tmp_path):
    facts = tmp_path / "readme.json"
    facts.write_text(json.dumps({"runs": ["pre-ln-s0-gone"]}))
    monkeypatch.setattr(readme, "FACTS", facts)
    with pytest.raises(ValueError, match="pre-ln-s0-gone"):
        readme.evidence()


def test_what_is_said_of_llama_cpp_is_what_was_measured():
    """In the limits, and in docs/decoding.md: ahead at every width of weights, at 4 bits only with a cache at 8."""
    files = [json.loads(path.read_text()) for path in sorted(speeds.FILES.glob("decode-[0-9].json"))]
    assert len(files) >= 3
    times = [content["one_sequence"]["milliseconds"]["token"] for content in files]

    def ahead(ours, theirs):
        return [min(time for name, time in run.items() if name.startswith(theirs)) / run[ours] for run in times]

    assert min(ahead("sas-p ONNX 32", "llama.cpp f32")) > 1
    assert min(ahead("sas-p ONNX 8", "llama.cpp q8_0")) > 1
    assert min(ahead("sas-p ONNX 4 kx8", "llama.cpp q4_0")) > 1
    assert min(ahead("sas-p ONNX 4", "llama.cpp q4_0")) < 1 < max(ahead("sas-p ONNX 4", "llama.cpp q4_0")) < 1.15


def test_it_is_two_screens():
    words = re.sub(r"<[^>]+>|\|", " ", TEXT).split()
    assert len(words) < 1000


@pytest.mark.slow
def test_the_demo_ends_as_the_readme_says(tmp_path):
    """Trains the two blocks of the demo, which takes minutes."""
    from skipless.experiments.report.summary import summarise
    from skipless.recipes import recipe
    from skipless.runs import Run
    from skipless.training.train import train

    for row in json.loads(readme.DEMO.read_text())["runs"]:
        run = tmp_path / row["name"]
        train(recipe("demo", row["name"].removeprefix("demo-")), run)
        found = summarise(Run(run))
        assert found.parameters == row["parameters"]
        assert found.valid_loss == pytest.approx(row["valid_loss"], rel=0.02)
