"""Exports: opened in other processes, with and without this package; never half written."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import skipless
from skipless.cli import run as skipless_command
from skipless.config.block import parse_block
from skipless.data.labelled import encode
from skipless.data.tokenizer import train
from skipless.errors import UserError
from skipless.interop.export import export_model, export_run
from skipless.interop.hf import SkiplessConfig, SkiplessForCausalLM, wrap
from skipless.interop.hf.bundle import AUTO_MAP, remote_code
from skipless.interop.onnx import onnx_error, onnx_inputs
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.nn.sampling import Sampling, sample_text
from tests.helpers.weights import disturbed

WHOLE = OnnxOptions(cache="none")
SIZE = {"n_layer": 1, "d_model": 16, "n_head": 2, "vocab_size": 30, "max_seq_len": 24}


def small(kind=CausalLM, *more, **changes):
    return disturbed(kind(skipless.ModelConfig(**{**SIZE, **changes}), *more), 0.2).eval()


# ------------------------------------------------------------------------- in another process


@pytest.mark.parametrize("how", ["registered", "remote"])
def test_opened_in_a_new_process(how, exported, run_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = Path(__file__).parents[1] / "helpers" / "open_export.py"
    done = subprocess.run([sys.executable, script, exported, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected_home = "skipless.interop.hf.modeling" if how == "registered" else "transformers_modules"
    assert found["module"].startswith(expected_home)
    assert found["card"].count("'generated_text': ") == 2

    model = skipless.load(run_folder)
    prompts = ["def alpha(", "def gamma_sum(beta, delta):\n    return"]
    mask = torch.tensor(found["mask"]).bool()
    assert [torch.tensor(row)[real].tolist() for row, real in zip(found["ids"], mask, strict=True)] == [
        model.tokenizer.encode(prompt) for prompt in prompts
    ]
    assert not mask[0, 0]  # padding is on the left
    with torch.no_grad():
        logits = model(torch.tensor(found["ids"]), mask)
    torch.testing.assert_close(torch.tensor(found["logits"])[mask], logits[mask], rtol=1e-5, atol=1e-5)

    texts = found["texts"]
    for way in ("greedy", "beams", "sampling"):
        assert texts[f"{way}-dynamic"] == texts[f"{way}-none"]
        assert texts[f"{way}-static"] == texts[f"{way}-none"]
    assert len({json.dumps(texts[f"{way}-none"]) for way in ("greedy", "sampling")}) == 2
    greedy = model.tokenizer.decode(texts["greedy-none"][0])
    assert sample_text(model, prompts[0], 12, Sampling(temperature=0)) == prompts[0] + greedy
    assert "".join(found["streamed"]).strip() == greedy.strip()
    assert len(found["streamed"]) > 3


def test_remote_code_names_what_it_needs(exported):
    """Before it runs a file, transformers looks for what it imports, and names what is missing."""
    for file in ("modeling_skipless.py", "configuration_skipless.py"):
        assert set(get_imports(exported / file)) >= {"pydantic", "torch", "transformers", "yaml"}


def test_remote_code_is_whole(exported):
    """Every file that a file imports is there, and found by transformers, which looks for one form of import only."""
    bundle = remote_code()
    for name, source in bundle.items():
        assert (exported / name).read_text() == source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level:
                needed = [node.module] if node.module else [alias.name for alias in node.names]
                assert all(f"{module}.py" in bundle for module in needed), (name, needed)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(name.split(".")[0] == "skipless" for name in names)
    for reference in AUTO_MAP.values():
        file, class_name = reference.split(".")
        assert f"class {class_name}(" in bundle[f"{file}.py"]
    found = {Path(path).name for path in get_relative_import_files(exported / "modeling_skipless.py")}
    assert found | {"modeling_skipless.py"} == set(bundle)


def test_saved_again_by_either(exported, tmp_path):
    """What save_pretrained writes opens too, in transformers and here."""
    model = AutoModelForCausalLM.from_pretrained(exported)
    model.save_pretrained(tmp_path / "again")
    ids = torch.randint(100, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, expected)
        torch.testing.assert_close(skipless.load(tmp_path / "again")(ids), expected)
        plain = export_run(tmp_path / "again", "safetensors", tmp_path / "plain")
        torch.testing.assert_close(skipless.load(plain)(ids), expected)
    for name, source in remote_code().items():  # config.json names it, so it is there
        assert (tmp_path / "again" / name).read_text() == source
    SkiplessForCausalLM(SkiplessConfig(**SIZE)).save_pretrained(tmp_path / "own")
    assert not list((tmp_path / "own").glob("*.py"))


# ---------------------------------------------------------------------------------- the folder


def test_card(exported, run_folder):
    from skipless.interop.model_card import without_folders

    card = (exported / "README.md").read_text()
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    loss = [record["valid_loss"] for record in metrics if "valid_loss" in record][-1]
    parameters = skipless.load(run_folder).num_parameters(trainable_only=False)
    config = json.loads((run_folder / "config.json").read_text())
    for part in (
        "MHA[ (αI + βA − γC) X ]",
        f"| parameters | {parameters:,} |",
        f"{loss:.4f}",
        f"`{without_folders(config['config']['data']['source'])}`",
        "AutoModelForCausalLM.from_pretrained",
        "trust_remote_code=True",
        "pipeline_tag: text-generation",
    ):
        assert part in card, part


def test_card_shows_the_block_and_its_limits(exported, run_folder):
    card, picture = (exported / "README.md").read_text(), (exported / "block.svg").read_text()
    assert "![The block as a drawing](block.svg)" in card
    assert "(αI + βA − γC) X" in picture
    limits = card.split("## Limits")[1].split("## Evidence")[0]
    tokens = [json.loads(line)["tokens"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert f"Trained on {tokens:,} tokens" in limits
    assert "not a plain softmax" in limits
    assert "overflow" not in limits
    assert "`docs/results/report.md`" in card.split("## Evidence")[1]


def test_card_links_to_the_results_where_they_are_published(exported, monkeypatch):
    from email.message import Message

    from skipless.interop import model_card

    about = Message()
    about["Project-URL"] = "Results, https://example.org/results"
    monkeypatch.setattr(model_card, "metadata", lambda name: about)
    assert "[its results](https://example.org/results)" in model_card.model_card(skipless.load(exported), "hf")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("python-stdlib", "python-stdlib"),
        ("corpus:code", "corpus:code"),
        ("hf:org/name:en@train#text", "hf:org/name:en@train#text"),
        ("files:/home/me/secret/src/**/*.py", "files:**/*.py"),
        ("files:/home/me/a.py=0.7", "files:a.py=0.7"),
        ("jsonl:/home/me/books.jsonl.zst#text", "jsonl:books.jsonl.zst#text"),
        ("jsonl:~/x/b.jsonl#text=0.3", "jsonl:b.jsonl#text=0.3"),
        ("bpe", "bpe"),
        ("org/name", "org/name"),
        ("/home/me/tokenizer.json", "tokenizer.json"),
        ("../vocab.txt", "vocab.txt"),
    ],
)
def test_card_has_no_folder_of_the_machine(source, shown):
    from skipless.interop.model_card import without_folders

    assert without_folders(source) == shown


def test_card_of_a_run_on_files_names_no_folder(exported, run_folder):
    card = (exported / "README.md").read_text()
    source = json.loads((run_folder / "config.json").read_text())["config"]["data"]["source"]
    assert source.startswith("files:/")
    assert not re.search(r"`[a-z]+:/", card)
    assert str(run_folder.parent) not in card


def test_card_of_low_bits_and_without_norms_says_so():
    from skipless.interop.model_card import model_card

    card = model_card(small(block="sas-p-nonorm"), "onnx", onnx=OnnxOptions(bits=4))
    assert "not of these 4-bit ones" in card
    assert "activations can overflow" in card
    plain = model_card(small(block="pre-ln"), "safetensors")
    assert "softmax, so" not in plain
    assert "Trained on" not in plain


def test_card_of_an_earlier_checkpoint_has_its_metrics(run_folder, tmp_path):
    from skipless.interop.model_card import model_card
    from skipless.runs import Run

    run = Run(run_folder)
    records = {record["step"]: record["valid_loss"] for record in run.metrics() if "valid_loss" in record}
    card = model_card(skipless.load(run_folder), "hf", run=run, step=20)
    assert f"{records[20]:.4f}" in card
    assert f"{records[40]:.4f}" not in card
    assert "| steps | 20 of 40 |" in card


def run_card(folder, monkeypatch):
    """Run the code of a card, in its folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.S)
    monkeypatch.chdir(folder)
    found = {}
    exec(compile(code, "README.md", "exec"), found)  # noqa: S102
    return found


@pytest.fixture(scope="module")
def words():
    """A tokeniser with a mask."""
    return train("wordpiece", lambda: iter(["some text and some more", "an other text"] * 9), vocab_size=60)


def test_cards_say_how(run_folder, words, tmp_path, monkeypatch, capsys):
    """Those for Hugging Face are run in `opening.py` too."""
    plain = export_run(run_folder, "safetensors", tmp_path / "plain")
    assert isinstance(run_card(plain, monkeypatch)["model"], CausalLM)
    for kind, answer in (((MaskedLM,), "token_str"), ((SequenceClassifier, 3), "LABEL_")):
        model = small(*kind, vocab_size=words.vocab_size)
        model.tokenizer = words
        run_card(export_model(model, "hf", tmp_path / answer), monkeypatch)
        assert answer in capsys.readouterr().out
    assert "library_name: skipless" in (plain / "README.md").read_text()


def test_sentences_end_as_the_encoder_knows_it(words, tmp_path):
    """As `skipless finetune` gives them; but not in the tokeniser of the library, which adds nothing."""
    model = small(SequenceClassifier, 2, vocab_size=words.vocab_size)
    model.tokenizer = words
    folder = export_model(model, "hf", tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(folder)
    for texts in (("some text",), ("some text", "an other")):
        assert theirs(*texts)["input_ids"] == encode(words, [texts], 24)[0]
    assert theirs("some [MASK]", add_special_tokens=False)["input_ids"][-1] == words.mask_id
    assert skipless.load(folder).tokenizer.encode("some text") == words.encode("some text")


def test_tokenizer_is_the_runs(exported, run_folder):
    theirs, ours = AutoTokenizer.from_pretrained(exported), skipless.load(run_folder).tokenizer
    for text in ("def f(x):\n    return x", "an <|endoftext|> in the text", "é漢\t \n\n", ""):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.end_id, ours.pad_id)


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_exports_open_here(to, run_folder, tmp_path, capsys):
    """`skipless.load` and `skipless generate` take them, and write what the run writes."""
    folder = export_run(run_folder, to, tmp_path / "out", checkpoint="best")
    again, model = skipless.load(folder), skipless.load(run_folder, checkpoint="best")
    ids = torch.randint(100, (2, 9))
    torch.testing.assert_close(again(ids), model(ids))
    texts = []
    for path in (folder, run_folder):
        assert skipless_command(["generate", str(path), "--prompt", "def ", "--max-new-tokens", "8", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"])
    assert texts[0] == texts[1]


def test_a_classifier_keeps_its_labels(tmp_path):
    for to in ("hf", "safetensors"):
        for labels in (1, 2, 5, 12):  # from 11 on, numbers that are sorted as text are in another order
            model = small(SequenceClassifier, labels)
            model.labels = tuple(f"class {number}" for number in range(labels)) if labels > 2 else ()
            again = skipless.load(export_model(model, to, tmp_path / f"{to}-{labels}"))
            ids = torch.randint(30, (2, 7))
            torch.testing.assert_close(again(ids), model(ids))
            assert again.num_labels == labels
            assert again.labels[2:] == model.labels[2:]


def test_nothing_is_replaced_unasked(run_folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["export", str(run_folder), str(out), "--to", "safetensors"]
    assert skipless_command(arguments) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "README.md").write_text("changed")
    assert skipless_command(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "README.md").read_text() == "changed"
    assert skipless_command([*arguments, "--overwrite", "--json"]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert json.loads(capsys.readouterr().out)["files"].keys() == before.keys()

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert skipless_command(["export", str(run_folder), str(mine), "--to", "safetensors", "--overwrite"]) == 2
    assert "not an exported model" in capsys.readouterr().err
    assert (mine / "thesis.txt").exists()
    assert skipless_command(["export", str(run_folder), str(run_folder), "--to", "safetensors", "--overwrite"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]  # and nothing is left beside them


def _git(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")


def _notes(folder):
    (folder / "notes.md").write_text("years of work")


def _script(folder):
    (folder / "serve.py").write_text("print('mine')")


def _link(folder):
    (folder.parent / "weights").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder.parent / "weights")


@pytest.mark.parametrize("add", [_git, _notes, _script, _link])
@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_what_no_export_wrote_is_not_replaced(to, add, tmp_path):
    out = export_model(small(), to, tmp_path / "out")
    export_model(small(), to, out, overwrite=True)
    add(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="no export wrote"):
        export_model(small(), to, out, overwrite=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_comes_while_an_export_is_made_is_not_replaced(tmp_path, monkeypatch):
    out = export_model(small(), "safetensors", tmp_path / "out")
    monkeypatch.setattr("skipless.interop.export.model_card", lambda *_: (out / "notes.md").write_text("x") and "card")
    with pytest.raises(UserError, match="no export wrote"):
        export_model(small(), "safetensors", out, overwrite=True)
    assert (out / "notes.md").read_text() == "x"


def test_a_link_to_an_export_stays_a_link(tmp_path):
    out = export_model(small(), "safetensors", tmp_path / "real")
    (out / "README.md").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("real")
    assert export_model(small(), "safetensors", link, overwrite=True) == link
    assert link.is_symlink()
    assert (out / "README.md").read_text() != "old"


def test_a_folded_model_is_not_exported(tmp_path):
    """Opened again, its gains would count twice."""
    folded = small(block=parse_block("pre-ln:beta_ff=0.2")).fold()
    for to in ("safetensors", "hf", "onnx"):
        with pytest.raises(UserError, match="a folded model no longer has the parameters"):
            export_model(folded, to, tmp_path / "out")
    with pytest.raises(UserError, match="a folded model no longer has the parameters"):
        wrap(folded).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    out = export_model(small(), "safetensors", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr("skipless.interop.export.model_card", lambda *_: 1 / 0)
    for place in (out, tmp_path / "new"):
        with pytest.raises(ZeroDivisionError):
            export_model(small(), "safetensors", place, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "RUN", "out", "--to", "hff"], "did you mean 'hf'"),
        (["export", "RUN", "out", "--checkpoint", "first"], "last, best or"),
        (["export", "nowhere", "out"], "there is no run"),
        (["export", "RUN"], "OUT"),
        (["generate", "EMPTY", "--prompt", "x"], "no .safetensors file"),
        (["evaluate", "EMPTY"], "--tasks"),
    ],
)
def test_bad_input(arguments, message, run_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    config = {"model_type": "skipless", "architectures": ["SkiplessForCausalLM"]}
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
    places = {"RUN": str(run_folder), "out": str(tmp_path / "out"), "EMPTY": str(tmp_path / "empty")}
    assert skipless_command([places.get(argument, argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_damaged_exports(tmp_path):
    folder = export_model(small(), "safetensors", tmp_path / "out")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(skipless.UserError, match="cannot be loaded"):
        skipless.load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"n_layer": 2}, "cannot be loaded"),
        ({"n_head": 5}, "n_head 5 does not divide"),
        ({"architectures": ["SkiplessForSpeech"]}, "known: SkiplessForCausalLM"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(skipless.UserError, match=message):
            skipless.load(folder)


# ---------------------------------------------------------------------------------------- ONNX


def check_onnx(model, folder):
    """At two batch sizes and two lengths, neither of them the example's, beside the check of the export itself."""
    path = export_model(model, "onnx", folder, onnx=WHOLE) / "model.onnx"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (1, 4):
        for length in (3, 24):
            inputs = onnx_inputs(model, batch, length, seed=9)
            (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
            with torch.no_grad():
                expected = model(*inputs.values())
            apart = (torch.from_numpy(found) - expected).abs()
            if "attention_mask" in inputs and expected.ndim == 3:
                apart = apart[inputs["attention_mask"].bool()]
            assert apart.max() < 1e-4
    return path


@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p", "sas-p-nonorm"])
def test_onnx_is_pytorch(block, tmp_path, monkeypatch):
    model = small(block=block)
    path = check_onnx(model, tmp_path / "out")
    if block != "sas-p":
        return
    # its card, with a tokeniser of two words; and what a graph that computes something else comes to
    backend = tokenizers.Tokenizer(WordLevel({"some": 0, "text": 1}, unk_token="some"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(path.with_name("tokenizer.json")))
    assert run_card(path.parent, monkeypatch)["logits"].shape == (1, 2, 30)
    assert onnx_error(model, path) < 1e-5
    with torch.no_grad():
        model.head_weight.mul_(1.01)
    assert onnx_error(model, path) > 1e-4
    wrong = SimpleNamespace(save=lambda place, **_: shutil.copy(path, place))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: wrong)
    with pytest.raises(skipless.UserError, match="other logits than PyTorch"):
        export_model(model, "onnx", tmp_path / "wrong", onnx=WHOLE)
    assert not (tmp_path / "wrong").exists()


def test_a_model_in_training_mode_is_exported_without_dropout(tmp_path):
    """As it is used, not as it was trained: the exported graph is that of the model in eval mode."""
    model = small(block="sas-p", dropout=0.5).train()
    path = export_model(model, "onnx", tmp_path / "onnx", onnx=WHOLE) / "model.onnx"
    assert onnx_error(model.eval(), path) < 1e-5
    text = export_model(model.train(), "hf", tmp_path / "hf")
    reopened, ids = AutoModelForCausalLM.from_pretrained(text), torch.randint(30, (2, 8))
    torch.testing.assert_close(reopened(ids).logits, model.eval()(ids), rtol=1e-5, atol=1e-5)


def test_an_onnx_file_is_judged_by_its_worst_shape(monkeypatch):
    """A graph that is right for all but the longest batch is wrong."""
    model = small()

    class Session:
        def __init__(self, *_, **__):
            pass

        def run(self, _, inputs):
            ids = torch.from_numpy(inputs["input_ids"])
            with torch.no_grad():
                return [(model(ids) + 0.5 * (ids.shape == (3, 16))).numpy()]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with torch.no_grad():
        assert onnx_error(model, Path("model.onnx")) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary", "scaled-sinusoidal"])
@pytest.mark.parametrize("kind", [CausalLM, MaskedLM, SequenceClassifier])
def test_onnx_of_every_kind(kind, positions, tmp_path):
    more = (3,) if kind is SequenceClassifier else ()
    check_onnx(small(kind, *more, block="sas", positions=positions), tmp_path / "out")
