"""Parts of one's own from the command line: trained, killed and resumed, exported and opened again."""

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import skipless
from skipless.cli import run as command
from skipless.config.model import ModelConfig
from skipless.config.plugins import load_plugin
from skipless.errors import UserError
from skipless.interop.export import export_model, export_run
from skipless.interop.hf.bundle import remote_code
from skipless.interop.onnx_options import OnnxOptions
from skipless.runs import Run
from skipless.training.train import train
from tests.helpers.plugins import EVERY_PART, EXAMPLE_BLOCKS, EXAMPLES, example, no_plugins
from tests.helpers.tiny_runs import CAUSAL, assert_same_run, newest_step, tiny, write_config

PLUGINS = [word for name in EXAMPLE_BLOCKS for word in ("--plugin", example(name))]


@pytest.fixture(autouse=True)
def _no_plugins():
    with no_plugins():
        yield


@pytest.fixture(scope="module")
def options(source, cache_dir):
    settings = {**CAUSAL, "data.source": source}
    words = [
        word for key, value in settings.items() for word in ("--set", f"{key}={'null' if value is None else value}")
    ]
    return [*words, "--cache-dir", str(cache_dir), "--track", "none"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, options):
    """A run with a part of each example."""
    runs = tmp_path_factory.mktemp("plugins") / "runs"
    with no_plugins():
        words = ["train", "--recipe", "smoke", "--block", EVERY_PART, "--name", "mine", "--runs", str(runs)]
        assert command([*words, *PLUGINS, *options]) == 0
    return Run(runs / "mine")


@pytest.fixture
def refused(capsys):
    def check(*words):
        assert command(list(words)) == 2
        said = capsys.readouterr().err
        assert said.startswith("skipless: ")
        assert said.count("\n") == 1
        return said

    return check


# --------------------------------------------------------------------------- train and resume


def test_a_run_names_its_plugins(trained):
    found = trained.info()["plugins"]
    assert {one["name"]: one["parts"] for one in found} == {
        "dynamic_tanh": ["norm 'dyt'"],
        "contrast_mixing": ["mixing 'contrast'"],
        "bilinear_mlp": ["mlp 'bilinear'"],
    }
    assert all(Path(one["file"]).is_file() and len(one["sha256"]) == 64 for one in found)
    assert trained.info()["config"]["model"]["block"]["norm"] == {"name": "dyt", "alpha": 0.5}


def test_a_run_without_plugins_names_none(tmp_path, source, cache_dir):
    run = train(tiny(source, steps=1), tmp_path / "plain", trackers=[], cache_dir=cache_dir)
    assert "plugins" not in run.info()


def test_a_run_that_needs_a_plugin_says_so(trained, refused):
    for words in (
        ["generate", str(trained.folder), "--prompt", "def "],
        ["evaluate", str(trained.folder)],
        ["export", str(trained.folder), "nowhere"],
        ["report", str(trained.folder)],
    ):
        said = refused(*words)
        assert "'dyt' is not one of rmsnorm" in said
        assert "it was made with the plugin 'dynamic_tanh' and 'contrast_mixing' and 'bilinear_mlp'" in said
        assert f"--plugin {example('dynamic_tanh')}" in said


def test_with_the_plugin_every_command_opens_it(trained, capsys, tmp_path):
    for words in (
        ["generate", str(trained.folder), "--prompt", "def ", "--max-new-tokens", "4"],
        ["evaluate", str(trained.folder), "--json"],
        ["report", str(trained.folder), "--page", str(tmp_path / "page.html")],
        ["inspect", EVERY_PART, "-L", "2", "-d", "16", "-H", "2"],
    ):
        assert command([*words, *PLUGINS]) == 0, capsys.readouterr().err
    assert "DyT" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "block"), EXAMPLE_BLOCKS.items())
def test_killed_and_resumed_it_is_the_same_run(tmp_path, source, cache_dir, fork_server, name, block):
    load_plugin(example(name))
    cfg = tiny(source, {"model.block": skipless.BLOCKS[block].model_dump()}, steps=40, save_every=3)
    train(cfg, tmp_path / "whole" / "run", trackers=[], cache_dir=cache_dir)
    words = ["train", "--config", str(write_config(tmp_path / "run.json", cfg)), "--name", "run", "--resume"]
    words += ["--runs", str(tmp_path / "killed"), "--cache-dir", str(cache_dir), "--track", "none"]
    words += ["--plugin", example(name)]
    folder = tmp_path / "killed" / "run"
    child = fork_server.start(words)
    child.wait_until(lambda: newest_step(folder) >= 0)
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert newest_step(folder) >= 0
    assert command(words) == 0
    assert_same_run(tmp_path / "killed" / "run", tmp_path / "whole" / "run")


def test_an_optimiser_and_a_schedule_of_ones_own(tmp_path, source, cache_dir, options):
    file = tmp_path / "training_parts.py"
    file.write_text(
        """
import torch
from skipless.parts import Field, Settings, part

class LionSettings(Settings):
    momentum: float = Field(0.9, ge=0, lt=1)

@part("optimizer", "signed", LionSettings)
def signed(groups, cfg, settings):
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=settings.momentum)

@part("schedule", "square")
def square(left, cfg):
    return left ** 2
"""
    )
    words = ["train", "-r", "smoke", "--plugin", str(file), "--set", "train.optimizer={name: signed, momentum: 0.5}"]
    words += ["--set", "train.schedule=square", "--name", "run", "--runs", str(tmp_path), *options]
    assert command(words) == 0
    run = Run(tmp_path / "run")
    rates = {record["step"]: record["lr"] for record in run.metrics() if "lr" in record}
    assert rates[9] < rates[6] < rates[3]
    assert [one["parts"] for one in run.info()["plugins"]] == [["optimizer 'signed'", "schedule 'square'"]]


# -------------------------------------------------------------------------------- exports


def test_exported_and_opened_again(trained, tmp_path):
    for name in EXAMPLE_BLOCKS:
        load_plugin(example(name))
    model = skipless.load(trained.folder)
    ids = torch.randint(model.config.vocab_size, (2, 9))
    wanted = model(ids).detach()
    for to in ("safetensors", "hf"):
        export_run(trained.folder, to, tmp_path / to)
        torch.testing.assert_close(skipless.load(tmp_path / to)(ids), wanted)
    content = json.loads((tmp_path / "safetensors" / "config.json").read_text())
    assert [one["name"] for one in content["plugins"]] == list(EXAMPLE_BLOCKS)
    assert str(EXAMPLES) not in json.dumps(content)
    with (
        no_plugins(),
        pytest.raises(UserError, match=r"made with the plugin 'dynamic_tanh'.*give --plugin dynamic_tanh"),
    ):
        skipless.load(tmp_path / "safetensors")


def test_the_source_travels_with_an_export(trained, tmp_path):
    """Opened by `transformers` in a process that has neither this package nor the plugin."""
    for name in EXAMPLE_BLOCKS:
        load_plugin(example(name))
    folder = export_run(trained.folder, "hf", tmp_path / "hf")
    assert {f"plugin_{name}.py" for name in EXAMPLE_BLOCKS} <= {path.name for path in folder.iterdir()}
    script = (
        "import sys; sys.modules['skipless'] = None\n"
        "import json, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "ids = torch.arange(9)[None]\n"
        "out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)\n"
        "print(json.dumps({'logits': model(ids).logits.tolist(), 'ids': out.tolist()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin", "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = skipless.load(trained.folder)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(torch.tensor(found["logits"]), model(ids), rtol=1e-4, atol=1e-5)
    for _ in range(5):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert found["ids"] == ids.tolist()


def test_a_source_that_cannot_travel_is_said(tmp_path, source, cache_dir):
    file = tmp_path / "stays_here.py"
    file.write_text("import skipless.parts as api\napi.part('activation', 'stays')(lambda x: x * x)\n")
    load_plugin(str(file))
    cfg = tiny(source, {"model.block.activation": "stays"}, steps=1)
    train(cfg, tmp_path / "run", trackers=[], cache_dir=cache_dir)
    with pytest.warns(UserWarning, match=r"plugin 'stays_here' .* does not go with the export .*`import skipless`"):
        export_run(tmp_path / "run", "hf", tmp_path / "out")


@pytest.mark.parametrize(
    "first",
    [b"\xef\xbb\xbfHELLO = 'Gr\xc3\xbc\xc3\x9fe'\n", b"# coding: latin-1\nHELLO = 'Gr\xfc\xdfe'\n"],
    ids=["with a mark", "latin-1"],
)
def test_a_source_in_another_encoding_travels_as_utf_8(first, tmp_path, capsys):
    assert command(["new-part", "mine", "--output", str(tmp_path)]) == 0
    file = tmp_path / "mine.py"
    file.write_bytes(first + file.read_bytes())
    load_plugin(str(file))
    sources = remote_code(ModelConfig(block="pre-ln-mine"))
    texts = [
        node.value for node in ast.walk(ast.parse(sources["plugin_mine.py"].encode())) if isinstance(node, ast.Constant)
    ]
    assert "Grüße" in texts


def test_a_graph_is_traced_with_parts_of_ones_own(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    for name in EXAMPLE_BLOCKS:
        load_plugin(example(name))
    folder = export_run(trained.folder, "onnx", tmp_path / "onnx", onnx=OnnxOptions(cache="none"))
    model = skipless.load(trained.folder)
    ids = torch.randint(model.config.vocab_size, (2, 7))
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    given = {
        one.name: ids.numpy() if "id" in one.name else torch.ones_like(ids).numpy() for one in session.get_inputs()
    }
    (logits,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(logits), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EXAMPLE_BLOCKS)
def test_a_graph_with_a_cache_refuses_parts_that_it_does_not_know(name, tmp_path):
    load_plugin(example(name))
    size = {"n_layer": 1, "d_model": 16, "n_head": 2, "vocab_size": 20, "max_seq_len": 8}
    for block in (EXAMPLE_BLOCKS[name], EXAMPLE_BLOCKS[name] + ":layout=parallel,alpha_comb=1,alpha_sa=0,alpha_ff=0"):
        model = skipless.CausalLM(skipless.ModelConfig(block=block, **size))
        with pytest.raises(UserError, match=r"cannot be written into a graph with a cache: use --cache none"):
            export_model(model, "onnx", tmp_path / "out")
        assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- bad input


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text("from skipless.parts import *\n" + text)
    return str(path)


def test_bad_plugins_are_said_in_a_line(refused, tmp_path):
    one = write(tmp_path / "one.py", "part('norm', 'mine')(RMSNorm)")
    two = write(tmp_path / "two.py", "part('norm', 'mine')(RMSNorm)")
    again = write(tmp_path / "other" / "one.py", "part('norm', 'yours')(RMSNorm)")
    inspect = ["inspect", "pre-ln"]
    assert "there is no plugin 'not_there': neither a module" in refused(*inspect, "--plugin", "not_there")
    assert "there is no plugin 'not/there.py': no such file" in refused(*inspect, "--plugin", "not/there.py")
    said = refused(*inspect, "--plugin", write(tmp_path / "raises.py", "\n1 / 0"))
    assert "cannot be loaded: ZeroDivisionError: division by zero (raises.py, line 3)" in said
    said = refused(*inspect, "--plugin", write(tmp_path / "syntax.py", "def ("))
    assert "cannot be loaded: SyntaxError" in said
    assert "(syntax.py, line 2)" in said
    assert "cannot be loaded: SystemExit: 3" in refused(
        *inspect, "--plugin", write(tmp_path / "ends.py", "raise SystemExit(3)")
    )
    said = refused(*inspect, "--plugin", one, "--plugin", two)
    assert f"norm 'mine' is brought by two plugins, 'one' ({one}) and 'two' ({two})" in said
    assert f"two plugins are called 'one': {one} and {again}" in refused(*inspect, "--plugin", one, "--plugin", again)
    said = refused(*inspect, "--plugin", write(tmp_path / "ours.py", "part('norm', 'layernorm')(RMSNorm)"))
    assert "norm 'layernorm' is a name of skipless's own" in said
    said = refused(*inspect, "--plugin", write(tmp_path / "preset.py", "block('pre-ln', BLOCKS['sas'])"))
    assert "block 'pre-ln' is a name of skipless's own" in said
    said = refused(*inspect, "--plugin", write(tmp_path / "kind.py", "part('nrom', 'x')(RMSNorm)"))
    assert "unknown kind of part 'nrom'; known: norm, mixing" in said
    assert "did you mean 'norm'" in said
    assert "a name has letters" in refused(
        *inspect, "--plugin", write(tmp_path / "name.py", "part('norm', 'a b')(RMSNorm)")
    )
    said = refused(*inspect, "--plugin", write(tmp_path / "json.py", ""))
    assert "has the name of a module that is there already, 'json'" in said


def test_a_plugin_that_fails_half_way_leaves_nothing(refused, tmp_path):
    file = write(tmp_path / "half.py", "part('norm', 'half')(RMSNorm)\nblock('halfway', BLOCKS['sas'])\n1 / 0")
    refused("inspect", "pre-ln", "--plugin", file)
    assert "'half' is not one of" in refused("inspect", "pre-ln:norm=half")
    assert "unknown block 'halfway'" in refused("inspect", "halfway")
    assert (
        command(["inspect", "pre-ln", "sas-p:norm=layernorm", "-L", "1", "-d", "16", "-H", "2"]) == 0
    )  # ours are there


def test_a_wrong_shape_is_said_in_a_line(refused, tmp_path, options):
    file = write(tmp_path / "short.py", "part('activation', 'short')(lambda x: x[..., 1:])")
    words = ["train", "-r", "smoke", "--block", "pre-ln:activation=short", "--plugin", file, "--runs", str(tmp_path)]
    said = refused(*words, *options)
    assert "activation 'short' must give (2, 3, 128) for an input of (2, 3, 128), got (2, 3, 127)" in said
