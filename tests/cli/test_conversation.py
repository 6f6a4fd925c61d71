"""`skipless generate` in a terminal: it asks, answers, and asks again."""

import builtins
import os
import pty
import subprocess
import sys

import pytest

from skipless.cli import run
from skipless.training.train import train
from tests.helpers.processes import ENVIRONMENT
from tests.helpers.tiny_runs import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory, source, cache_dir):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train(tiny(source, steps=4), folder, trackers=[], cache_dir=cache_dir)
    return folder


class Terminal:
    """Standard input that is a terminal, and what is typed in it; an exception is raised where it stands."""

    closed = False

    def __init__(self, monkeypatch, *typed):
        self.typed = iter(typed)
        monkeypatch.setattr(sys, "stdin", self)
        monkeypatch.setattr(builtins, "input", self.input)

    def isatty(self):
        return True

    def input(self, prompt):
        print(prompt, end="")
        line = next(self.typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


def test_it_answers_until_the_input_ends(folder, monkeypatch, capsys):
    Terminal(monkeypatch, "def alpha", "", "def alpha")
    assert run(["generate", str(folder), "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    asked = captured.out.split("> ")
    assert len(asked) == 5
    assert asked[1].startswith("def alpha")
    assert asked[3].startswith("def alpha")
    assert asked[1] != asked[3]  # each answer has a seed of its own
    assert asked[4] == ""
    assert "Ctrl-D" in captured.err


def test_the_first_answer_is_that_of_a_prompt(folder, monkeypatch, capsys):
    assert run(["generate", str(folder), "--prompt", "def alpha", "--max-new-tokens", "5"]) == 0
    expected = capsys.readouterr().out
    Terminal(monkeypatch, "def alpha")
    assert run(["generate", str(folder), "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"> {expected}> "


def test_ctrl_c_ends_an_answer_and_then_the_command(folder, monkeypatch, capsys):
    answered = []

    def interrupted(model, text, *_, **__):
        answered.append(text)
        yield " and"
        raise KeyboardInterrupt

    monkeypatch.setattr("skipless.nn.sampling.stream_text", interrupted)
    Terminal(monkeypatch, "one", "two", KeyboardInterrupt())
    assert run(["generate", str(folder)]) == 130
    assert answered == ["one", "two"]
    captured = capsys.readouterr()
    assert captured.out == "> one and\n> two and\n> "
    assert "skipless:" not in captured.err


def test_what_is_no_text_is_asked_for_again(folder, monkeypatch, capsys):
    Terminal(monkeypatch, "half \udcff", "def ")
    assert run(["generate", str(folder), "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert "skipless: that is not text in UTF-8\n" in captured.err
    assert captured.out.startswith("> > def ")


def test_json_is_not_a_conversation(folder, monkeypatch, capsys):
    Terminal(monkeypatch, "def ")
    assert run(["generate", str(folder), "--json"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_in_a_real_terminal(folder):
    """As a process with a terminal of its own, in which a line and Ctrl-D are typed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "skipless", "generate", str(folder), "--max-new-tokens", "3"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**ENVIRONMENT, "TERM": "dumb"})
    os.close(theirs)
    seen = b""
    for typed, expected in ((b"", b"> "), (b"def alpha\n", b"\n> "), (b"\x04", None)):
        os.write(ours, typed)
        start = len(seen) + len(typed)
        while expected is None or expected not in seen[start:]:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other side was closed
                break
    os.close(ours)
    assert process.wait(60) == 0
    assert seen.decode().count("def alpha") >= 2  # typed, and gone on from
