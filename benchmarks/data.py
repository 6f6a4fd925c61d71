"""How fast a corpus is prepared, against calling the tokeniser's `encode_batch` on the same texts in memory.

python benchmarks/data.py [--bytes N] [--rounds N]

Both use one tokeniser, trained beforehand. The bare call gets the documents that `prepare` keeps, sixty-four at a
time, which is faster than all at once. The two take turns, so that a change in the machine's load meets both.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from skipless.config.run import DataConfig
from skipless.data import prepare
from skipless.data.documents import Counts, distinct, seen_on_disk
from skipless.data.sources import open_source
from skipless.data.tokenizer import train

BARE_BATCH = 64


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8_000_000, help="how much text (default 8 MB)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.bytes, options.rounds)
    print(f"{'way':<20} {'s (median)':>10} {'MB/s':>7}")
    for way, seconds in figures["seconds"].items():
        print(f"{way:<20} {seconds:>10.2f} {figures['bytes'] / seconds / 1e6:>7.2f}")
    print(f"prepare runs at {figures['ratio']:.2f} of the speed of encode_batch")
    print(json.dumps(figures))


def measure(folder: Path, n_bytes: int, rounds: int) -> dict:
    """Median seconds of each way over some rounds, and the median over the rounds of the ratio of their speeds."""
    cfg = DataConfig(source="python-stdlib", max_bytes=n_bytes)
    texts = documents(cfg, folder)
    train("bpe", lambda: iter(texts), vocab_size=cfg.vocab_size).save(folder / "tokenizer.json")
    given = cfg.replace(tokenizer=str(folder / "tokenizer.json"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ways: dict[str, Callable[[], object]] = {
        "encode_batch": lambda: bare(backend.encode_batch, texts),
        "encode_batch_fast": lambda: bare(backend.encode_batch_fast, texts),
        "prepare": lambda: prepare(given, cache_dir=folder / "cache", rebuild=True),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            taken[way].append(time.perf_counter() - start)
    seconds = {way: statistics.median(times) for way, times in taken.items()}
    return {
        "benchmark": "data",
        "ratio": ratio(taken["encode_batch"], taken["prepare"]),
        "ratio_to_fast": ratio(taken["encode_batch_fast"], taken["prepare"]),
        "seconds": seconds,
        "all_seconds": taken,
        "bytes": sum(len(text.encode()) for text in texts),
        "documents": len(texts),
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }


def ratio(bare_seconds: list[float], seconds: list[float]) -> float:
    """The median over the rounds: neighbours in time met the same load."""
    return statistics.median(b / s for b, s in zip(bare_seconds, seconds, strict=True))


def documents(cfg: DataConfig, folder: Path) -> list[str]:
    """The distinct documents that `prepare` tokenises."""
    with seen_on_disk(folder / "seen.sqlite") as seen:
        source = open_source(cfg.source_text)
        return [d.text for d in distinct(source, seen, Counts(), max_documents=None, max_bytes=cfg.max_bytes)]


def bare(encode: Callable[..., list[tokenizers.Encoding]], texts: list[str]) -> int:
    """Tokenise and count, and nothing else."""
    starts = range(0, len(texts), BARE_BATCH)
    return sum(len(e.ids) for i in starts for e in encode(texts[i : i + BARE_BATCH], add_special_tokens=False))


if __name__ == "__main__":
    main()
