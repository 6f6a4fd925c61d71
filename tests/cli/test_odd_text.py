"""Text that is none, input that is closed, and terminals that know no letters but those of English."""

import io
import os
import subprocess
import sys

import pytest

from skipless.cli import run as skipless
from skipless.training.train import train
from tests.helpers.processes import ENVIRONMENT, ROOT
from tests.helpers.tiny_runs import tiny

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, source, cache_dir):
    cfg = tiny(source, steps=2, eval_every=0, save_every=2)
    return train(cfg, tmp_path_factory.mktemp("odd") / "run", trackers=[], cache_dir=cache_dir).folder


def generate(trained, *more) -> list[str]:
    return ["generate", str(trained), "--max-new-tokens", "2", *more]


def the_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("prompt", ["\udcff", "def \ud800"])
def test_a_prompt_that_is_no_text(trained, capsys, prompt):
    assert skipless(generate(trained, "--prompt", prompt)) == 2
    assert "UTF-8" in the_line(capsys)


def test_standard_input_that_is_no_text(trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def \xff\xfe")))
    assert skipless(generate(trained)) == 2
    assert the_line(capsys) == "skipless: standard input is not text in UTF-8"


def test_standard_input_that_is_closed(trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    assert skipless(generate(trained)) == 2
    assert "there is no prompt" in the_line(capsys)


def in_ascii(arguments: list[str], **how) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "skipless", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**ENVIRONMENT, **ASCII}, capture_output=True, check=False, **how)


def test_in_a_process_with_closed_input_and_an_ascii_terminal(trained):
    command = [sys.executable, "-m", "skipless", *generate(trained)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**ENVIRONMENT, **ASCII},
        capture_output=True,
        check=False,
        preexec_fn=lambda: os.close(0),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"skipless: there is no prompt")


def test_letters_that_an_ascii_terminal_does_not_have(trained):
    done = in_ascii(generate(trained, "--prompt", "def größe × π"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"def gr")
    assert b"Traceback" not in done.stderr
