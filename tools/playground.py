"""Builds the playground: the page in docs/playground, ONNX Runtime Web, and models that `skipless demo` has trained.

    skipless demo
    python -m tools.playground site/playground
    python -m tools.playground site/playground runs/one runs/another

Everything that the page loads is a script, so that it works from a folder as from a server, and offline. ONNX Runtime
comes from npm's registry, at a version and with a hash that stand below, and is kept in the cache for the next time.
"""

import argparse
import base64
import gzip
import hashlib
import json
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from skipless.data.corpus import default_cache_dir
from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError
from skipless.experiments.report.summary import summarise
from skipless.nn.model import CausalLM
from skipless.runs import Run, find_run, load
from skipless.storage.atomic_files import make_folder, write_bytes, write_text
from tools.opened_model import to_graph, trained_gains

PAGE = Path(__file__).parents[1] / "docs" / "playground"
RUNS = ("runs/demo-pre-ln", "runs/demo-sas-p")

RUNTIME = "1.30.0"
"""The version of onnxruntime-web."""
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""SHA-512 of its package, as the registry and a lock file have it."""
NEEDED = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""What a page needs of it that computes on the CPU."""


def fetch_runtime(cache: Path) -> dict[str, bytes]:
    """The files of ONNX Runtime Web, from the cache or from npm's registry."""
    path = cache / f"onnxruntime-web-{RUNTIME}.tgz"
    if not path.exists():
        address = f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{RUNTIME}.tgz"
        try:
            with urllib.request.urlopen(address, timeout=300) as response:
                data = response.read()
        except (urllib.error.URLError, TimeoutError) as error:
            raise UserError(f"{address} cannot be fetched: {error}") from None
        _check(data, address)
        make_folder(cache)
        write_bytes(path, data)
    _check(path.read_bytes(), str(path))
    with tarfile.open(path) as package:
        return {name: package.extractfile(f"package/dist/{name}").read() for name in NEEDED}  # pyrefly: ignore


def _check(data: bytes, where: str) -> None:
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != INTEGRITY:
        raise UserError(f"{where} is not the package of onnxruntime-web {RUNTIME}: its hash is another")


def as_script(name: str, data: bytes) -> str:
    """Bytes as a script that lays them down under a name: gzip, then base64."""
    packed = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return f"ASSETS[{json.dumps(name)}] = {json.dumps(packed)};\n"


def describe(run: Run, model: CausalLM) -> dict[str, Any]:
    """What the page says of a model, and the gains that it begins with."""
    mixing, branches = trained_gains(model)
    summary, cfg = summarise(run), model.config
    return {
        "name": summary.block,
        "layout": cfg.block.layout,
        "layers": cfg.n_layer,
        "heads": cfg.n_head,
        "width": cfg.d_model,
        "context": cfg.max_seq_len,
        "parameters": summary.parameters,
        "steps": summary.steps,
        "loss": summary.valid_loss,
        "mixing": mixing.tolist(),
        "branches": branches.tolist(),
    }


def tokenizer_for_the_page(tokenizer: Tokenizer) -> dict[str, Any]:
    """Vocabulary, merges and special tokens; a UserError where the page could not read text as this one does."""
    content = json.loads(tokenizer.to_json())
    model, splits = content["model"], content["pre_tokenizer"] or {}
    plain = model["type"] == "BPE" and splits.get("type") == "ByteLevel" and not content["normalizer"]
    if not plain or splits.get("add_prefix_space") or not splits.get("use_regex", True):
        raise UserError("the playground reads text by byte-level BPE without a normaliser, and this tokeniser differs")
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges, "special": list(tokenizer.special_ids), "end": tokenizer.end_id}


def build(out: Path, runs: list[str], cache: Path) -> dict[str, int]:
    """Write the page and all that it loads; the bytes of each file."""
    found = [find_run(run) for run in runs]
    models = [load(run.folder) for run in found]
    if not all(isinstance(model, CausalLM) for model in models):
        raise UserError("the playground writes text: give runs of causal models")
    tokenizers = [tokenizer_for_the_page(model.tokenizer) for model in models]
    if any(one != tokenizers[0] for one in tokenizers):
        raise UserError("these runs have different tokenisers, and the playground has one text for all")
    scripts = {f"{number}.onnx": to_graph(model) for number, model in enumerate(models)}  # pyrefly: ignore
    runtime = fetch_runtime(cache)
    make_folder(out / "assets")
    for path in sorted(PAGE.iterdir()):
        shutil.copyfile(path, out / path.name)
    write_bytes(out / "assets" / "ort.js", runtime[NEEDED[0]])
    for name, data in {"ort.mjs": runtime[NEEDED[1]], "ort.wasm": runtime[NEEDED[2]], **scripts}.items():
        write_text(out / "assets" / f"{name}.js", as_script(name, data))
    about = [describe(run, model) for run, model in zip(found, models, strict=True)]  # pyrefly: ignore
    content = json.dumps({"models": about, "tokenizer": tokenizers[0], "runtime": RUNTIME})
    write_text(out / "assets" / "manifest.js", f"const MANIFEST = {content};\n")
    return {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}


def main() -> int:
    """Build, and say what the page weighs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="The folder to write.")
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="Runs; by default those of `skipless demo`.")
    parser.add_argument("--cache-dir", type=Path, default=None, help="Where ONNX Runtime's package is kept.")
    given = parser.parse_args()
    try:
        sizes = build(given.out, given.runs, given.cache_dir or default_cache_dir() / "npm")
    except UserError as error:
        print(f"playground: {error}", file=sys.stderr)
        return error.status
    packed = {name: len(gzip.compress((given.out / name).read_bytes(), 6)) for name in sizes}
    for name, size in sizes.items():
        print(f"{size / 1e6:8.2f} MB {packed[name] / 1e6:8.2f} MB as a server sends it  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.2f} MB {sum(packed.values()) / 1e6:8.2f} MB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
