"""ONNX graphs with a cache: equal to PyTorch, whatever the block, the positions, the cache and the batch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import skipless
from skipless.cli import run as skipless_command
from skipless.errors import UserError
from skipless.interop import onnx_export
from skipless.interop.export import export_model, export_run
from skipless.interop.lm_eval.harness import evaluate_tasks
from skipless.interop.onnx_bits import pack
from skipless.interop.onnx_cache_steps import cache_steps
from skipless.interop.onnx_decoder import decoder_graph
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.cache import pick_mode
from skipless.nn.model import CausalLM, MaskedLM
from skipless.nn.sampling import Sampling, generate
from skipless.runtime.decoder import pick
from skipless.runtime.model import OnnxCausalLM
from tests.helpers.variants import APPENDIX
from tests.helpers.weights import disturbed

SIZE = {"n_layer": 2, "d_model": 32, "n_head": 2, "vocab_size": 30, "max_seq_len": 24}
POSITIONS = ("sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary")
TOLERANCE = 1e-4


def small(**changes):
    torch.manual_seed(0)
    return disturbed(CausalLM(skipless.ModelConfig(**{**SIZE, **changes})), 0.2).eval()


def opened(model, folder, **options):
    """The graph of a model without the check of the export."""
    chosen = OnnxOptions(**options)
    folder.mkdir(exist_ok=True)
    about = {"cache": pick_mode(model.config, chosen.cache)}
    content = {**model.config.model_dump(mode="json"), "onnx": about}
    (folder / "config.json").write_text(json.dumps(content))
    onnx.save(decoder_graph(model, chosen), folder / "model.onnx")
    return OnnxCausalLM(folder, model.config, threads=1)


@torch.no_grad()
def apart(model, found):
    """Token by token, in uneven chunks, and a ragged batch: the largest difference in units of the largest logit."""
    length = model.config.max_seq_len
    ids = torch.randint(model.config.vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    expected = model(ids)
    pairs = []
    for batch, chunks in ((1, [1] * length), (1, [7, 1, 1, 5, length - 14]), (3, [5, 1, length - 6])):
        cache, start, parts = found.new_cache(batch), 0, []
        for count in chunks:
            parts.append(found(ids[:batch, start : start + count], cache=cache))
            start += count
        pairs.append((torch.cat(parts, 1), expected[:batch]))
    lengths, rows = torch.tensor([9, 4, 12]), torch.arange(3)
    mask = torch.arange(12) >= 12 - lengths[:, None]  # padded on the left, as prompts are
    prompts = torch.zeros(3, 12, dtype=torch.long)
    prompts[mask] = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    cache = found.new_cache(3)
    logits = found.next_logits(prompts, cache, mask)
    for step in range(6):
        pairs.append((logits, expected[rows, lengths - 1 + step]))
        logits = found.next_logits(ids[rows, lengths + step][:, None], cache)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(1.0, float(expected.abs().max()))


def modes(config):
    for mode in ("kv", "kx", "x"):
        try:
            if mode == "x" or pick_mode(config, mode) == mode:
                yield pick_mode(config, mode)
        except UserError:
            continue


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("block", skipless.BLOCKS)
def test_a_graph_is_pytorch(block, positions, tmp_path):
    model = small(block=block, positions=positions)
    tried = list(modes(model.config))
    assert tried
    for mode in tried:
        assert apart(model, opened(model, tmp_path / mode, cache=mode)) < TOLERANCE


@pytest.mark.parametrize("name", APPENDIX)
def test_a_graph_of_every_variant_is_pytorch(name, tmp_path):
    model = small(block=APPENDIX[name])
    for mode in modes(model.config):
        assert apart(model, opened(model, tmp_path / mode, cache=mode)) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": 20, "n_head": 2},  # heads of width 10, which the attention of ONNX Runtime does not take
        {"d_model": 20, "n_head": 2, "positions": "rotary"},
        {"d_model": 24, "n_head": 3, "positions": "rotary"},  # of width 8, which it does not rotate
        {"tie_embeddings": False},
        {"embedding_norm": True, "outer_norm": "layernorm"},
        {"n_head": 1, "positions": "alibi"},
        {"block": "sas-p:activation=silu"},
        {"block": "sas-p:mlp=glu,activation=gelu-tanh"},
        {"d_ff": 48, "block": "pre-ln"},
        {"block": "pre-ln:norm=rms-plus-eps"},
    ],
    ids=str,
)
def test_other_sizes_and_parts(changes, tmp_path):
    model = small(**{"block": "sas-p", **changes})
    assert apart(model, opened(model, tmp_path / "out")) < TOLERANCE


def test_a_graph_that_is_wrong_is_noticed(tmp_path):
    model = small(block="sas")
    found = opened(model, tmp_path / "out")
    with torch.no_grad():
        model.blocks[1].attention.mixing.gamma.mul_(1.1)
    assert apart(model, found) > 10 * TOLERANCE


# ------------------------------------------------------------------------------------- low bits


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (4, 0.25)])
@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_low_bits_are_near(block, bits, bound, symmetric, tmp_path):
    """Root mean square of what the bits change, in units of the spread of the logits; one block is a part of one."""
    torch.manual_seed(0)
    model = CausalLM(skipless.ModelConfig(**{**SIZE, "d_model": 80, "block": block, "vocab_size": 200})).eval()
    found = opened(model, tmp_path / "out", bits=bits, symmetric=symmetric)
    error = onnx_export.difference(model, found, bits)
    assert bound / 20 < error < bound


def test_low_bits_are_the_matrices_that_they_stand_for(tmp_path):
    """The graph is the model whose matrices were rounded, but for the rounding of the inputs."""
    model = small(block="pre-ln", d_model=64)
    found = opened(model, tmp_path / "out", bits=4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(pack(weight, 4, 32, symmetric=False).dense()))
    assert onnx_export.difference(model, found, 4) < 0.05  # at 8 bits


@pytest.mark.parametrize("positions", ["sinusoidal", "alibi"])
def test_a_cache_of_inputs_at_eight_bits_is_near(positions, tmp_path):
    model = small(block="sas-p", positions=positions, d_model=64)
    found = opened(model, tmp_path / "out", cache="x", cache_bits=8)
    assert 1e-6 < apart(model, found) < 0.05
    wide = opened(model, tmp_path / "wide", cache="kx")
    caches = [one.new_cache(2, max_len=24) for one in (found, wide)]
    for one, cache in zip((found, wide), caches, strict=True):
        one.next_logits(torch.zeros(2, 3, dtype=torch.long), cache)
    growing = [sum(b.nbytes for name, b in cache.buffers.items() if not name.startswith("sum")) for cache in caches]
    assert growing[1] / growing[0] == pytest.approx(8 * 64 / (64 + 4))


# --------------------------------------------------------------------------------- as it is used


@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_keys_and_values_at_eight_bits_are_near(positions, block, tmp_path):
    """Token by token, in chunks, ragged; and they take a quarter of the memory."""
    model = small(block=block, positions=positions)
    wide = opened(model, tmp_path / "wide")
    found = opened(model, tmp_path / "out", cache_bits=8)
    assert 0 < apart(model, found) < 0.05
    assert onnx_export.difference(model, found, 8) < 0.015
    sizes = [
        sum(one.nbytes for name, one in cache.buffers.items() if not name.startswith("sum."))
        for cache in caches(wide, found)
    ]
    assert sizes[1] * 4 == sizes[0]


def caches(*models):
    """A cache of each with room for its whole context."""
    made = [model.new_cache(1) for model in models]
    for cache in made:
        cache.make_room(cache.max_len)
    return made


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_steps_of_a_cache_reach_what_is_remembered(positions):
    """Of other tokens, at other places, next to nothing is cut off, and by little; the steps are not wasteful."""
    model = small(positions=positions, max_seq_len=64)
    steps = cache_steps(model)
    ids = torch.randint(30, (64, 64), generator=torch.Generator().manual_seed(5))
    cache = model.new_cache(64)
    model(ids, cache=cache)
    for layer, found in zip(cache.layers, steps, strict=True):
        for remembered, step in zip((layer.keys, layer.values), found, strict=True):
            sizes = remembered.abs() / step[:, None]
            assert (sizes > 127.5).float().mean() < 1e-4
            assert sizes.max() < 160
            assert sizes.amax((0, 2)).mean() > 70


@pytest.fixture(scope="module")
def graph_folder(run_folder, tmp_path_factory):
    return export_run(run_folder, "onnx", tmp_path_factory.mktemp("graph") / "out")


def test_the_same_text_is_written(run_folder, graph_folder):
    """Greedy and sampled, several prompts of different lengths, beyond the end of the context."""
    model, found = skipless.load(run_folder), skipless.load(graph_folder)
    prompts = [model.tokenizer.encode(text) for text in ("def alpha(", "def gamma_sum(beta, delta):\n    return", "x")]
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)):
        expected = list(generate(model, prompts, 150, sampling))
        assert list(generate(found, prompts, 150, sampling)) == expected


def test_commands_run_a_graph(run_folder, graph_folder, capsys, monkeypatch):
    monkeypatch.setenv("SKIPLESS_CACHE", str(run_folder.parent / "cache"))
    texts = []
    for place in (run_folder, graph_folder):
        command = ["generate", str(place), "--prompt", "def ", "--max-new-tokens", "20", "--json", "--device", "cpu"]
        assert skipless_command(command) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"])
    assert texts[0] == texts[1]
    losses = []
    for place in (run_folder, graph_folder):
        command = ["evaluate", str(place), "--json", "--device", "cpu", "--cache-dir", str(run_folder.parent / "cache")]
        assert skipless_command(command) == 0
        losses.append(json.loads(capsys.readouterr().out))
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=1e-5)
    assert losses[1]["tokens"] == losses[0]["tokens"]


@pytest.mark.parametrize("device", ["gpu", "meta"])
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_device_on_which_a_graph_cannot_run_is_said(graph_folder, capsys, command, device):
    prompt = ["--prompt", "def "] if command == "generate" else []
    assert skipless_command([command, str(graph_folder), *prompt, "--device", device]) == 2
    said = capsys.readouterr().err
    assert re.search("cannot be used|runs on the CPU here", said)
    assert said.count("\n") == 1


def test_low_bits_of_a_trained_model(run_folder, tmp_path):
    """The held-out loss barely moves at 8 bits, and the likeliest token stays."""
    model = skipless.load(run_folder)
    ids = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids)
    for bits, least, most in ((8, 0.97, 0.02), (4, 0.75, 0.25)):
        folder = export_run(run_folder, "onnx", tmp_path / str(bits), onnx=OnnxOptions(bits=bits))
        found = skipless.load(folder)(ids)
        agreement = (found.argmax(-1) == expected.argmax(-1)).float().mean()
        error = (found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm()
        assert agreement >= least
        assert error <= most


@pytest.mark.parametrize(
    "options",
    [{"cache": "x", "cache_bits": 8}, {"cache": "x", "bits": 4}, {"bits": 8}, {"bits": 8, "cache_bits": 8}],
    ids=str,
)
def test_an_export_at_low_bits_passes_its_own_check(options, run_folder, tmp_path):
    folder = export_run(run_folder, "onnx", tmp_path / "out", onnx=OnnxOptions(**options))
    about = json.loads((folder / "config.json").read_text())["onnx"]
    assert {name: about[name] for name in options} == options
    assert "decoder.py ." in (folder / "README.md").read_text()


def test_without_pytorch(graph_folder):
    """The file in the folder runs it by itself, in a process that cannot import torch or this package."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['skipless'] = None\n"
        f"sys.path.insert(0, {str(graph_folder)!r})\n"
        "from decoder import Decoder\n"
        f"model = Decoder({str(graph_folder)!r}, threads=1)\n"
        "print(list(model.generate([[5, 8, 2], [7]], 12, temperature=0)))\n"
        "print(list(model.generate([[5, 8, 2], [7]], 3, temperature=0.9, top_k=5, top_p=0.8, seed=1)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    greedy, sampled = map(json.loads, done.stdout.splitlines())
    expected = list(generate(skipless.load(graph_folder), [[5, 8, 2], [7]], 12, Sampling(temperature=0)))
    assert greedy == expected
    assert len(sampled) == 3


def test_nothing_is_copied(tmp_path):
    """What a graph writes is the memory that it reads."""
    model = small(block="sas-p")
    for mode in ("kx", "x"):
        found = opened(model, tmp_path / mode, cache=mode)
        cache = found.new_cache(1)
        found.next_logits(torch.tensor([[1, 2, 3]]), cache)
        places = {name: buffer.ctypes.data for name, buffer in cache.buffers.items()}
        before = {name: buffer.copy() for name, buffer in cache.buffers.items()}
        found.next_logits(torch.tensor([[4]]), cache)
        assert {name: buffer.ctypes.data for name, buffer in cache.buffers.items()} == places
        assert all((before[name] != buffer).any() for name, buffer in cache.buffers.items())


def test_a_cache_grows_and_forgets(tmp_path, monkeypatch):
    monkeypatch.setattr("skipless.runtime.decoder.PLACES", 4)
    model = small(block="sas-p")
    found = opened(model, tmp_path / "out")
    assert apart(model, found) < TOLERANCE
    cache, ids = found.new_cache(1), torch.arange(10)[None]
    first = found.next_logits(ids, cache)
    cache.reset()
    torch.testing.assert_close(found.next_logits(ids, cache), first)
    with pytest.raises(UserError, match="24 tokens"):
        found.next_logits(torch.zeros(1, 15, dtype=torch.long), cache)


# ----------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_exported(tmp_path):
    model = small(block="pre-ln")
    with pytest.raises(UserError, match="'x' needs identity value maps"):
        export_model(model, "onnx", tmp_path / "out", onnx=OnnxOptions(cache="x"))
    masked = MaskedLM(skipless.ModelConfig(**SIZE))
    with pytest.raises(UserError, match="for causal models"):
        export_model(masked, "onnx", tmp_path / "out", onnx=OnnxOptions(bits=4))
    with pytest.raises(UserError, match="choices of the format onnx"):
        export_model(model, "safetensors", tmp_path / "out", onnx=OnnxOptions(bits=4))
    assert not (tmp_path / "out").exists()
    model = small(tie_embeddings=False)
    model.head = torch.nn.Linear(32, 30)
    with pytest.raises(UserError, match="Linear cannot be written into a graph with a cache"):
        decoder_graph(model, OnnxOptions())


@pytest.mark.parametrize("to", ["onnx", "safetensors"])
def test_a_model_without_its_tokeniser_says_so(run_folder, tmp_path, to, capsys):
    export_model(skipless.load(run_folder), to, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert skipless_command(["generate", str(tmp_path / "out"), "--prompt", "def ", "--device", "cpu"]) == 2
    assert "no tokeniser" in capsys.readouterr().err


def test_a_wrong_graph_is_not_exported(tmp_path, monkeypatch):
    model, other = small(block="sas-p"), small(block="sas-p")
    with torch.no_grad():
        other.embedding.weight.mul_(1.01)
    monkeypatch.setattr(onnx_export, "decoder_graph", lambda _, options: decoder_graph(other, options))
    with pytest.raises(UserError, match="other logits than PyTorch"):
        export_model(model, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_that_forgets_its_prompt_is_not_exported(tmp_path, monkeypatch):
    """Prompts alone would not show it."""
    model = small(block="sas-p")
    found, real = opened(model, tmp_path / "out"), OnnxCausalLM.next_logits
    assert onnx_export.check(model, found, 32)["apart"] < TOLERANCE

    def forget(self, ids, cache, mask=None):
        return real(self, ids, cache, mask) + (ids.shape[1] == 1)

    monkeypatch.setattr(OnnxCausalLM, "next_logits", forget)
    with pytest.raises(UserError, match="other logits than PyTorch"):
        onnx_export.check(model, found, 32)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.4), (None, 0.5), (None, 0.75), (3, 1.0), (2, None)])
def test_its_own_sampling_draws_from_the_same_tokens(top_k, top_p):
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    random, drawn = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sampling = Sampling(top_k=top_k, top_p=top_p)
    found = {pick(logits.numpy(), random, 1.0, top_k, top_p) for _ in range(200)}
    assert found == {sampling.pick(logits, [], drawn) for _ in range(200)}


def test_what_cannot_be_run(graph_folder, tmp_path):
    found = skipless.load(graph_folder)
    for wrong, message in (
        (lambda: found.new_cache(1, mode="x"), "made for cache mode 'kx'"),
        (lambda: found.to("cuda"), "runs on the CPU"),
        (lambda: found.train(), "cannot be trained"),
        (lambda: found(torch.tensor([[100_000]])), "token ids must lie in"),
        (lambda: found.next_logits(torch.zeros(2, 1, dtype=torch.long), found.new_cache(1)), "for 1 sequences"),
        (lambda: export_run(graph_folder, "hf", tmp_path / "again"), "no weights to export"),
        (lambda: evaluate_tasks(graph_folder, ["python_next_line"]), "the harness cannot score"),
    ):
        with pytest.raises(UserError, match=message):
            wrong()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text((graph_folder / "config.json").read_text())
    (damaged / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be loaded"):
        skipless.load(damaged)


def test_options_are_checked(run_folder, tmp_path, capsys):
    base = ["export", str(run_folder), str(tmp_path / "out"), "--to", "onnx"]
    for more in (
        ["--bits", "5"],
        ["--cache", "none", "--cache-bits", "8"],
        ["--cache", "none", "--bits", "4"],
        ["--block-size", "32"],
    ):
        assert skipless_command([*base, *more]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_sessions_are_quiet(tmp_path, capfd):
    """A graph that loads without a remark has nothing in it that is not used."""
    opened(small(block="sas-p"), tmp_path / "kx")
    opened(small(block="sas-p", positions="rotary"), tmp_path / "rotary")
    opened(small(block="sas", positions="alibi"), tmp_path / "x", cache="x")
    assert capfd.readouterr().err == ""


def test_a_graph_that_loads_and_cannot_be_run_is_one_line(graph_folder, tmp_path, capsys):
    """Of other shapes than its configuration says, or with weights that are not finite."""
    other = Path(shutil.copytree(graph_folder, tmp_path / "other"))
    info = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**info, "vocab_size": info["vocab_size"] + 1}))
    nan = Path(shutil.copytree(graph_folder, tmp_path / "nan"))
    graph = onnx.load(nan / "model.onnx")
    for tensor in graph.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = np.full_like(onnx.numpy_helper.to_array(tensor), np.nan)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(graph, nan / "model.onnx")
    for folder, temperature, said in (
        (other, "0", "cannot be run"),
        (nan, "0", "the model's logits are not finite"),
        (nan, "1", "the model's logits are not finite"),
    ):
        words = ["generate", str(folder), "--prompt", "def", "--max-new-tokens", "2", "--temperature", temperature]
        assert skipless_command(words) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
