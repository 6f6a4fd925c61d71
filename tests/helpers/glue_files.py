"""A little GLUE: files in the official layout, made by the tests; and where the real ones are, if they are."""

import os
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NEAR = ROOT.parent / "shared" / "data" / "glue"


def real_glue() -> Path:
    """The folder of the real files, or the test is skipped."""
    named = os.environ.get("SKIPLESS_GLUE_DIR")
    folder = Path(named) if named else NEAR
    if not folder.is_dir():
        pytest.skip("no GLUE files: set SKIPLESS_GLUE_DIR")
    return folder


def write_tsv(path: Path, rows, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join("\t".join(map(str, row)) + end for row in rows).encode())
    return path


WORDS = ["alpha", "beta", "gamma", "delta", "def", "return"]
"""Words that tell the answer, and that the tiny encoder's tokeniser knows."""


def sentence(rng: random.Random, answer: int) -> str:
    return " ".join([WORDS[answer], *rng.choices("+-()*", k=rng.randrange(2, 12))])


def small_glue(folder: Path, rows: int = 48, seed: int = 0) -> Path:
    """CoLA, SST-2, STS-B, MRPC, RTE and MNLI whose answers can be read off the first word."""
    rng = random.Random(seed)
    kinds = {
        "CoLA": (None, lambda c: ["x", c, "", sentence(rng, c)], 2),
        "SST-2": (["sentence", "label"], lambda c: [sentence(rng, c), c], 2),
        "STS-B": (
            ["index", "sentence1", "sentence2", "score"],
            lambda c: [0, sentence(rng, c), sentence(rng, 0), f"{c:.3f}"],
            6,
        ),
        "MRPC": (
            ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            lambda c: [c, 1, 2, sentence(rng, c), sentence(rng, 0)],
            2,
        ),
        "RTE": (
            ["index", "sentence1", "sentence2", "label"],
            lambda c: [0, sentence(rng, 0), sentence(rng, c), ["entailment", "not_entailment"][c]],
            2,
        ),
        "MNLI": (
            ["index", "promptID", "sentence1", "sentence2", "label1", "gold_label"],
            lambda c: [0, 1, sentence(rng, c), "-", "-", ["entailment", "neutral", "contradiction"][c]],
            3,
        ),
    }
    for name, (header, make, classes) in kinds.items():
        devs = ["dev_matched", "dev_mismatched"] if name == "MNLI" else ["dev"]
        for part, count in (("train", rows), *((dev, rows // 2) for dev in devs)):
            made = [make(rng.randrange(classes)) for _ in range(count)]
            write_tsv(folder / name / f"{part}.tsv", [header, *made] if header else made)
    write_tsv(folder / "CoLA" / "test.tsv", [["index", "sentence"], [0, "good one"], [1, "bad one"]])
    pairs = [["index", "sentence1", "sentence2"], [0, "good", "one"], [1, "bad", "one"], [7, "w5", "x"]]
    for name in ("STS-B/test", "RTE/test", "MNLI/test_matched", "diagnostic/diagnostic"):
        write_tsv(folder / f"{name}.tsv", pairs)
    return folder
