"""The documents say what the code does."""

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
from tools.site.equations import find

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
SYMBOLS = sorted(set(re.findall(r"`(skipless\.[\w.]+)`", MAP)))
CODE = re.findall(r"`([^`]+)`", MAP)
SPECS = sorted({code for code in CODE if code.split(":")[0] in BLOCKS})


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_paper_map_symbols_exist(symbol):
    assert find(symbol) is not None


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


def run_python(page, text, *, on_a_model):
    """The Python of a page: what opens something that its commands have made, or all the rest."""
    made = ('"runs/', '"exported"')
    examples = [code for code in blocks_of("python", text) if on_a_model == any(name in code for name in made)]
    names = {}  # a piece may go on from the one before
    for example in examples:
        if "import pytest" not in example:
            exec(compile(example, page, "exec"), names)  # noqa: S102
    return len(examples)


TINY_RUNS = shlex.split(
    "--set model.n_layer=1 --set model.d_model=16 --set model.n_head=2 --set data.seq_len=16 --set data.vocab_size=300 "
    "--set data.max_bytes=200000 --set train.steps=3 --set train.eval_rows=4 --set train.tuning_rows=4 "
    "--set train.sample_every=0"
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

SHORTER = {
    "train.warmup=100": "train.warmup=1 --set train.save_every=1 --set train.decay=1",
    "stable@1000 --decay 250": "stable@1 --decay 1",
}
"""Steps of a training that has three here."""

RUN = {
    "README.md": 3,
    "docs/first-run.md": 8,
    "docs/add-a-part.md": 4,
    "docs/your-own.md": 6,
    "docs/decoding.md": 5,
    "docs/hugging-face.md": 4,
    "docs/encoders.md": 4,
    "docs/experiments.md": 5,
}
"""Pages whose commands are run, and how many each has at least."""

NOT_HERE = ("codeparrot", "--scale paper", "--recipe crammed-bert ", "token-time", "hf:", "--page page.html")
"""What needs a GPU, a network, hours, or is only a part of a command."""


def commands(text):
    """Every `skipless …` line of a page's commands, but for those that cannot be run here."""
    lines = [line.split("  #")[0] for block in blocks_of("sh", text) for line in block.splitlines()]
    return [line for line in lines if line.startswith("skipless ") and not any(word in line for word in NOT_HERE)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with what a reader would have in it: text, labelled rows, GLUE, two runs of the demo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_parts.py").write_text(next(code for code in blocks_of("python") if "@part" in code))
    (tmp_path / "docs" / "results").mkdir(parents=True)  # commands write beside the published runs
    (tmp_path / "docs" / "results" / "runs").symlink_to(ROOT / "docs" / "results" / "runs")
    (tmp_path / "src").mkdir()
    texts = [f"def function_{n}(x):\n    return x + {n}\n" * 40 for n in range(60)]
    for number, text in enumerate(texts):
        (tmp_path / "src" / f"{number}.py").write_text(text)
    for name in ("books", "wiki", "notes"):
        lines = "\n".join(json.dumps({"text": f"{name}\n{text}"}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    small_glue(tmp_path / "glue")
    for name in ("train", "valid", "test", "new"):
        lines = "".join(f"x + {n}\t{'even' if n % 2 == 0 else 'odd'}\n" for n in range(20))
        (tmp_path / f"{name}.tsv").write_text(f"text\tlabel\n{lines}")
    return tmp_path


def made_smaller(command):
    """The words of a command for a model that trains in a moment."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = shlex.split(command)[1:]
    small = list(SMALLER.get(words[0], ()))
    if words[0] == "evaluate" and "--tasks" in words:
        small = ["--limit", "2"]
    if words[0] == "inspect" and "--attention" in words:
        small = []
    if words[0] == "finetune" and "--glue-dir" in words and "--tasks" not in words:
        small += ["--tasks", "cola,sst2,stsb,rte"]
    if "--list" in words or "--help" in words or "--branch" in words:
        small = []
    if words[0] == "train" and "--branch" not in words:
        words = [word for at, word in enumerate(words) if "--steps" not in (word, words[at - 1])]
        small += ["--steps", "3"]
    return [*words, *small]


def test_readme_python_runs():
    with no_plugins():
        assert run_python("README.md", README, on_a_model=False) == 2


@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run(page, folder, capfd):
    """In one folder, one after another, on smaller models; then the Python of the page."""
    text, demo = (ROOT / page).read_text(encoding="utf-8"), "skipless train --name demo-{0} --block {0}"
    found = commands(text)
    assert len(found) >= RUN[page], found
    if any("demo-" in command for command in found):
        found = [demo.format("pre-ln"), demo.format("sas-p"), *found]
    with no_plugins():
        run_python(page, text, on_a_model=False)
    for command in found:
        with no_plugins():
            assert run(made_smaller(command)) == 0, (command, capfd.readouterr().err)
    pictures = [name for name in re.findall(r"--plot (\S+)", "\n".join(found)) if not (folder / name).exists()]
    assert pictures == []
    with no_plugins():
        run_python(page, text, on_a_model=True)


DOCUMENTS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notes").glob("*.md")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCUMENTS)]
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
    assert len(command_lines(README)) >= 3


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
    assert len([one for one in EXPERIMENTS.values() if not one.own]) == 19
