"""`skipless bench decode`: what is measured, and what is left out where it is not installed."""

import json
import time

import pytest
import torch

import skipless
from skipless.cli import run
from skipless.errors import UserError
from skipless.interop.export import export_model
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn.model import CausalLM, MaskedLM
from skipless.tasks import decode_cases
from skipless.tasks.bench_decoding import measure
from skipless.tasks.decode_cases import Size, ctranslate_cases, llama_cases, onnx_options
from skipless.tasks.decode_worker import cases_apart
from skipless.tasks.gguf_gpt2 import TYPES, write_gpt2

SIZE = {"n_layer": 1, "d_model": 32, "n_head": 2, "vocab_size": 40, "max_seq_len": 24}


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_prompt_and_a_token_are_told_apart():
    """A case that says when its first token was there, and one that runs again for it."""

    def says(new):
        time.sleep(0.02)
        first = time.perf_counter()
        time.sleep(0.005 * (new - 1))
        return first

    def silent(new):
        time.sleep(0.02 + 0.005 * (new - 1))

    found = measure({"says": says, "silent": silent}, 3, torch.device("cpu"), new=5)
    for name in ("says", "silent"):
        times = {kind: next(row.milliseconds for row in rows if row.name == name) for kind, rows in found.items()}
        assert 19 < times["prefill"] < 35
        assert 4 < times["token"] < 9
        assert times["whole"] == pytest.approx(times["prefill"] + 4 * times["token"], rel=0.3)


def test_a_library_takes_its_turns_in_a_process_of_its_own(tmp_path):
    size, prompts = Size(1, 16, 2, 50, 16), [[1, 2, 3]]
    with cases_apart("onnxruntime", size, prompts, tmp_path, kinds=["32", "8"]) as cases:
        assert list(cases) == ["sas-p ONNX 32", "sas-p ONNX 8"]
        start = time.perf_counter()
        first = cases["sas-p ONNX 8"](4)
        assert start < first < time.perf_counter()
    with (
        pytest.raises(UserError, match="the process that measures onnxruntime ended with status 1"),
        cases_apart("onnxruntime", size, prompts, tmp_path, kinds=["7"]),
    ):
        pass


def test_runs_and_exports_are_measured(tmp_path, capsys):
    model = CausalLM(skipless.ModelConfig(block="sas-p", **SIZE))
    graph = export_model(model, "onnx", tmp_path / "graph", onnx=OnnxOptions(bits=8))
    plain = export_model(model, "safetensors", tmp_path / "plain")
    command = ["bench", "decode", str(graph), str(plain), "--max-new-tokens", "4", "--rounds", "1"]
    assert run([*command, "--device", "cpu"]) == 0
    found = last_line(capsys)
    for kind in ("rows", "prefill", "token"):
        assert [row["name"] for row in found[kind]] == [str(graph), str(plain)]
        assert all(row["milliseconds"] > 0 for row in found[kind])
    assert run([*command[:-3], "30"]) == 2
    assert "30 new tokens do not fit" in capsys.readouterr().err
    masked = export_model(MaskedLM(skipless.ModelConfig(**SIZE)), "safetensors", tmp_path / "masked")
    assert run(["bench", "decode", str(masked)]) == 2
    assert "cannot write text" in capsys.readouterr().err
    assert run(["bench", "train", str(plain)]) == 2
    assert "measured by `bench decode`" in capsys.readouterr().err


def test_onnx_runtime_is_among_the_cases(capsys):
    tiny = ["--n-layer", "1", "--d-model", "16", "--n-head", "2", "--seq-len", "8", "--vocab-size", "50"]
    assert run(["bench", "decode", *tiny, "--max-new-tokens", "3", "--rounds", "1", "--device", "cpu", "--json"]) == 0
    found = last_line(capsys)
    assert {"sas-p ONNX 32", "sas-p ONNX 8", "sas-p ONNX 4"} <= {row["name"] for row in found["token"]}
    assert found["versions"]["onnxruntime"]


def test_what_is_not_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_cases, "find_spec", lambda name: None)
    size = Size(1, 16, 2, 50, 16)
    assert llama_cases(size, [[1]], tmp_path) == {}
    assert ctranslate_cases(size, [[1]], tmp_path) == {}
    assert decode_cases.hf_cases(size, [[1]], torch.device("cpu")) == {}
    assert not list(tmp_path.iterdir())


def test_kinds_of_exports_by_name():
    assert onnx_options("4") == OnnxOptions(bits=4)
    assert onnx_options("8 x8") == OnnxOptions(bits=8, cache="x", cache_bits=8)
    assert onnx_options("4 block=128 asymmetric") == OnnxOptions(bits=4, block_size=128, symmetric=False)


@pytest.mark.parametrize("kind", TYPES)
def test_a_gguf_file_has_the_matrices_of_a_gpt2(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gpt2(path, kind, n_layer=2, d_model=32, n_head=2, vocab_size=50, max_seq_len=16)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert len(tensors) == 5 + 2 * 12
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [128, 32]
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == TYPES[kind][0]
    assert tensors["blk.0.attn_norm.bias"].tensor_type.name == "F32"
