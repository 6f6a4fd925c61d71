"""Runs and exports that are not what they say: every command that opens one says so in a line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import skipless
from skipless import cli
from skipless.errors import UserError
from skipless.interop.export import export_run
from skipless.runs import Run
from skipless.storage.checkpoints import Checkpoints
from skipless.training.train import train
from tests.helpers.tiny_runs import tiny

DEEP = '{"a":' * 100_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory, source, cache_dir):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(source, steps=2, eval_every=0), folder, trackers=[], cache_dir=cache_dir)
    return folder


@pytest.fixture
def run(tmp_path, trained):
    """The folder of a run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def export(tmp_path, trained):
    """An export of it, to be damaged."""
    return export_run(trained, "safetensors", tmp_path / "export")


def change_config(folder: Path, **changes) -> None:
    """Of a run, whose model's configuration lies deeper, or of an export."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    (content["config"]["model"] if "config" in content else content).update(changes)
    path.write_text(json.dumps(content))


def change_weights(folder: Path, change) -> None:
    """Change the named tensors of an export, or of a checkpoint, which is then as valid as any."""
    if (folder / "model.safetensors").exists():
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    checkpoint, _ = Run(folder).checkpoints().latest_valid()
    tensors = {stem: checkpoint.tensors(stem) for stem in checkpoint.stems}
    change(tensors["model"])
    Checkpoints(folder / "checkpoints").save(checkpoint.step, tensors, checkpoint.state)


def put_nan(tensors: dict) -> None:
    tensors["embedding.weight"][3, 4] = float("nan")


def drop_a_layer(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("blocks.1.")]:
        del tensors[name]


def add_words(folder: Path) -> None:
    """A tokeniser that knows more words than the model."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    word = {"id": 5000, "content": "word", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append({**word, "normalized": False, "special": False})
    content["model"]["vocab"]["word"] = 5000
    path.write_text(json.dumps(content))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "wider": (lambda f: change_config(f, d_model=64, d_ff=None), "is 32 × 32, and by the configuration 64 × 64"),
    "absurdly wide": (lambda f: change_config(f, d_model=1_000_000, n_head=2), "1000000 × 1000000"),
    "wider than a number": (lambda f: change_config(f, d_model=2**62, n_head=2), "d_model"),
    "absurdly deep": (lambda f: change_config(f, n_layer=10_000), "2 layers"),
    "absurd vocabulary": (lambda f: change_config(f, vocab_size=10**7), "embedding.weight is"),
    "another block": (lambda f: change_config(f, d_ff=96), "mlp"),
    "nan": (lambda f: change_weights(f, put_nan), "embedding.weight is not finite"),
    "a layer is missing": (lambda f: change_weights(f, drop_a_layer), "1 layers"),
    "ids beyond the embedding": (add_words, "ids up to 5000"),
    "wrong type": (lambda f: change_config(f, d_model="wide"), "d_model"),
    "wrong types": (lambda f: change_config(f, d_model=[], block=3, n_layer=None), "config.json"),
    "nested": (lambda f: (f / "config.json").write_text(DEEP), "not JSON"),
    "tokenizer nested": (lambda f: (f / "tokenizer.json").write_text(DEEP), "tokenizer.json"),
    "config is a pipe": (lambda f: as_pipe(f / "config.json"), "not a file"),
    "tokenizer is a pipe": (lambda f: as_pipe(f / "tokenizer.json"), "not a file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["run", "export"])
def test_it_cannot_be_opened(request, damage, kind):
    folder = request.getfixturevalue(kind)
    spoil, said = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(skipless.UserError) as caught:
        skipless.load(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize("names", [5, [], ["a", "b"], [3], {"a": 1}, [["SkiplessForCausalLM"]]])
def test_an_export_of_odd_architectures(export, names):
    change_config(export, architectures=names)
    with pytest.raises(skipless.UserError, match="known: SkiplessForCausalLM"):
        skipless.load(export)


@pytest.mark.parametrize("make", [as_pipe, lambda path: (path.unlink(), path.mkdir())])
def test_weights_that_are_no_file(export, make):
    make(export / "model.safetensors")
    with pytest.raises(skipless.UserError, match=r"model\.safetensors' is not a file"):
        skipless.load(export)


def test_a_pipe_in_a_checkpoint(run):
    as_pipe(run / "checkpoints" / "step-00000002" / "model.safetensors")
    with pytest.raises(skipless.UserError, match=r"model\.safetensors does not belong"):
        skipless.load(run)


COMMANDS = {
    "generate": lambda folder, out: ["generate", folder, "--prompt", "def", "--max-new-tokens", "2"],
    "evaluate": lambda folder, out: ["evaluate", folder],
    "export": lambda folder, out: ["export", folder, out, "--to", "safetensors"],
}


@pytest.mark.parametrize("damage", ["absurdly wide", "nan", "ids beyond the embedding", "nested"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so_in_a_line(tmp_path, run, capsys, command, damage):
    spoil, said = DAMAGES[damage]
    spoil(run)
    assert cli.run(COMMANDS[command](str(run), str(tmp_path / "out"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipless: ")
    assert said in line
    assert not (tmp_path / "out").exists()


def test_what_is_whole_opens(run, export):
    one, other = skipless.load(run), skipless.load(export)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    "change",
    [
        {"command": 5},
        {"command": [5]},
        {"versions": []},
        {"machine": "x"},
        {"data": "x"},
        {"data": {"fingerprint": []}},
        {"data": {"train_tokens": None}},
        {"plugins": [5]},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["report --page page.html", "export out --to safetensors"])
def test_what_a_run_says_beside_its_configuration(tmp_path, run, capsys, monkeypatch, command, change):
    monkeypatch.chdir(tmp_path)
    info = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**info, **change}))
    name, *more = command.split()
    assert cli.run([name, str(run), *more]) == 2
    said = capsys.readouterr().err
    assert f"config.json': {next(iter(change))}" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("onnx", [{}, {"cache": "kz"}, {"cache": ["kv"]}, {"cache": None}], ids=str)
def test_a_graph_that_does_not_say_what_it_remembers(tmp_path, trained, onnx):
    folder = export_run(trained, "onnx", tmp_path / "graph")
    change_config(folder, onnx=onnx)
    with pytest.raises(UserError, match="does not say what the graph remembers"):
        skipless.load(folder)
