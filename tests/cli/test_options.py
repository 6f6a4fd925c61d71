"""The same option means the same in every command, and the old spellings are still read."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import skipless
from skipless import BLOCKS
from skipless.cli import app, run
from skipless.cli.app import EXIT_STATUS
from skipless.cli.options import resolve
from skipless.data.sources import open_source
from skipless.errors import UserError
from skipless.runs import Run, choose_checkpoint
from skipless.training.train import train
from tests.helpers.commands import commands, options, unknown_options
from tests.helpers.tiny_runs import tiny

COMMANDS = commands()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, source, cache_dir):
    """A run with several checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    changes = {"train.save_every": 4, "train.keep_last": 3}
    train(tiny(source, changes, steps=12), folder, trackers=[], cache_dir=cache_dir)
    return folder


# ------------------------------------------------------------------------------- one option, one meaning


TWO_KINDS = {"--tasks"}
"""Tasks of GLUE, and tasks of lm-evaluation-harness."""


def test_an_option_is_the_same_wherever_it_is():
    """Its spellings, its help and whether it takes a value."""
    declared = {}
    for command in COMMANDS.values():
        for name, option in options(command).items():
            about = (tuple(option.opts), option.help, option.metavar, option.is_flag)
            declared.setdefault(name, set()).add(about)
    assert {name: found for name, found in declared.items() if len(found) > 1}.keys() == TWO_KINDS


@pytest.mark.parametrize(
    ("names", "everywhere"),
    [
        (["--device"], ["train", "generate", "evaluate", "finetune", "bench"]),
        (["--checkpoint"], ["generate", "evaluate", "finetune", "export"]),
        (["--runs"], ["train", "generate", "evaluate", "finetune", "export", "report", "reproduce", "sweep", "bench"]),
        (["--n-layer", "--d-model", "--n-head", "--seq-len", "--batch-size"], ["train", "sweep", "inspect", "bench"]),
        (["--max-new-tokens"], ["generate", "bench"]),
        (["--minutes"], ["train", "reproduce"]),
        (["--output"], ["reproduce", "sweep"]),
        (["--seq-len", "--source", "--recipe"], ["train", "data build", "data show"]),
        (["--json"], list(COMMANDS)),
    ],
)
def test_where_an_option_is(names, everywhere):
    for name in names:
        assert {command for command in COMMANDS if name in options(COMMANDS[command])} >= set(everywhere)


GONE = ["--which", "--out", "--length", "--depth", "--batch", "--new", "--budget", "--folder"]


def test_old_spellings_are_not_shown():
    assert not {name for command in COMMANDS.values() for name in options(command)} & set(GONE)
    assert "--tokens" not in options(COMMANDS["bench"])
    assert "--tokens" not in options(COMMANDS["generate"])


# ---------------------------------------------------------------------------------------- old spellings


def words_read(monkeypatch, command, line):
    """What a command is called with."""
    found = []
    monkeypatch.setattr(COMMANDS[command], "callback", lambda **given: found.append(given))
    assert COMMANDS[command].main(line, standalone_mode=False) is None
    return found[0]


@pytest.mark.parametrize(
    ("command", "line", "name", "value", "said"),
    [
        ("evaluate", ["RUN", "--which", "best"], "checkpoint", "best", "--which is now --checkpoint"),
        ("export", ["RUN", "OUT", "--which=best"], "checkpoint", "best", "--which is now --checkpoint"),
        ("evaluate", ["RUN", "--rows", "4"], "limit", 4, "--rows is now --limit"),
        ("generate", ["RUN", "--tokens", "4"], "max_new_tokens", 4, "--tokens is now --max-new-tokens"),
        ("generate", ["RUN", "--samples", "4"], "num_samples", 4, "--samples is now --num-samples"),
        ("data show", ["--rows", "4"], "num_samples", 4, "--rows is now --num-samples"),
        ("reproduce", ["fig2", "--budget", "4"], "minutes", 4, "--budget is now --minutes"),
        ("sweep", ["-o", "train.lr=1,2", "--folder", "x"], "recipe", "study", "--folder is now --output"),
        ("bench", ["--length", "4"], "seq_len", 4, "--length is now --seq-len"),
        ("bench", ["--depth=4"], "n_layer", 4, "--depth is now --n-layer"),
        ("bench", ["decode", "--batch", "4"], "batch_size", 4, "--batch is now --batch-size"),
        ("bench", ["decode", "--new", "4"], "max_new_tokens", 4, "--new is now --max-new-tokens"),
        ("train", ["--resume", "auto", "--steps", "4"], "resume", True, "--resume auto is now --resume"),
        ("train", ["--steps", "4", "--resume=auto"], "resume", True, "--resume auto is now --resume"),
    ],
)
def test_old_spellings_are_read_with_one_line(monkeypatch, capsys, command, line, name, value, said):
    assert words_read(monkeypatch, command, line)[name] == value
    captured = capsys.readouterr()
    assert captured.err == f"skipless: {said}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "line", "name", "value"),
    [
        ("train", ["--tokens", "4"], "tokens", 4),
        ("train", ["--resume"], "resume", True),
        ("train", ["--name", "auto", "--resume"], "name", "auto"),
        ("report", ["a", "--samples"], "samples", True),
        ("finetune", ["a", "--glue-dir", "b", "--rows", "4"], "rows", "4"),
        ("generate", ["a", "--prompt", "--tokens"], "prompt", "--tokens"),
        ("generate", ["a", "-p", "--samples=3"], "prompt", "--samples=3"),
        ("generate", ["--", "--tokens"], "run", "--tokens"),
    ],
)
def test_nothing_is_said_where_nothing_is_old(monkeypatch, capsys, command, line, name, value):
    assert words_read(monkeypatch, command, line)[name] == value
    assert capsys.readouterr().err == ""


def test_under_torchrun_one_process_says_it(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert words_read(monkeypatch, "train", ["--resume", "auto"])["resume"]
    assert capsys.readouterr().err == ""


def test_json_stays_json_with_an_old_spelling(folder, capsys, cache_dir):
    assert (
        run(["evaluate", str(folder), "--rows", "4", "--which", "best", "--json", "--cache-dir", str(cache_dir)]) == 0
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out)["sequences"] == 4
    assert captured.err == "skipless: --rows is now --limit\nskipless: --which is now --checkpoint\n"


SMALL = ["-L", "1", "-d", "16", "-H", "2", "--rounds", "1", "--device", "cpu", "--json"]


def test_the_old_tokens_of_bench_are_sequences(capsys, monkeypatch):
    shapes = []
    monkeypatch.setattr("skipless.tasks.bench.bench_train", lambda shape, *_, **__: shapes.append(shape) or [])
    for size in (["--tokens", "64"], ["--batch-size", "8"], []):
        assert run(["bench", "train", "--seq-len", "8", *size, *SMALL]) == 0
    assert [shape.batch for shape in shapes] == [8, 8, 128]
    assert capsys.readouterr().err == "skipless: --tokens is now --batch-size, in sequences: 8\n"


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_by_its_step(folder):
    assert [choose_checkpoint(Run(folder), n).step for n in ("4", 8, "last", "00000012")] == [4, 8, 12, 12]
    early, late = skipless.load(folder, checkpoint=4), skipless.load(folder)
    assert not torch.equal(early.embedding.weight, late.embedding.weight)


@pytest.mark.parametrize(
    "checkpoint", ["7", "first", "-4", "", "²", "٤", pytest.param("9" * 5000, id="too long for an int")]
)
def test_a_checkpoint_that_is_not_there(folder, checkpoint):
    with pytest.raises(UserError, match="run 'mine' has 4, 8, 12"):
        choose_checkpoint(Run(folder), checkpoint)


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_every_command_that_reads_a_run_reads_its_checkpoints(command, folder, tmp_path, capsys, cache_dir):
    rest = {"generate": ["--prompt", "def "], "export": [str(tmp_path / "out"), "--to", "safetensors", "--overwrite"]}
    rest["evaluate"] = ["--limit", "2", "--cache-dir", str(cache_dir)]
    where = [command, "mine", *rest[command], "--runs", str(folder.parent), "--checkpoint"]
    assert run([*where, "4"]) == 0
    assert run([*where, "7"]) == 2
    assert "there is no checkpoint of step 7; run 'mine' has 4, 8, 12" in capsys.readouterr().err


def test_what_is_one_model_has_no_checkpoint_to_choose(folder):
    with pytest.raises(UserError, match="no checkpoint 'best' to choose"):
        skipless.load(folder / "checkpoints" / "step-00000004", checkpoint="best")
    assert skipless.load(folder / "checkpoints" / "step-00000004").num_parameters() > 0


def test_the_old_keyword_of_load(folder):
    with pytest.warns(DeprecationWarning, match="`which` is now `checkpoint`"):
        old = skipless.load(folder, which="best")
    assert torch.equal(old.embedding.weight, skipless.load(folder, checkpoint="best").embedding.weight)


def test_a_run_by_its_name_below_runs(folder, capsys):
    assert run(["generate", "mine", "--prompt", "def ", "--runs", str(folder.parent), "--max-new-tokens", "2"]) == 0
    assert run(["generate", "min", "--prompt", "def ", "--runs", str(folder.parent)]) == 2
    assert "did you mean 'mine'?" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- devices


@pytest.fixture
def lines(folder, source, cache_dir, tmp_path):
    """A command line of each command that runs a model, without its device."""
    data = ["--cache-dir", str(cache_dir)]
    trained = [*data, "--runs", str(tmp_path), "--dry-run"]
    return {
        "train": ["train", "--recipe", "smoke", "--source", source, "--set", "data.valid_fraction=0.2", *trained],
        "generate": ["generate", str(folder), "--prompt", "def ", "--max-new-tokens", "2"],
        "evaluate": ["evaluate", str(folder), "--limit", "2", *data],
        "finetune": ["finetune", str(folder), "--glue-dir", "nowhere"],
        "bench": ["bench", "caches", "--seq-len", "8", "--vocab-size", "50", "-L", "1", "-d", "16", "-H", "2"],
    }


@pytest.mark.parametrize("command", ["train", "generate", "evaluate", "bench"])
def test_every_command_runs_on_a_device(command, lines, capsys):
    assert run([*lines[command], "--device", "cpu"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("device", ["meta", "gpu", "cuda:99", ""])
@pytest.mark.parametrize("command", ["train", "generate", "evaluate", "bench"])
def test_a_device_that_cannot_be_used(command, device, lines, capsys):
    assert run([*lines[command], "--device", device]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"skipless: device '.*' cannot be used: .*; try auto or cpu\n", err), err


def test_finetune_passes_its_device_and_checkpoint_on(lines, monkeypatch, folder):
    given = {}
    outcome = {"mean": None, "sd": None, "tasks": {}, "failures": {}, "data": {}}
    monkeypatch.setattr("skipless.tasks.finetune.finetune", lambda *_, **how: given.update(how) or outcome)
    assert run([*lines["finetune"], "--device", "cuda:1", "--checkpoint", "8"]) == 0
    assert (given["device"], given["checkpoint"]) == ("cuda:1", "8")


def test_the_device_of_a_training_is_its_configurations():
    assert resolve("smoke", None, None, {"train.device": "cuda:1"}, None).train.device == "cuda:1"
    assert resolve("smoke", None, None, {"train.device": None}, None).train.device == "auto"


def test_what_is_said_later_wins(tmp_path):
    """The recipe gives way to a file, the file to options, and all of them to `--set`."""
    file = tmp_path / "mine.yaml"
    file.write_text("{model: {block: pre-ln, n_layer: 3}, train: {lr: 0.25}}")
    assert resolve("smoke", file, None, {}, None).model.block == BLOCKS["pre-ln"]
    assert resolve("smoke", file, "sas", {}, None).model.block == BLOCKS["sas"]
    assert resolve("smoke", None, None, {}, None).model.block == BLOCKS["sas-p"]
    assert resolve("smoke", file, None, {"model.n_layer": 4}, None).model.n_layer == 4
    cfg = resolve("smoke", file, None, {"model.n_layer": 4, "train.lr": 0.5}, ["model.n_layer=5"])
    assert (cfg.model.n_layer, cfg.train.lr) == (5, 0.5)


@pytest.mark.parametrize("budget", ["steps", "tokens", "minutes"])
@pytest.mark.parametrize("recipe", ["smoke", "crammed-bert", "crammed-bert-laptop"])
def test_a_budget_takes_the_place_of_the_recipes(recipe, budget):
    train = resolve(recipe, None, None, {f"train.{budget}": 7}, None).train
    assert {name: getattr(train, name) for name in ("steps", "tokens", "minutes") if getattr(train, name)} == {
        budget: 7
    }


# --------------------------------------------------------------------------------------- text of one's own


def test_a_source_takes_the_recipes_held_out_text_with_it(tmp_path):
    assert resolve("codeparrot", None, None, {}, None).data.valid_source == "corpus:codeparrot-valid"
    mine = {"data.source": "files:src/**/*.py"}
    cfg = resolve("codeparrot", None, None, mine, None)
    assert (cfg.data.source, cfg.data.valid_source) == ("files:src/**/*.py", None)
    assert cfg.data.valid_fraction > 0
    assert resolve("codeparrot", None, None, mine, ["data.valid_source=files:x"]).data.valid_source == "files:x"
    file = tmp_path / "mine.yaml"
    file.write_text("data: {valid_source: 'files:y'}")
    assert resolve("codeparrot", file, None, mine, None).data.valid_source == "files:y"


@pytest.mark.parametrize("command", ["train", "data build", "data show"])
def test_commands_validate_on_the_text_that_was_given(command, source, cache_dir, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("skipless.data.corpus.open_source", lambda spec: opened.append(spec) or open_source(spec))
    small = ["--recipe", "codeparrot", "--source", source, "--set", "data.valid_fraction=0.2", "--seq-len", "16"]
    small += ["--set", "data.vocab_size=300", "--set", "data.tokenizer=bpe", "--cache-dir", str(tmp_path / "cache")]
    if command == "train":
        small += ["-L", "1", "-d", "16", "-H", "2", "--batch-size", "4", "--set", "train.micro_batch=4", "--dry-run"]
    assert run([*command.split(), *small]) == 0, capsys.readouterr().err
    assert set(opened) == {source}


# --------------------------------------------------------------------------- help, examples, exit status

EXAMPLES = [
    (name, example)
    for name, command in COMMANDS.items()
    for example in re.findall(r"^- `(.*)`$", command.help, flags=re.M)
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_examples_name_real_options_and_stand_on_one_line(name, example, capsys, monkeypatch):
    assert f"skipless {name}" in example
    assert unknown_options(example) == []
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split(), "--help"]) == 0
    assert example in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_its_help_is_not_cut(name, capsys, monkeypatch):
    assert name in {one for one, _ in EXAMPLES}
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for spelling, option in options(COMMANDS[name]).items():
        assert spelling in shown
        for word in re.sub(r"[`*]", "", option.help).split():
            assert word.replace("*", "") in shown.replace("*", ""), (spelling, word)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_flags_take_no_value_and_brackets_are_not_doubled(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown
    assert "[[" not in shown
    assert "......" not in shown.replace("]...", "...")


def test_exit_statuses_are_listed_once(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for status in re.findall(r"^- ([\d, ]+):", EXIT_STATUS, flags=re.M):
        assert f"{status}:" in shown
    assert not [name for name, command in COMMANDS.items() if "xit status" in command.help]


# -------------------------------------------------------------------------------------- what is loaded


def loaded(code, **environment):
    check = "\nimport sys\nprint('torch' in sys.modules, 'skipless' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import skipless.terminal.progress",
        "import skipless.terminal.train_view",
        "import skipless.terminal.runs",
        "from skipless.cli import run; assert run(['--help']) == 0",
        *(f"from skipless.cli import run; assert run({[*name.split(), '--help']}) == 0" for name in COMMANDS),
        "from skipless.cli import run; assert run(['train', '--recipe', 'nonsense']) == 2",
    ],
)
def test_torch_is_not_loaded(code):
    assert loaded(code) == "False True"


def test_data_is_built_and_shown_without_torch(source, tmp_path):
    how = ["--source", source, "--set", "data.vocab_size=300", "--cache-dir", str(tmp_path)]
    for name in ("build", "show"):
        code = f"from skipless.cli import run; assert run({['data', name, *how]!r}) == 0"
        assert loaded(code) == "False True"


def test_data_show_as_json(source, cache_dir, capsys):
    how = ["--source", source, "--set", "data.vocab_size=300", "--cache-dir", str(cache_dir), "--num-samples", "3"]
    assert run(["data", "show", *how, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["samples"]) == 3
    assert found["splits"]


def test_every_command_is_in_its_own_file():
    for command in app.registered_commands:
        assert command.callback.__module__ == f"skipless.cli.{command.callback.__name__}"
