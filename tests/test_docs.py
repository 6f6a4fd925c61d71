"""The documents say what the code does."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import zstandard

from skipless import BLOCKS, CausalLM, ModelConfig
from skipless.cli import run
from skipless.config.block import parse_block
from skipless.experiments.catalogue import EXPERIMENTS
from skipless.recipes import recipe
from tests.helpers.commands import unknown_options
from tests.helpers.glue_files import small_glue
from tests.helpers.plugins import no_plugins

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


def run_python(*, on_a_model):
    """The Python of the README: what opens something that its commands have made, or all the rest."""
    examples = [code for code in blocks_of("python") if on_a_model == ('"runs/' in code or '"exported"' in code)]
    assert len(examples) >= 2
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})  # noqa: S102


def test_readme_python_runs():
    run_python(on_a_model=False)


def test_python_of_your_own_runs():
    text = (ROOT / "docs" / "your-own.md").read_text(encoding="utf-8")
    (example,) = [code for code in blocks_of("python", text) if '"runs/' not in code]
    exec(compile(example, "your-own.md", "exec"), {})  # noqa: S102


TINY_RUNS = shlex.split(
    "--set model.n_layer=1 --set model.d_model=16 --set model.n_head=2 --set data.seq_len=16 --set data.vocab_size=300 "
    "--set data.max_bytes=200000 --set train.steps=3 --set train.eval_rows=4 --set train.sample_every=0"
)
SMALLER = {
    "inspect": ["--set", "vocab_size=256", "-d", "64", "-H", "4", "--set", "max_seq_len=32"],
    "train": shlex.split(
        "-L 1 -d 16 -H 2 --seq-len 16 --set data.vocab_size=300 --set data.max_bytes=200000 "
        "--set train.eval_rows=4 --track none"
    ),
    "evaluate": ["--limit", "4"],
    "generate": ["--max-new-tokens", "3"],
    "sweep": TINY_RUNS,
    "reproduce": [*TINY_RUNS, "--minutes", "0"],  # plans, trains nothing, judges
    "finetune": ["--seeds", "1", "--set", "epochs=1"],
    "compare": [*TINY_RUNS, "--minutes", "0", "--rounds", "1"],
}


def commands():
    """Every `skipless …` line of the README, but for the one that needs a GPU and a network."""
    lines = [line.split("  #")[0] for block in blocks_of("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("skipless ") and "codeparrot" not in line]


def test_readme_commands_run(tmp_path, monkeypatch, capfd):
    """In an empty folder, one after another, on smaller models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "src").mkdir()
    texts = [f"def function_{n}(x):\n    return x + {n}\n" * 40 for n in range(60)]
    for number, text in enumerate(texts):
        (tmp_path / "src" / f"{number}.py").write_text(text)
    for name in ("books", "wiki"):
        lines = "\n".join(json.dumps({"text": f"{name}\n{text}"}) for text in texts)
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    small_glue(tmp_path / "glue")
    for name in ("train", "valid"):
        lines = "".join(f"x + {n}\t{'even' if n % 2 == 0 else 'odd'}\n" for n in range(20))
        (tmp_path / f"{name}.tsv").write_text(f"text\tlabel\n{lines}")
    found = commands()
    assert {command.split()[1] for command in found} >= {
        *("inspect", "train", "report", "evaluate", "generate", "sweep", "reproduce", "finetune", "predict")
    }
    for command in found:
        words = shlex.split(command.replace("--minutes 30", "--minutes 0.005"))[1:]
        small = list(SMALLER.get(words[0], ()))
        if words[0] == "evaluate" and "--tasks" in words:
            small = ["--limit", "2"]
        if "--list" in words:
            small = []
        small += ["--steps", "3"] if words[0] == "train" and "--minutes" not in words else []
        with no_plugins():
            assert run([*words, *small]) == 0, (command, capfd.readouterr().err)
    assert (tmp_path / "signal.png").exists()
    assert (tmp_path / "inside.png").exists()
    assert (tmp_path / "losses.png").exists()
    run_python(on_a_model=True)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^[ \t]*((?:torchrun .*|\$ )?(?:-m )?skipless (?:\\\n|[^`\n])*)|`([^`\n]*\bskipless [^`]*)`", re.M
)


def command_lines(text):
    """Every `skipless …`, in a block of commands or in a sentence, with its continued lines."""
    lines = ["".join(found).replace("\\\n", " ").replace("…", "") for found in COMMAND.findall(text)]
    return [line[line.index("skipless ") :] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_name_options_that_are_there(page):
    text = page.read_text(encoding="utf-8")
    checked = {line: unknown_options(line) for line in command_lines(text)}
    assert {line: wrong for line, wrong in checked.items() if wrong} == {}


def test_old_options_in_a_document_are_found():
    lines = command_lines("a `skipless evaluate x --which best` b\n\n```sh\nskipless train \\\n  --budget 3\n```\n")
    assert [unknown_options(line) for line in lines] == [["--which"], ["--budget"]]
    assert len(command_lines(README)) > 15


def test_codeparrot_is_the_papers():
    cfg = recipe("codeparrot", "sas")
    assert (cfg.model.n_layer, cfg.model.d_model, cfg.model.n_head, cfg.model.ff_width) == (18, 768, 12, 3072)
    assert (cfg.train.batch_size, cfg.train.micro_batch, cfg.train.steps, cfg.train.lr) == (128, 32, 43_000, 1e-3)
    assert (cfg.train.betas, cfg.train.eps, cfg.train.weight_decay, cfg.train.clip) == ((0.9, 0.999), 1e-8, 0.1, 1.0)
    assert (cfg.train.schedule, cfg.train.warmup_share, cfg.model.dropout) == ("linear", 0.05, 0.0)
    assert recipe("codeparrot-long", "sas").train.steps == 120_000
    assert recipe("codeparrot", "v-skipinit").train.lr == 3e-4


def test_every_experiment_is_documented():
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|.*`skipless reproduce ([\w-]+)", text, flags=re.M) == [
        (i, i) for i in EXPERIMENTS
    ]
    assert "nineteen experiments" in README
    assert len([one for one in EXPERIMENTS.values() if not one.own]) == 19
