"""Several sources with weights: exact in the long run, a function of seed and number alone, resumed bit for bit."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.cli import run as skipless
from skipless.config.run import DataConfig
from skipless.data import Tokens, prepare
from skipless.data.mixed_tokens import LONGEST_PERIOD, MixedTokens, whole_counts
from skipless.errors import UserError
from skipless.training.train import train
from tests.helpers.tiny_runs import Stop, assert_same_run, stop_at, tiny

# ----------------------------------------------------------------------------------- the stream


def tokens(folder, name: str, rows: int, first: int) -> Tokens:
    """A file whose row i is full of first + i."""
    path = folder / f"{name}.bin"
    np.repeat(np.arange(first, first + rows), 4).astype("<u2").tofile(path)
    return Tokens(path, "uint16", 4, "chunks")


@pytest.fixture
def mixed(tmp_path):
    def make(sizes, shares):
        parts = [tokens(tmp_path, f"t{n}", size, 1000 * n) for n, size in enumerate(sizes)]
        return MixedTokens(parts, [Fraction(str(share)) for share in shares])

    return make


def files_of(batch: np.ndarray) -> np.ndarray:
    return batch[:, 0] // 1000


@pytest.mark.parametrize(
    ("shares", "period"), [(("0.7", "0.3"), 10), (("1", "1"), 2), (("0.5", "0.25", "0.25"), 4), (("2", "1"), 3)]
)
def test_every_period_has_exactly_the_shares(shares, period, mixed):
    stream = mixed((7, 11, 5)[: len(shares)], shares)
    assert stream.period == period
    wanted = [Fraction(share) / sum(map(Fraction, shares)) * period for share in shares]
    found = files_of(stream.batch(3, 0, 50 * period)).reshape(50, period)
    assert all(np.bincount(row, minlength=len(shares)).tolist() == wanted for row in found)


@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(1, 40), min_size=2, max_size=5), seed=st.integers(0, 2**40), count=st.integers(1, 900)
)
def test_no_source_is_ever_away_from_its_share_by_a_period(weights, seed, count):
    stream = MixedTokens.__new__(MixedTokens)
    stream.counts = whole_counts([Fraction(weight) for weight in weights])
    stream.period, stream._ends = sum(stream.counts), np.cumsum(stream.counts)
    which, numbers = stream.places(seed, np.arange(count))
    for number, weight in enumerate(weights):
        mine = which == number
        assert abs(mine.sum() - count * weight / sum(weights)) < stream.period
        whole = count // stream.period * stream.counts[number]
        assert len(set(numbers[mine])) == mine.sum()
        assert set(range(whole)) <= set(numbers[mine].tolist())


def test_any_part_of_the_stream_is_the_same_alone(mixed):
    stream = mixed((7, 11), ("0.7", "0.3"))
    whole = stream.batch(5, 0, 200)
    for first, count in ((0, 1), (13, 40), (199, 1), (57, 0)):
        assert np.array_equal(stream.batch(5, first, count), whole[first : first + count])
    assert not np.array_equal(stream.batch(6, 0, 200), whole)


def test_each_file_is_gone_through_in_epochs_of_its_own(mixed):
    stream = mixed((7, 12), ("0.7", "0.3"))
    found = stream.batch(1, 0, 400)[:, 0]
    for number, size in enumerate((7, 12)):
        rows = found[found // 1000 == number] - 1000 * number
        epochs = rows[: len(rows) // size * size].reshape(-1, size)
        assert len(epochs) >= 10
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())


def test_rows_are_counted_through_the_files(mixed):
    stream = mixed((7, 11), ("0.7", "0.3"))
    assert len(stream) == 18
    assert stream.rows([0, 6, 7, 17])[:, 0].tolist() == [0, 6, 1000, 1010]
    with pytest.raises(IndexError):
        stream.rows([18])


def test_shares_that_are_too_fine_are_rounded():
    counts = whole_counts([Fraction(1), Fraction("3.14159265358979")])
    assert sum(counts) == LONGEST_PERIOD
    assert counts[0] / LONGEST_PERIOD == pytest.approx(1 / 4.14159265358979, abs=1e-6)
    assert min(whole_counts([Fraction(1, 10**12), Fraction(1)])) == 1


# ----------------------------------------------------------------------------------- the corpus


@pytest.fixture
def texts(tmp_path):
    """Two sources without a common line but one document, which is in both."""
    (tmp_path / "py").mkdir()
    for number in range(30):
        (tmp_path / "py" / f"{number}.py").write_text(f"alpha_{number} = alpha + {number}\n" * 40)
    (tmp_path / "py" / "both.py").write_text("both both both\n")
    lines = [{"body": f"the quick brown fox number {number} jumps\n" * 30} for number in range(30)]
    lines.append({"body": "both both both\n"})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"files:{tmp_path}/py/*.py", f"jsonl:{tmp_path}/b.jsonl#body"


def config(texts, weights=("0.7", "0.3"), **more) -> DataConfig:
    source = [f"{text}={weight}" for text, weight in zip(texts, weights, strict=True)]
    return DataConfig(source=source, vocab_size=300, seq_len=8, valid_fraction=0.2, **more)


def test_a_corpus_of_several_sources(texts, cache_dir):
    corpus = prepare(config(texts), cache_dir=cache_dir)
    python, prose = corpus.train.parts
    splits = corpus.info["splits"]
    assert set(splits) == {"train-0", "train-1", "valid"}
    assert corpus.info["duplicates"] == 1
    assert sum(split["documents"] for split in splits.values()) == 61
    decode = corpus.tokenizer.decode
    assert "fox" not in decode(python.rows(range(len(python))).flatten().tolist())
    assert "alpha" not in decode(prose.rows(range(len(prose))).flatten().tolist())
    held_out = decode(corpus.valid.rows(range(len(corpus.valid))).flatten().tolist())
    assert "fox" in held_out
    assert "alpha" in held_out
    drawn = corpus.train.batch(0, 0, 1000)
    prose_rows = {tuple(row) for row in prose.rows(range(len(prose)))}
    assert sum(tuple(row) in prose_rows for row in drawn) == 300
    again = prepare(config(texts), cache_dir=cache_dir)
    assert again.fingerprint == corpus.fingerprint


def test_the_tokeniser_is_trained_by_the_shares(texts, tmp_path):
    few = {"tokenizer_bytes": 4000}
    code, prose = (
        prepare(config(texts, weights, **few), cache_dir=tmp_path / "cache").tokenizer.to_json()
        for weights in (("0.99", "0.01"), ("0.01", "0.99"))
    )
    for merges, first in ((json.loads(one)["model"]["merges"], one is code) for one in (code, prose)):
        assert (merges.index(["al", "pha"]) < merges.index(["Ġfo", "x"])) == first


@pytest.mark.filterwarnings("error")
def test_a_mix_goes_to_json_and_back(texts):
    cfg = config(texts)
    assert DataConfig.model_validate(json.loads(cfg.model_dump_json())) == cfg
    assert cfg.model_dump(mode="json")["source"] == list(cfg.source)


def test_one_source_is_what_it_was(texts, cache_dir):
    plain = DataConfig(source=texts[0], vocab_size=300, seq_len=8, valid_fraction=0.2)
    assert plain.model_dump()["source"] == texts[0]
    assert plain.mix is None
    assert set(prepare(plain, cache_dir=cache_dir).info["splits"]) == {"train", "valid"}


def test_killed_it_goes_on_bit_for_bit(texts, tmp_path, cache_dir):
    source = {"data.source": [f"{texts[0]}=2", f"{texts[1]}=1"]}
    cfg = tiny("", source, {"train.batch_size": 4})
    where = {"trackers": [], "cache_dir": cache_dir}
    train(cfg, tmp_path / "reference", **where)
    with pytest.raises(Stop):
        train(cfg, tmp_path / "run", observer=stop_at(6), **where)
    train(cfg, tmp_path / "run", resume=True, **where)
    assert_same_run(tmp_path / "run", tmp_path / "reference")


# -------------------------------------------------------------------------------- the command line


def test_the_command_and_a_file(texts, tmp_path, capsys, cache_dir):
    words = ["--set", "data.vocab_size=300", "--seq-len", "8", "--cache-dir", str(cache_dir), "--json"]
    mixed = [f"{texts[0]}=0.7", f"{texts[1]}=0.3"]
    assert skipless(["data", "build", "--source", mixed[0], "--source", mixed[1], *words]) == 0
    first = json.loads(capsys.readouterr().out)
    file = tmp_path / "mix.yaml"
    file.write_text(json.dumps({"data": {"source": mixed, "valid_source": None}}))
    assert skipless(["data", "build", "--config", str(file), *words]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == first["path"]
    assert set(first["splits"]) == {"train-0", "train-1", "valid"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{a}=0.7", "{b}"], "needs a weight above 0 at its end"),
        (["{a}=0.7", "{b}=0"], "needs a weight above 0 at its end"),
        (["{a}=0.7", "{b}=-1"], "needs a weight above 0 at its end"),
        (["{a}=nan", "{b}=1"], "needs a weight above 0 at its end"),
        (["{a}=inf", "{b}=1"], "needs a weight above 0 at its end"),
        (["{a}=1/2", "{b}=1"], "needs a weight above 0 at its end"),
        (["{a}=0.7", "{a}=0.3"], "a source is named twice"),
        (["{a}=0.7", "fils:x=0.3"], "unknown source 'fils'"),
        (["{a}=0.7", "files:/nowhere/*.py=0.3"], "no file matches"),
    ],
)
def test_bad_weights_are_one_line(given, said, texts, tmp_path, capsys):
    words = [word for one in given for word in ("--source", one.format(a=texts[0], b=texts[1]))]
    assert skipless(["data", "build", *words, "--seq-len", "8", "--cache-dir", str(tmp_path / "cache")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", [5, [5, 6], None, {"a": 1}])
def test_what_is_no_source_is_one_line(value):
    with pytest.raises(ValueError, match="a source is a text, or several are a list"):
        DataConfig(source=value)


def test_a_source_that_brings_nothing_new_is_refused(texts, tmp_path):
    (tmp_path / "copy.jsonl").write_text(json.dumps({"text": "both both both\n"}) + "\n")
    cfg = config((texts[0], f"jsonl:{tmp_path}/copy.jsonl"))
    with pytest.raises(UserError, match="has no documents to train on that are its own"):
        prepare(cfg, cache_dir=tmp_path / "cache")
