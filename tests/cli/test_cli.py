"""The command line, in its own process where that matters."""

import json
import resource
import subprocess
import sys

import pytest

from skipless.cli import run
from skipless.cli.inspect import _bytes as read_size
from skipless.errors import UserError


def skipless(*arguments):
    return subprocess.run([sys.executable, "-m", "skipless", *arguments], capture_output=True, text=True)


def test_help_is_quick_and_does_not_load_torch():
    code = "import sys, skipless.cli as c; s = c.run(['--help']); assert 'torch' not in sys.modules; sys.exit(s)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout
    # 0.3 s; of the processor's time, which does not depend on what else the machine does
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_version():
    done = skipless("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "skipless")


def test_every_command_has_an_example(capsys):
    from skipless.cli import app

    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert run([name, "--help"]) == 0
        assert f"skipless {name}" in capsys.readouterr().out, name


@pytest.mark.parametrize(
    ("arguments", "block"),
    [
        ([], "sas-p"),
        (["--block", "sas:beta_ff=0.2"], "sas"),
        (["--set", "model.block=pre-ln"], "pre-ln"),
        (["--block", "sas-gains"], "sas-gains"),
    ],
)
def test_a_run_without_a_name_is_named_after_its_block(monkeypatch, arguments, block):
    import importlib

    folders = []
    module = importlib.import_module("skipless.cli.train")
    monkeypatch.setattr(module, "_train", lambda cfg, folder, *rest, **more: folders.append((folder, cfg.digest)))
    assert run(["train", *arguments]) == 0
    ((folder, digest),) = folders
    assert folder.name == f"{block}-{digest}"


def test_inspect_json(capsys):
    arguments = "inspect pre-ln sas-p -L 2 -d 32 -H 2 --set vocab_size=64 --set max_seq_len=16 --json"
    assert run(arguments.split()) == 0
    first, second = json.loads(capsys.readouterr().out)["blocks"]
    assert (first["name"], second["name"]) == ("pre-ln", "sas-p")
    assert second["total_parameters"] < first["total_parameters"]
    assert len(second["signal"]) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24G", 24 * 10**9),
        ("24Gi", 24 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("1.5M", 1_500_000),
        ("512", 512),
        ("2kB", 2000),
    ],
)
def test_sizes_of_memory(text, size):
    """As everywhere: a G is 10⁹, a Gi is 2³⁰."""
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["0", "24Q", "1i", "-1G", "nan", "1" + 400 * "0", "9" * 5000])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="takes a size such as 24G or 80Gi"):
        read_size(text)


def test_inspect_table(capsys):
    arguments = "inspect pre-ln pre-ln:alpha_sa=0 -L 40 -d 32 -H 2 --set vocab_size=64"
    assert run(arguments.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pre-ln: healthy" in out
    assert "pre-ln:alpha_sa=0: rank collapse" in out


def test_inspect_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    target = tmp_path / "signal.png"
    assert run(["inspect", "sas", "-L", "2", "-d", "16", "-H", "2", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert run(["inspect", "sas", "--plot", str(tmp_path / "signal.bmp")]) == 2
    assert ".png, .svg, .pdf" in capsys.readouterr().err
    assert run(["inspect", "sas", "--plot", str(tmp_path / "nowhere" / "signal.png")]) == 2


def test_inspect_a_configuration_file(tmp_path, capsys):
    path = tmp_path / "model.yaml"
    path.write_text("block: {mixing: shaped, zero_query: true}\nn_layer: 2\nd_model: 16\nn_head: 2\nvocab_size: 32\n")
    assert run(["inspect", "--config", str(path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["blocks"]
    assert "γC" in one["drawing"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect saz", "did you mean 'sas'"),
        ("inspect sas -H 5", "n_head 5 does not divide d_model 768; near: 3, 4, 6"),
        ("inspect sas -L -3", "n_layer"),
        ("inspect sas -L three", "--n-layer"),
        ("inspect sas --set n_layr=3", "did you mean 'n_layer'"),
        ("inspect sas --set n_layer", "expected key=value"),
        ("inspect sas --set block.value.kind=dens", "did you mean 'dense'"),
        ("inspect sas:beta_fff=1", "did you mean 'beta_ff'"),
        ("inspect sas -H 256 --set positions=rotary", "even width per head"),
        ("inspect sas --set d_model=nan", "d_model"),
        ("inspect sas --set init_std=2024-13-45", "not valid YAML"),
        ("inspect sas --seed 99999999999999999999", "--seed"),
        ("inspect sas --no-signal --plot x.png", "give one of them"),
        ("inspect sas -d 1000000 -H 1 -L 1", "--no-signal"),
        ("inspect --config nowhere.yaml", "cannot read"),
        ("inspect sas --bogus", "No such option"),
        ("inspct", "Did you mean 'inspect'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert run(arguments.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("skipless: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["inspect", "--" + "x" * 100_000], ["inspect", "--config", "x" * 100_000]])
def test_a_word_of_any_length_is_quoted_in_part(words, capsys):
    """Messages of other libraries too, which know of no bound."""
    assert run(words) == 2
    assert 0 < len(capsys.readouterr().err) < 2000


def test_bad_input_in_a_process():
    done = skipless("inspect", "nonsense")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
