import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from skipless.config.run import DataConfig
from skipless.data import Tokens, corpus, prepare
from skipless.data.corpus import Corpus
from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError
from skipless.storage import hashing
from skipless.storage.lock import FolderLock
from skipless.storage.manifest import Damaged
from tests.helpers.corpora import ROOT, make_texts, write_jsonl

FILES = ["train.bin", "valid.bin", "tokenizer.json", "manifest.json"]


def all_tokens(tokens: Tokens) -> list[int]:
    return np.fromfile(tokens.path, dtype=np.uint16).tolist()


def documents(made: corpus.Corpus, split: str) -> list[str]:
    """The texts that were packed into a stream, read back."""
    ids, texts, start = all_tokens(getattr(made, split)), [], 0
    for end in [i for i, token in enumerate(ids) if token == made.tokenizer.end_id]:
        texts.append(made.tokenizer.decode(ids[start:end]))
        start = end + 1
    assert start == len(ids)
    return texts


def test_every_document_comes_back_once_and_in_order(cfg, texts, cache_dir):
    made = prepare(cfg, cache_dir=cache_dir)
    train, valid = documents(made, "train"), documents(made, "valid")
    assert [text for text in texts if text in set(train)] == train
    assert [text for text in texts if text in set(valid)] == valid
    assert sorted(train + valid) == sorted(texts)
    assert 0 < len(valid) < len(train)


def test_the_counts_are_right(cfg, texts, cache_dir):
    made = prepare(cfg, cache_dir=cache_dir)
    for split in ("train", "valid"):
        packed = documents(made, split)
        assert made.info["splits"][split] == {
            "documents": len(packed),
            "tokens": getattr(made, split).n_tokens,
            "dropped": 0,
            "bytes": sum(len(text.encode()) for text in packed),
        }
        assert getattr(made, split).n_bytes == made.info["splits"][split]["bytes"]
    assert made.info["config"] == cfg.model_dump()
    assert made.info["vocab_size"] == made.tokenizer.vocab_size
    assert len(made.fingerprint) == 64


def test_repetitions_and_blanks_are_dropped(cfg, texts, tmp_path, cache_dir):
    write_jsonl(tmp_path / "corpus.jsonl", [*texts, "", " \n", *texts[:7], "caf\u00e9", "cafe\u0301"])
    made = prepare(cfg, cache_dir=cache_dir)
    assert (made.info["duplicates"], made.info["empty"]) == (7, 2)
    assert sorted(documents(made, "train") + documents(made, "valid")) == sorted([*texts, "caf\u00e9", "cafe\u0301"])


def test_the_split_does_not_depend_on_order(cfg, texts, tmp_path, cache_dir):
    before = prepare(cfg, cache_dir=cache_dir)
    shuffled = random.Random(1).sample(texts, len(texts))
    write_jsonl(tmp_path / "corpus.jsonl", shuffled[5:])
    after = prepare(cfg, cache_dir=cache_dir)
    assert after.path != before.path
    assert set(documents(after, "valid")) == set(documents(before, "valid")) - set(shuffled[:5])


def test_a_held_out_source_is_not_in_the_training_text(cfg, texts, tmp_path, cache_dir):
    held_out = write_jsonl(tmp_path / "held-out.jsonl", [*texts[:5], "only here, in the held-out text"])
    made = prepare(cfg.replace(valid_source=f"jsonl:{held_out}"), cache_dir=cache_dir)
    assert documents(made, "valid") == [*texts[:5], "only here, in the held-out text"]
    assert documents(made, "train") == texts[5:]


def test_a_held_out_source_that_is_the_source_leaves_nothing(cfg, cache_dir):
    with pytest.raises(UserError, match=r"source .* has no documents that are left for it \(60 repetitions\)"):
        prepare(cfg.replace(valid_source=cfg.source), cache_dir=cache_dir)


def test_limits(cfg, texts, cache_dir):
    few = prepare(cfg.replace(max_documents=20), cache_dir=cache_dir)
    assert sorted(documents(few, "train") + documents(few, "valid")) == sorted(texts[:20])
    size = len(texts[0].encode()) + len(texts[1].encode()) + 1
    short = prepare(cfg.replace(max_bytes=size, valid_fraction=0), cache_dir=cache_dir)
    assert documents(short, "train") == texts[:3]
    assert len(short.valid) == short.valid.n_tokens == 0


def test_half_a_surrogate_pair_is_replaced(tmp_path, cache_dir):
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b and some more text"}\n')
    made = prepare(DataConfig(source=f"jsonl:{tmp_path}/x.jsonl", valid_fraction=0, seq_len=4), cache_dir=cache_dir)
    assert documents(made, "train") == ["a?b and some more text"]


def test_chunks_are_whole_windows_of_one_document(cfg, texts, cache_dir, monkeypatch):
    monkeypatch.setattr("skipless.data.documents.PIECE", 50)  # documents in pieces must give the same windows
    made = prepare(cfg.replace(packing="chunks"), cache_dir=cache_dir)
    stream = prepare(cfg, cache_dir=cache_dir)
    expected, dropped = [], 0
    for text in documents(stream, "train"):
        ids = made.tokenizer.encode(text)
        whole = len(ids) // 16 * 16
        expected += ids[:whole]
        dropped += len(ids) - whole
    assert all_tokens(made.train) == expected
    assert made.info["splits"]["train"]["dropped"] == dropped
    assert made.train.rows([0, 1]).tolist() == [expected[:16], expected[16:32]]
    share = len(expected) / (len(expected) + dropped)
    assert made.train.n_bytes == pytest.approx(share * stream.train.n_bytes, rel=0.05)


def test_batches_of_pieces_do_not_change_the_tokens(cfg, cache_dir, monkeypatch):
    whole = prepare(cfg, cache_dir=cache_dir)
    monkeypatch.setattr(corpus, "BATCH", 100)
    monkeypatch.setattr("skipless.data.documents.PIECE", 20)
    assert prepare(cfg, cache_dir=cache_dir, rebuild=True).fingerprint == whole.fingerprint


def test_seq_len_of_a_stream_shares_the_cache_and_other_settings_do_not(cfg, cache_dir):
    first = prepare(cfg, cache_dir=cache_dir)
    assert prepare(cfg.replace(seq_len=8), cache_dir=cache_dir).path == first.path
    changes = [{"vocab_size": 280}, {"valid_fraction": 0.3}, {"packing": "chunks"}, {"packing": "chunks", "seq_len": 8}]
    assert len({prepare(cfg.replace(**change), cache_dir=cache_dir).path for change in changes} | {first.path}) == 5


def test_a_given_tokenizer_is_used_and_its_content_is_in_the_key(cfg, texts, tmp_path, cache_dir):
    path = tmp_path / "tokenizer.json"
    first = prepare(cfg, cache_dir=cache_dir)
    first.tokenizer.save(path)
    given = cfg.replace(tokenizer=str(path), vocab_size=5000)
    second = prepare(given, cache_dir=cache_dir)
    assert second.fingerprint == first.fingerprint
    assert prepare(cfg.replace(tokenizer=str(path)), cache_dir=cache_dir).path == second.path
    prepare(cfg.replace(vocab_size=260), cache_dir=cache_dir).tokenizer.save(path)
    third = prepare(given, cache_dir=cache_dir)
    assert third.path != second.path
    assert third.tokenizer.vocab_size == 260


def test_the_tokenizer_sees_the_first_bytes_of_the_training_text_only(cfg, texts, cache_dir, monkeypatch):
    seen = {}
    original = corpus.train
    monkeypatch.setattr(corpus, "train", lambda k, t, **o: seen.update(texts=list(t())) or original(k, t, **o))
    made = prepare(cfg.replace(tokenizer_bytes=1000), cache_dir=cache_dir)
    train = documents(made, "train")
    assert seen["texts"] == train[: len(seen["texts"])]
    sizes = np.cumsum([len(text.encode()) for text in seen["texts"]])
    assert sizes[-2] < 1000 <= sizes[-1]


def test_wide_tokens_are_written(cfg, cache_dir, monkeypatch):
    monkeypatch.setattr(Tokenizer, "vocab_size", 70_000)
    made = prepare(cfg, cache_dir=cache_dir)
    assert made.info["dtype"] == "uint32"
    row = made.train.rows([0])[0]
    assert made.tokenizer.decode(row) in "".join(make_texts(60))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_mended(cfg, cache_dir, name, damage):
    first = prepare(cfg, cache_dir=cache_dir)
    content = (first.path / name).read_bytes()
    DAMAGE[damage](first.path / name)
    said = []
    again = prepare(cfg, cache_dir=cache_dir, progress=lambda stage, done, total: said.append(stage))
    assert said[0].startswith("rebuild: ")
    assert name in said[0]
    assert (again.path / name).read_bytes() == content
    assert again.fingerprint == first.fingerprint
    assert sorted(path.name for path in cache_dir.iterdir()) == sorted([first.path.name, f"{first.path.name}.lock"])


def test_no_byte_of_the_manifest_can_change_unnoticed(cfg, cache_dir):
    path = prepare(cfg, cache_dir=cache_dir).path / "manifest.json"
    data = path.read_bytes()
    for i in range(0, len(data), 7):
        path.write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
        with pytest.raises(Damaged):
            Corpus.open(path.parent, cfg)


def test_large_files_are_checked_at_both_ends_and_in_the_middle(cfg, cache_dir, monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLED_FROM", 100)
    monkeypatch.setattr(hashing, "SAMPLE", 16)
    made = prepare(cfg, cache_dir=cache_dir)
    assert {"size", "sha256", "sampled"} == set(made.info["files"]["train.bin"])
    path = made.path / "train.bin"
    original = path.read_bytes()
    for place in (0, len(original) // 2, len(original) - 1):
        data = bytearray(original)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(Damaged, match=r"train\.bin has changed"):
            Corpus.open(made.path, cfg)
    data = bytearray(original)
    data[40] ^= 1  # between the samples, where a large file is not read again
    path.write_bytes(data)
    assert Corpus.open(made.path, cfg).fingerprint == made.fingerprint


def test_an_intact_cache_is_opened_and_not_built(cfg, cache_dir, monkeypatch):
    first = prepare(cfg, cache_dir=cache_dir)
    monkeypatch.setattr(corpus, "_build", lambda *args: pytest.fail("built again"))
    assert prepare(cfg, cache_dir=cache_dir).fingerprint == first.fingerprint


def test_data_that_version_0_1_0_prepared_is_not_built_again(tmp_path, cache_dir, monkeypatch):
    old = ROOT / "tests" / "fixtures" / "v0_1_0"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(old / "modules", "modules")
    cfg = DataConfig(**json.loads((old / "corpus" / "manifest.json").read_text())["config"])
    shutil.copytree(old / "corpus", cache_dir / corpus._Plan.make(cfg).key)
    monkeypatch.setattr(corpus, "_build", lambda *args: pytest.fail("built again"))
    made = prepare(cfg, cache_dir=cache_dir, progress=lambda *said: pytest.fail(f"{said}"))
    assert made.fingerprint == json.loads((old / "run" / "config.json").read_text())["data"]["fingerprint"]


def test_the_cache_is_where_the_environment_says(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "elsewhere"))
    assert prepare(cfg).path.parent == tmp_path / "elsewhere"


def test_an_error_leaves_nothing_behind(cfg, texts, tmp_path, cache_dir):
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match="line 61: not valid JSON"):
        prepare(cfg, cache_dir=cache_dir)
    assert [path.suffix for path in cache_dir.iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read_is_an_error(cfg, texts, tmp_path, cache_dir):
    def touch(stage: str, done: int, total: int | None) -> None:
        os.utime(tmp_path / "corpus.jsonl", ns=(1, 1))

    with pytest.raises(UserError, match="changed while it was read"):
        prepare(cfg, cache_dir=cache_dir, progress=touch)


def test_a_killed_build_leaves_no_half_cache(cfg, cache_dir, tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom skipless.config import DataConfig\n"
        "from skipless.data import corpus, prepare\ncorpus.BATCH = 500\n"
        "def progress(stage, done, total):\n"
        "    if stage == 'tokenise' and done > 2000:\n        print('now', flush=True)\n        time.sleep(600)\n"
        "cfg = DataConfig.model_validate_json(sys.argv[1])\n"
        "prepare(cfg, cache_dir=Path(sys.argv[2]), progress=progress)"
    )
    command = [sys.executable, "-c", script, cfg.model_dump_json(), str(cache_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    left = [path.name for path in cache_dir.iterdir() if path.is_dir()]
    assert len(left) == 1
    assert left[0].startswith(".tmp-")
    made = prepare(cfg, cache_dir=cache_dir)
    assert sorted(path.name for path in cache_dir.iterdir()) == sorted([made.path.name, f"{made.path.name}.lock"])
    assert made.info["splits"]["train"]["documents"] + made.info["splits"]["valid"]["documents"] == 60


def test_of_two_builders_one_waits(cfg, cache_dir):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom skipless.config import DataConfig\n"
        "from skipless.data import prepare\nsaid = []\n"
        "def progress(stage, done, total):\n    said.append(stage)\n    time.sleep(0.3 * (stage == 'tokenise'))\n"
        "cfg = DataConfig.model_validate_json(sys.argv[1])\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "made = prepare(cfg, cache_dir=Path(sys.argv[2]), progress=progress)\n"
        "print(made.fingerprint, 'tokenise' in said)"
    )
    command = [sys.executable, "-c", script, cfg.model_dump_json(), str(cache_dir)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=600)[0].split() for process in processes]
    assert len({fingerprint for fingerprint, _ in answers}) == 1
    assert sorted(built for _, built in answers) == ["False", "False", "True"]


def test_who_waits_is_told(cfg, cache_dir):
    path, said = prepare(cfg, cache_dir=cache_dir).path, []
    shutil.rmtree(path)
    lock = FolderLock(path, file=path.with_name(f"{path.name}.lock"))
    lock.acquire()

    def progress(stage, done, total):
        said.append(stage)
        lock.release()

    assert prepare(cfg, cache_dir=cache_dir, progress=progress).path == path
    assert said[0] == "wait for another process"
    assert "tokenise" in said


MEASURE = """
import re, sys
from pathlib import Path
from skipless.config import DataConfig
from skipless.data import corpus, documents, prepare
corpus.BATCH, documents.PIECE = 2**16, 2**14
prepare(DataConfig(source=sys.argv[1], tokenizer=sys.argv[2], valid_fraction=0.1), cache_dir=Path(sys.argv[3]))
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak from /proc; getrusage's is the parent's"
)
def test_memory_does_not_grow_with_the_corpus(tmp_path, cfg, cache_dir):
    prepare(cfg, cache_dir=cache_dir).tokenizer.save(tmp_path / "tokenizer.json")
    peaks = []
    for n in (4_000, 24_000):
        path = write_jsonl(tmp_path / f"{n}.jsonl", make_texts(n, words=60))
        command = [sys.executable, "-c", MEASURE, f"jsonl:{path}", str(tmp_path / "tokenizer.json"), str(cache_dir)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    growth = 1024 * (peaks[1] - peaks[0])
    # the texts have grown by 6 MB, and their tokens in Python's lists would by more than 20 MB
    assert growth < 12e6


def test_progress_is_told_in_bytes(cfg, tmp_path, texts, cache_dir):
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i}.txt").write_text(text)
    calls = []
    total = sum(len(text) for text in texts)
    prepare(
        cfg.replace(source=f"files:{tmp_path}/files/*", tokenizer_bytes=1000),
        cache_dir=cache_dir,
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == ("tokenise", total, total)
    assert {stage for stage, _, _ in calls} == {"train tokenizer", "tokenise"}


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        ([], {}, r"has no documents \(0 blank ones\)"),
        (["", " "], {}, r"has no documents \(2 blank ones\)"),
        (["one document"], {"valid_fraction": 1e-9}, "none of the 1 documents .* validation part"),
        (["short", "texts"], {"valid_fraction": 0, "seq_len": 1000}, "training text has .* not one row of 1001"),
    ],
)
def test_too_little_text_is_an_error(tmp_path, cache_dir, lines, changes, message):
    path = write_jsonl(tmp_path / "x.jsonl", lines)
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(source=f"jsonl:{path}", vocab_size=300).replace(**changes), cache_dir=cache_dir)


def test_a_cache_that_cannot_be_written_is_an_error(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache folder .* cannot be written .*SKIPLESS_CACHE"):
        prepare(cfg, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    "bad",
    [
        {"vocab_size": 256},
        {"tokenizer": "wordpiece", "vocab_size": 10},
        {"packing": "chunks", "seq_len": 1},
        {"valid_fraction": 1},
    ],
)
def test_a_bad_configuration_is_refused(bad):
    with pytest.raises(ValidationError):
        DataConfig(**bad)


def test_the_data_package_does_not_load_torch():
    script = "import sys, skipless.data; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out == "False\n"


def test_where_prepared_data_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SKIPLESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert corpus.default_cache_dir() == tmp_path / "home" / ".cache" / "skipless" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert corpus.default_cache_dir() == tmp_path / "caches" / "skipless" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert corpus.default_cache_dir() == tmp_path / "home" / ".cache" / "skipless" / "data"
    monkeypatch.setenv("SKIPLESS_CACHE", "~/mine")
    assert corpus.default_cache_dir() == tmp_path / "home" / "mine"
