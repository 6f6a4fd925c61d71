"""What a stranger runs first: `skipless` alone, and the demo, killed and started again."""

import json
import re
import signal

import pytest

from skipless.cli import run
from skipless.cli.app import START
from skipless.recipes import recipe
from tests.helpers.commands import commands as known_commands
from tests.helpers.commands import unknown_options
from tests.helpers.tiny_runs import CAUSAL, assert_same_run, newest_step


def test_nothing_given_shows_what_to_run(capsys):
    assert run([]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    shown = re.findall(r"^  (skipless .*?)  ", captured.out, flags=re.M)
    assert len(shown) == 6
    for line in shown:
        assert line.split()[1] in known_commands()
        assert unknown_options(line) == []
    assert max(map(len, START.splitlines())) <= 80


@pytest.fixture
def arguments(source, cache_dir):
    """A demo of a second; `--runs` is to be added."""
    settings = [f"{key}={json.dumps(value)}" for key, value in {**CAUSAL, "data.source": source}.items()]
    return ["demo", *(word for setting in settings for word in ("--set", setting)), "--cache-dir", str(cache_dir)]


def folders(runs):
    """Of the two runs, pre-ln first."""
    return sorted(path for path in runs.iterdir() if path.is_dir())


def test_the_demo_trains_both_and_shows_them(arguments, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = tmp_path / "my runs"
    assert run([*arguments, "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    pre_ln, sas_p = folders(runs)
    assert re.fullmatch("demo-pre-ln-[0-9a-f]{8}", pre_ln.name)
    assert re.fullmatch("demo-sas-p-[0-9a-f]{8}", sas_p.name)
    assert "αI + βA − γC" in out  # the drawing
    assert (newest_step(pre_ln), newest_step(sas_p)) == (12, 12)
    assert f"page: {runs / 'demo.html'}" in out
    assert out.rstrip().endswith(f"next: skipless generate '{sas_p}'")
    assert (runs / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "demo-sas-p" in (runs / "demo.html").read_text()


def test_the_demo_in_json(arguments, tmp_path, capsys):
    assert run([*arguments, "--runs", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [one["block"] for one in found] == ["pre-ln", "sas-p"]
    assert all(one["finished"] for one in found)


def test_the_demo_without_changes_has_plain_names(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr("skipless.cli.train.train_in", lambda cfg, folder, *_, **__: trained.append((cfg, folder)))
    monkeypatch.setattr("skipless.cli.report.report", lambda *_, **__: None)
    assert run(["demo", "--runs", str(tmp_path), "--json"]) == 0
    assert [(cfg, folder.name) for cfg, folder in trained] == [
        (recipe("demo", block), f"demo-{block}") for block in ("pre-ln", "sas-p")
    ]


def test_the_demo_goes_on_where_it_was_killed(arguments, tmp_path, fork_server):
    reference, runs = tmp_path / "reference", tmp_path / "runs"
    assert fork_server.start([*arguments, "--runs", str(reference), "--json"]).wait() == 0
    for number in range(2):  # first inside the first training, then inside the second
        child = fork_server.start([*arguments, "--runs", str(runs), "--json"])

        def has_saved(number=number):
            return runs.exists() and len(folders(runs)) > number and newest_step(folders(runs)[number]) >= 4

        child.stop_when(has_saved)
        child.send(signal.SIGKILL)
        child.send(signal.SIGCONT)
        assert child.wait() == -signal.SIGKILL
    assert fork_server.start([*arguments, "--runs", str(runs), "--json"]).wait() == 0
    for one, other in zip(folders(runs), folders(reference), strict=True):
        assert_same_run(one, other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "train.step=3"], "did you mean 'train.steps'"),
        (["--runs", "/dev/null/runs"], "cannot write into the folder"),
        (["pre-ln"], "unexpected extra argument"),
    ],
)
def test_a_demo_that_cannot_be(words, message, capsys):
    assert run(["demo", *words]) == 2
    err = capsys.readouterr().err
    assert message in err.lower() or message in err
    assert err.count("\n") == 1
