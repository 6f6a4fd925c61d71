"""Decoding, ours beside others': a prompt is read, tokens are written one by one.

Cases take turns. The prefill ends with the first token; a case that cannot say when that was runs again for one token.
Other libraries than PyTorch take theirs in processes of their own (`decode_worker`).
"""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch

from skipless.analysis.speed import matmul_speed, wait
from skipless.distributed.devices import pick_device
from skipless.errors import UserError
from skipless.nn import CausalLM
from skipless.runs import load
from skipless.runtime.model import OnnxCausalLM
from skipless.tasks.bench import Row, Shape, compare
from skipless.tasks.decode_cases import (
    CTRANSLATE,
    HF,
    LLAMA,
    Case,
    Size,
    hf_cases,
    own_case,
)
from skipless.tasks.decode_worker import cases_apart

BITS = ("32", "8", "4")
"""Exports to ONNX that are measured."""

KINDS = ("prefill", "token", "whole")
"""The prompt and the first token; a token after that; the whole call."""

Rows = dict[str, list[Row]]
"""Times of each kind."""

WARM_UP = 8
"""Tokens that each case writes before it is measured."""

OWN = ("pre-ln (kv)", "sas-p (kx)")


def bench_decode(
    shape: Shape, rounds: int, device: str = "auto", *, new: int = 128, batch: int = 1, vocab_size: int = 50_000
) -> list[Row]:
    """Greedy decoding of `new` tokens after a prompt of `shape.length`; times are for the whole call."""
    return bench_decoding(shape, rounds, device, new=new, batch=batch, vocab_size=vocab_size)["whole"]


def bench_decoding(
    shape: Shape, rounds: int, device: str = "auto", *, new: int = 128, batch: int = 1, vocab_size: int = 50_000
) -> Rows:
    """Ours in PyTorch and in ONNX Runtime, and others' that are installed, with random weights."""
    place = pick_device(device)
    size = Size(shape.depth, shape.d_model, shape.n_head, vocab_size, shape.length + new)
    prompts = torch.randint(vocab_size, (batch, shape.length)).tolist()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases = all_cases(size, prompts, place, Path(folder), stack)
        return measure(cases, rounds, place, new)


def all_cases(
    size: Size, prompts: Sequence[Sequence[int]], place: torch.device, folder: Path, stack: ExitStack
) -> dict[str, Case]:
    """Everything that can be measured here, until the stack is closed; files are made in a folder, or found there."""
    cases: dict[str, Case] = {}
    for name, modes in (("pre-ln", ["kv"]), ("sas-p", ["kx", "x"])):
        model = CausalLM(size.config(name)).to(place).fold()
        cases |= {f"{name} ({mode})": own_case(model, prompts, mode) for mode in modes}
    cases |= hf_cases(size, prompts, place)
    if place.type == "cpu":  # the others are measured there alone
        needs = {"onnxruntime": ("onnx",), "llama_cpp": ("gguf",), "ctranslate2": ("transformers",)}
        for library, others in needs.items():
            if all(find_spec(name) for name in (library, *others)):
                more = {"kinds": BITS} if library == "onnxruntime" else {}
                cases |= stack.enter_context(cases_apart(library, size, prompts, folder, **more))
    return cases


def bench_models(
    models: Sequence[Path], shape: Shape, rounds: int, device: str = "auto", *, new: int = 128, batch: int = 1
) -> Rows:
    """The same of runs and exports."""
    place, cases = pick_device(device), {}
    for folder in models:
        model = load(folder)
        if isinstance(model, OnnxCausalLM):
            place = torch.device("cpu")
        elif isinstance(model, CausalLM):
            model = model.to(place).fold()
        else:
            raise UserError(f"{str(folder)!r} holds a {type(model).__name__}, which cannot write text")
        length = min(shape.length, model.config.max_seq_len - new)
        if length < 1:
            raise UserError(f"{str(folder)!r} has a context of {model.config.max_seq_len}: {new} new tokens do not fit")
        prompts = torch.randint(model.config.vocab_size, (batch, length)).tolist()
        cases[str(folder)] = own_case(model, prompts)
    return measure(cases, rounds, place, new)


def measure(
    cases: Mapping[str, Case], rounds: int, place: torch.device, new: int, *, seconds: float = math.inf
) -> Rows:
    """Times of all cases in turn, after a few tokens of each to warm up; no further round after so many seconds."""
    kinds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in cases} for kind in KINDS}
    for case in cases.values():
        one_turn(case, min(new, WARM_UP), place)
    start = time.perf_counter()
    for number in range(rounds):
        for name, case in list(cases.items())[:: -1 if number % 2 else 1]:
            prefill, whole = one_turn(case, new, place)
            token = (whole - prefill) / max(1, new - 1)
            for kind, took in zip(KINDS, (prefill, max(token, 1e-9), whole), strict=True):
                kinds[kind][name].append(took)
        if time.perf_counter() - start > seconds:
            break
    references = [name for name in cases if name.startswith((HF, LLAMA, CTRANSLATE)) or name in OWN]
    references = references or [next(iter(cases))]
    peak = matmul_speed(place, torch.float32)
    return {kind: compare(times, tuple(references), {}, peak) for kind, times in kinds.items()}


def one_turn(case: Case, new: int, place: torch.device) -> tuple[float, float]:
    """Seconds to the first token, and of the whole call."""
    wait(place)
    start = time.perf_counter()
    first = case(new)
    wait(place)
    end = time.perf_counter()
    if first is not None:
        return first - start, end - start
    case(1)
    wait(place)
    return time.perf_counter() - end, end - start
