"""Without the optional packages: everything else works, and each that is missing is named with its command."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from skipless.interop.export import NEEDS
from skipless.training.trackers import TRACKERS

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

OPTIONAL = [
    "transformers", "accelerate", "peft", "datasets", "onnx", "onnxscript", "onnxruntime", "lm_eval",
    "matplotlib", "wandb", "trackio", "fastapi", "uvicorn",
]  # fmt: skip

SCRIPT = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from pathlib import Path
import torch
import skipless
from skipless.cli import run

for module in pkgutil.walk_packages(skipless.__path__, "skipless."):
    if not module.name.startswith(("skipless.interop.hf.", "skipless.__main__")):
        importlib.import_module(module.name)
import skipless.interop.hf

cfg = skipless.ModelConfig(block="sas-p", n_layer=1, d_model=16, n_head=2, vocab_size=300, max_seq_len=32)
model = skipless.CausalLM(cfg)
model.loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()

from skipless.data.tokenizer import train
from skipless.interop.export import export_model
model.tokenizer = train("bpe", lambda: iter(["def f(x): return x"] * 9), vocab_size=280)
out = export_model(model, "safetensors", Path(sys.argv[2]) / "out")
assert run(["generate", str(out), "--prompt", "def ", "--max-new-tokens", "2", "--json"]) == 0
messages = {}
for name, call in {
    "hf": lambda: skipless.interop.hf.SkiplessForCausalLM,
    "export hf": lambda: export_model(model, "hf", "never"),
    "export onnx": lambda: export_model(model, "onnx", "never"),
}.items():
    try:
        call()
    except skipless.UserError as error:
        messages[name] = str(error)
print(json.dumps(messages))
assert run(["evaluate", str(out), "--tasks", "python_next_line"]) == 2
assert not Path("never").exists()
"""


def named_extras():
    """The extras that the package's messages name."""
    for path in (Path(__file__).parent.parent / "skipless").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("MissingExtra", "optional"):
                extra = call.args[1]
                if isinstance(extra, ast.Constant):
                    yield extra.value
    yield from (name for name, packages in NEEDS.items() if packages)
    yield from (name for name in TRACKERS if not any(line.startswith(name) for line in PROJECT["dependencies"]))


def test_every_extra_that_is_named_exists():
    named = set(named_extras())
    assert len(named) >= 7
    assert named - set(PROJECT["optional-dependencies"]) == set()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What a process says that has none of them."""
    folder = tmp_path_factory.mktemp("bare")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(OPTIONAL), str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("what", "package", "extra"),
    [("hf", "transformers", "hf"), ("export hf", "transformers", "hf"), ("export onnx", "onnx", "onnx")],
)
def test_a_missing_package_is_named_with_its_command(bare, what, package, extra):
    message = bare[0][what]
    assert message.count("\n") == 0
    assert f"needs {package}, which is not installed: pip install 'skipless[{extra}]'" in message


def test_a_missing_package_is_one_line_on_the_command_line(bare):
    lines = [line for line in bare[1].splitlines() if line.startswith("skipless: ")]
    assert len(lines) == 1
    assert "needs lm_eval, which is not installed: pip install 'skipless[eval]'" in lines[0]
    assert "Traceback" not in bare[1]


def test_the_auto_classes_know_the_models_after_one_import_and_importing_skipless_changes_nothing():
    """Neither torch nor transformers is imported by it, and Python's own way to find modules stays as it was."""
    code = (
        "import sys\nfinders = list(sys.meta_path)\nimport skipless\n"
        "assert sys.meta_path == finders\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "from skipless import hf\n"
        "from transformers import PreTrainedModel, Trainer, AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('skipless', n_layer=1, d_model=8, n_head=2, vocab_size=9)\n"
        "print(type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "SkiplessForCausalLM", done.stderr


def test_registering_twice_is_registering_once():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from skipless.interop.hf.auto import register

    CONFIG_MAPPING._extra_content.pop("skipless", None)
    assert "skipless" not in CONFIG_MAPPING
    register()
    register()
    assert CONFIG_MAPPING["skipless"].__name__ == "SkiplessConfig"
