"""Decoding at 32, 8 and 4 bits against llama.cpp and CTranslate2: the floors that the project set itself.

    python benchmarks/decode.py                    # speed: one sequence, 128 tokens after 512, 18 layers of width 768
    python benchmarks/decode.py batch memory error # 16 sequences; memory and file sizes; the matrices' errors
    python benchmarks/decode.py --folder /tmp/models --json benchmarks/results/decode-1.json

Needs `llama-cpp-python` (built natively: CMAKE_ARGS="-DGGML_NATIVE=ON"), `gguf` and `ctranslate2` beside the project;
what is not installed is left out, with the figures that need it. Models have random weights and are made in a folder,
where a second run finds them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from skipless.interop.onnx_bits import pack, relative_error
from skipless.interop.onnx_options import OnnxOptions
from skipless.nn import CausalLM
from skipless.runtime.decoder import Decoder
from skipless.storage.atomic_files import write_json
from skipless.tasks.bench import Row
from skipless.tasks.bench_decoding import Rows, measure
from skipless.tasks.decode_cases import (
    Case,
    Size,
    ctranslate_cases,
    llama_cases,
    onnx_cases,
    own_case,
    versions,
)
from skipless.tasks.decode_worker import cases_apart
from skipless.terminal.tables import show_table

SIZE = Size(n_layer=18, d_model=768, n_head=12, vocab_size=50_000, max_seq_len=640)
PROMPT, NEW = 512, 128
FEW = 24
"""New tokens of the measurement by the core's time."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Figure:
    """A ratio and the least it should be."""

    case: str
    against: str
    ratio: float
    floor: float | None


def one_sequence(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """The table of floors."""
    torch.manual_seed(0)
    prompts = torch.randint(SIZE.vocab_size, (1, PROMPT)).tolist()
    cases: dict[str, Case] = {"sas-p (kx)": own_case(CausalLM(SIZE.config("sas-p")).fold(), prompts, "kx")}
    apart: dict[str, dict[str, Any]] = {
        "onnxruntime": {"kinds": ("32", "8", "4", "8 kx8", "4 kx8")},
        "llama_cpp": {"every_flag": True},
        "ctranslate2": {"kinds": ("int8",)},
    }
    with ExitStack() as stack:
        for library, more in apart.items():
            cases |= stack.enter_context(cases_apart(library, SIZE, prompts, folder, **more))
        found = measure(cases, rounds, CPU, NEW, seconds=seconds)
    eight, four = ("sas-p ONNX 8", "sas-p ONNX 8 kx8"), ("sas-p ONNX 4", "sas-p ONNX 4 kx8")
    figures = [
        _best(found, ("sas-p (kx)", "sas-p ONNX 32"), "llama.cpp f32", 1.0),
        _best(found, eight, "llama.cpp q8_0", 1.2),
        _best(found, four, "llama.cpp q4_0", 1.05),
        _best(found, eight, "sas-p (kx)", 3.0),
        _best(found, eight, "CTranslate2 int8", 2.0),
        _best(found, eight, "sas-p (kx)", 1.0, "prefill"),
    ]
    return {"milliseconds": _medians(found), "figures": [asdict(figure) for figure in figures if figure is not None]}


def one_core(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """A token on one core, by the core's own time: for a machine that does other things too. No floor is about it."""
    torch.set_num_threads(1)
    prompts = torch.randint(SIZE.vocab_size, (1, PROMPT)).tolist()
    cases: dict[str, Case] = {"sas-p (kx)": own_case(CausalLM(SIZE.config("sas-p")).fold(), prompts, "kx")}
    cases |= onnx_cases(SIZE, prompts, folder, kinds=("32", "8", "4"))
    cases |= llama_cases(SIZE, prompts, folder)
    prefill: dict[str, list[float]] = {name: [] for name in cases}
    token: dict[str, list[float]] = {name: [] for name in cases}
    began = time.perf_counter()
    for _ in range(rounds):
        for name, case in cases.items():
            starts = [time.process_time()]
            for new in (1, 1 + FEW):
                case(new)
                starts.append(time.process_time())
            first, whole = starts[1] - starts[0], starts[2] - starts[1]
            prefill[name].append(first)
            token[name].append((whole - first) / FEW)
        if time.perf_counter() - began > seconds:
            break
    kinds = {"prefill": prefill, "token": token}
    return {"milliseconds": {kind: {name: 1e3 * min(t) for name, t in of.items()} for kind, of in kinds.items()}}


def batch(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """16 sequences, 32 tokens after 512. (llama-cpp-python decodes one sequence.)"""
    prompts = torch.randint(SIZE.vocab_size, (16, PROMPT)).tolist()
    cases: dict[str, Case] = {"sas-p (kx)": own_case(CausalLM(SIZE.config("sas-p")).fold(), prompts, "kx")}
    cases |= onnx_cases(SIZE, prompts, folder, kinds=("32", "8", "4"))
    found = measure(cases, rounds, CPU, 32, seconds=seconds)
    return {"milliseconds": _medians(found)}


def caches(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """What the cache remembers, at 8 bits: keys and inputs, inputs, inputs at 8 bits."""
    prompts = torch.randint(SIZE.vocab_size, (1, PROMPT)).tolist()
    kinds = ("8", "8 x", "8 x8")
    cases = onnx_cases(SIZE, prompts, folder, kinds=kinds)
    found = measure(cases, rounds, CPU, 64, seconds=seconds)
    sizes = {}
    for kind in kinds:
        cache = Decoder(folder / f"sas-p {kind}").new_cache(1)
        cache.make_room(SIZE.max_seq_len)
        sizes[kind] = cache.nbytes
    return {"milliseconds": _medians(found), "cache_bytes": sizes}


def memory(folder: Path, _: int, __: float) -> dict[str, Any]:
    """Bytes of the files, and the most memory that a process holds that opens one and decodes."""
    onnx_cases(SIZE, [[0]], folder, kinds=("32", "8", "4"))
    found = {}
    for kind in ("32", "8", "4"):
        place = folder / f"sas-p {kind}"
        script = (
            f"import sys; sys.path.insert(0, {str(place)!r})\n"
            f"from decoder import Decoder\nmodel = Decoder({str(place)!r}, threads=2)\n"
            f"for _ in model.generate([list(range({PROMPT}))], {NEW}, temperature=0): pass\n"
            "print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0].split()[1])"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        files = sum(path.stat().st_size for path in place.iterdir() if path.name.startswith("model.onnx"))
        found[kind] = {"file_bytes": files, "peak_bytes": 1024 * int(done.stdout)}
    return found


def error(_: Path, __: int, ___: float) -> dict[str, Any]:
    """What rounding changes in a Gaussian matrix, in units of its size, ours and llama.cpp's."""
    from gguf import GGMLQuantizationType, quants  # pyrefly: ignore

    weight = torch.randn(2304, 768, generator=torch.Generator().manual_seed(0)) * 0.02
    found = {}
    for bits, kind in ((8, GGMLQuantizationType.Q8_0), (4, GGMLQuantizationType.Q4_0)):
        options = OnnxOptions(bits=bits)  # pyrefly: ignore
        theirs = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
        own = relative_error(weight, pack(weight, bits, options.block, symmetric=options.symmetric))
        found[str(bits)] = {"ours": own, kind.name: float((theirs - weight).norm() / weight.norm())}
    return found


def _rows(found: Rows, kind: str) -> dict[str, Row]:
    return {row.name: row for row in found[kind]}


def _medians(found: Rows) -> dict[str, dict[str, float]]:
    return {kind: {row.name: row.milliseconds for row in rows} for kind, rows in found.items()}


def _best(found: Rows, names: tuple[str, ...], against: str, floor: float, kind: str = "token") -> Figure | None:
    """The fastest of ours against the fastest whose name begins so: each with the flags that suit it."""
    times = {name: row.milliseconds for name, row in _rows(found, kind).items()}
    others = [name for name in times if name == against or name.startswith(f"{against},")]
    if not others:
        return None
    own, other = (min(some, key=times.__getitem__) for some in (names, others))
    return Figure(f"{kind}: {own}", other, times[other] / times[own], floor)


PARTS: dict[str, Callable[[Path, int, float], dict[str, Any]]] = {
    part.__name__: part for part in (one_sequence, one_core, batch, caches, memory, error)
}


def main() -> int:
    """Measure, show, and say whether every figure is where it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["one_sequence"], help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600, help="no further round of a part after so many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where models are made and found again")
    parser.add_argument("--only-make", action="store_true", help="make the models and measure nothing")
    parser.add_argument("--json", type=Path, dest="output")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if given.only_make:
            llama_cases(SIZE, [[0]], folder)
            ctranslate_cases(SIZE, [[0]], folder)
            onnx_cases(SIZE, [[0]], folder, kinds=("32", "8", "4", "8 kx8", "4 kx8", "8 x", "8 x8"))
            return 0
        found = {part: PARTS[part](folder, given.rounds, given.seconds) for part in given.parts}
    found["versions"] = versions()
    if given.output:
        write_json(given.output, found)
    for part in given.parts:
        for kind, times in found[part].get("milliseconds", {}).items():
            show_table(f"{part}: {kind}, ms", ["case", "ms"], [[name, f"{ms:,.2f}"] for name, ms in times.items()])
    figures = found.get("one_sequence", {}).get("figures", [])
    if figures:
        lines = [[f["case"], f["against"], f"{f['ratio']:.3f}", f"{f['floor']:.2f}"] for f in figures]
        show_table("Times as fast", ["case", "against", "ratio", "floor"], lines)
    print(json.dumps(found))
    return 0 if all(figure["ratio"] >= figure["floor"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
