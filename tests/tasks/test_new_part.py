"""`skipless new-part`: what it writes works at once."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from skipless.cli import run as command
from skipless.config.plugins import load_plugin
from skipless.tasks.new_part import TEMPLATES
from skipless.testing import check
from tests.helpers.plugins import no_plugins

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_plugins():
    with no_plugins():
        yield


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_kind_has_all_properties_and_is_tidy(kind, tmp_path, capsys):
    assert command(["new-part", f"my-{kind}", "--part", kind, "--output", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [Path(path).name for path in files] == [f"my_{kind}.py", f"test_my_{kind}.py", f"train_my_{kind}.py"]
    load_plugin(files[0])
    check(f"pre-ln-my-{kind}")
    assert command(["inspect", f"pre-ln-my-{kind}", "-L", "2", "-d", "16", "-H", "2", "--plugin", files[0]]) == 0
    config = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "D,ANN,INP,I001"]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *config, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_its_test_and_its_training_pass(tmp_path):
    assert command(["new-part", "mine", "--output", str(tmp_path)]) == 0
    place = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    options = ["-q", "-p", "no:cacheprovider", "-k", "causality or saving"]
    tested = subprocess.run([sys.executable, "-m", "pytest", *options, "test_mine.py"], **place)
    assert tested.returncode == 0, tested.stdout
    trained = subprocess.run([sys.executable, "train_mine.py"], **place)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("held-out loss: ")
    assert (tmp_path / "runs" / "pre-ln-mine" / "config.json").exists()


def test_the_training_has_five_lines(tmp_path):
    command(["new-part", "mine", "--output", str(tmp_path)])
    lines = (tmp_path / "train_mine.py").read_text().split('"""\n', 1)[1].strip().splitlines()
    assert len([line for line in lines if line]) == 5


def test_bad_input(tmp_path, capsys):
    def refused(*words):
        assert command(["new-part", *words, "--output", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "unknown kind of part to begin with 'nrom'" in refused("mine", "--part", "nrom")
    assert "a name has letters" in refused("my part")
    assert "there is a norm 'rmsnorm' already" in refused("rmsnorm")
    for name in ("1st", "class", "ä", "_x", "."):
        assert "begin with a letter" in refused(name)
    for name in ("torch", "json", "skipless"):
        assert "would hide" in refused(name)
    assert command(["new-part", "mine", "--output", str(tmp_path)]) == 0
    before = (tmp_path / "mine.py").read_text()
    assert "is there already" in refused("mine", "--part", "mlp")
    assert (tmp_path / "mine.py").read_text() == before


@pytest.mark.parametrize("gone", ["mine.py", "test_mine.py", "train_mine.py"])
def test_a_call_that_was_killed_is_made_again(gone, tmp_path):
    words = ["new-part", "mine", "--output", str(tmp_path)]
    assert command(words) == 0
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    (tmp_path / gone).unlink()
    assert command(words) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("there", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_replaced(there, tmp_path, capsys):
    path = tmp_path / "mine.py"
    {"link": lambda: path.symlink_to("x"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[there]()
    assert command(["new-part", "mine", "--output", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["mine.py"]


def test_the_next_command_can_be_pasted(tmp_path, capsys):
    assert command(["new-part", "mine", "--output", str(tmp_path / "my parts")]) == 0
    said = capsys.readouterr().out
    pasted = shlex.split(said[said.index("next:  skipless ") :].removeprefix("next:  skipless "))
    assert command([*pasted, "-L", "1", "-d", "16", "-H", "2"]) == 0
