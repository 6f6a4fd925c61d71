"""The documents say what the code does."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from skipless import BLOCKS, CausalLM, ModelConfig
from skipless.cli import run
from skipless.config import parse_block

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
SYMBOLS = sorted(set(re.findall(r"`(skipless\.[\w.]+)`", MAP)))
CODE = re.findall(r"`([^`]+)`", MAP)
SPECS = sorted({code for code in CODE if code.split(":")[0] in BLOCKS})


def resolve(symbol):
    """The object behind a dotted name."""
    parts = symbol.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(symbol)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_paper_map_symbols_exist(symbol):
    assert resolve(symbol) is not None


def test_paper_map_is_not_empty():
    assert len(SYMBOLS) > 12
    assert set(BLOCKS) <= set(SPECS)
    assert len(SPECS) > 20
    for equation in (1, 2, 3, 4, 5, 6, 7):
        assert f"eq. {equation}," in MAP


@pytest.mark.parametrize("spec", SPECS)
def test_paper_map_blocks_can_be_built(spec):
    block = parse_block(spec)
    assert (block == BLOCKS[spec.split(":")[0]]) == (":" not in spec)
    CausalLM(ModelConfig(block=block, n_layer=2, d_model=8, n_head=2, vocab_size=8))


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks_of(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def test_readme_python_runs():
    examples = blocks_of("python")
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})  # noqa: S102


def test_readme_commands_run(tmp_path, monkeypatch, capsys):
    """Every `skipless …` line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks_of("sh") for line in block.splitlines() if line.startswith("skipless inspect")]
    assert commands
    for command in commands:
        smaller = ["--set", "vocab_size=256", "-d", "64", "-H", "4", "--set", "max_seq_len=32"]
        assert run([*shlex.split(command)[1:], *smaller]) == 0, capsys.readouterr().err
    assert (tmp_path / "signal.png").exists()
