"""From the first import on, Ctrl-C is a line; and what is to be typed next can be."""

import resource
import shlex
import subprocess
import sys

import pytest

from skipless import __main__, cli
from tests.helpers.tiny_runs import tiny, write_config


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, *_):
            if name == "skipless.cli":
                raise KeyboardInterrupt

    for name in [name for name in sys.modules if name == "skipless.cli" or name.startswith("skipless.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "skipless: stopped before anything began; nothing was lost\n"


def test_the_next_command_can_be_pasted(tmp_path, source, cache_dir, capsys):
    runs, prompt = tmp_path / "my runs; echo", "it's $HOME"
    cfg = tiny(source, steps=1, eval_every=0, sample_prompt=prompt)
    file = write_config(tmp_path / "config.yaml", cfg)
    where = ["--runs", str(runs), "--cache-dir", str(cache_dir), "--track", "none"]
    assert cli.run(["train", "--config", str(file), "--name", "a b", *where]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words == ["skipless", "generate", str(runs / "a b"), "--prompt", prompt]


def test_too_little_memory_is_a_line(tmp_path):
    """Libraries below ours would end the process with a status and words of their own."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))

    command = [sys.executable, "-m", "skipless", "inspect", "sas-p"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "skipless: out of memory (`ulimit -v` allows 900 MiB, and 1024 are needed)\n"
