import os
import re
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.data import documents
from skipless.data.documents import Document, pieces
from skipless.data.tokenizer import Tokenizer, fetch, train
from skipless.errors import UserError
from tests.helpers.corpora import ROOT, make_texts

TEXTS = make_texts(60)
BPE = train("bpe", lambda: iter(TEXTS), vocab_size=300)
WORDPIECE = train("wordpiece", lambda: iter(TEXTS), vocab_size=200, lowercase=True)
BITS = ["a", " ", "\n", "\n\n", ";", "def", "\t", "\r", "\u00e9", "1"]


@settings(max_examples=50)
@given(st.text())
def test_byte_level_text_decodes_to_itself(text):
    assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
def test_text_never_spells_a_special_token(tokenizer):
    ids = tokenizer.encode("a <|endoftext|> b [MASK] c [SEP]")
    assert not set(ids) & (set(tokenizer.special_ids) - {1 if tokenizer is WORDPIECE else -1})
    assert tokenizer.encode_batch(["a <|endoftext|> b [MASK] c [SEP]"]) == [ids]


def test_ids_of_the_special_tokens():
    assert (BPE.end_id, BPE.pad_id, BPE.mask_id, BPE.special_ids) == (0, 0, None, (0,))
    assert (WORDPIECE.end_id, WORDPIECE.pad_id, WORDPIECE.mask_id, WORDPIECE.special_ids) == (3, 0, 4, (0, 1, 2, 3, 4))
    assert BPE.decode([0], keep_special=True) == "<|endoftext|>"
    assert BPE.decode([0]) == ""


def test_wordpiece_normalises_and_joins():
    assert WORDPIECE.decode(WORDPIECE.encode("The  MODEL trains")) == "the model trains"
    assert WORDPIECE.encode("\u4e00") == [1]


def test_the_size_of_the_vocabulary_is_what_the_corpus_gives():
    assert BPE.vocab_size == 300
    small = train("bpe", lambda: iter(["ab ab"]), vocab_size=5000)
    assert 257 <= small.vocab_size < 265
    assert max(small.encode("ab ab \u00ff")) < small.vocab_size


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for again in (Tokenizer.load(tmp_path / "tokenizer.json"), Tokenizer.load(tmp_path), fetch(str(tmp_path))):
        assert again.to_json() == tokenizer.to_json()
        assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
        assert again.special_ids == tokenizer.special_ids


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_is_the_same_in_every_process(kind):
    script = (
        "import hashlib\nfrom skipless.data.tokenizer import train\nfrom tests.helpers.corpora import make_texts\n"
        f"t = train({kind!r}, lambda: iter(make_texts(60)), vocab_size=300)\n"
        "print(hashlib.sha256(t.to_json().encode()).hexdigest())"
    )
    command = [sys.executable, "-c", script]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout for _ in range(2)]
    assert runs[0] == runs[1] != ""


def test_a_rare_letter_is_unknown_and_a_tie_is_broken_by_code_point():
    tokenizer = train("wordpiece", lambda: iter(["".join(chr(0x100 + i) for i in range(64))]), vocab_size=64)
    assert tokenizer.encode(chr(0x100)) != [1]
    assert tokenizer.encode(chr(0x100 + 63)) == [1]


def test_letters_of_other_scripts_do_not_fill_the_vocabulary():
    words, strange = "the quick brown fox jumps over a lazy dog " * 20_000, "".join(chr(0x4E00 + i) for i in range(60))
    tokenizer = train("wordpiece", lambda: iter([words, strange]), vocab_size=2048)
    assert all(tokenizer.encode(letter) == [1] for letter in strange)
    assert tokenizer.encode("quick") not in ([1], [])
    assert tokenizer.vocab_size < 120  # 26 letters in two forms, 9 words and their parts


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
@settings(max_examples=60)
@given(text=st.lists(st.sampled_from(BITS), max_size=80).map("".join))
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tokenizer, text):
    limit, documents.PIECE = documents.PIECE, 5
    try:
        parts = list(pieces("train", Document(text, len(text.encode()), b""), cut=tokenizer.cuts_at_newlines()))
    finally:
        documents.PIECE = limit
    assert "".join(part.text for part in parts) == text
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [token for part in parts for token in tokenizer.encode(part.text)] == tokenizer.encode(text)


def test_long_documents_are_cut():
    document = Document("word\n" * 100_000, 500_000, b"")
    assert len(list(pieces("train", document, cut=True))) > 5
    assert len(list(pieces("train", document, cut=False))) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/tokenizer.json", "no such file; allowed: bpe, wordpiece, the path"),
        ("a/b/c", "no such file"),
        ("word piece", "did you mean 'wordpiece'"),
    ],
)
def test_a_missing_file_is_named(name, message):
    with pytest.raises(UserError, match=message):
        fetch(name)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 1}', "not json"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"t\.json' is not a tokenizer\.json"):
        fetch(str(tmp_path / "t.json"))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="no end-of-text token"):
        fetch(str(tmp_path / "t.json"))


def test_offline_the_hub_is_a_clear_error(tmp_path):
    script = (
        "from skipless.data.tokenizer import fetch\nfrom skipless.errors import UserError\n"
        "try:\n    fetch('some-one/some-tokenizer')\nexcept UserError as error:\n    print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    assert out.startswith("tokenizer 'some-one/some-tokenizer' cannot be fetched from the hub (")
    assert out.count("\n") == 1


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_word_without_end_is_learnt_from_in_pieces(kind, monkeypatch):
    """The time to learn from a word grows with the square of its length, so none is longer than a bound."""
    from skipless.data import tokenizer

    seen = []
    monkeypatch.setitem(
        tokenizer.TRAINERS, kind, lambda texts, *more: seen.extend(texts()) or original(lambda: iter(seen), *more)
    )
    original = tokenizer._train_bpe if kind == "bpe" else tokenizer._train_wordpiece
    texts = ["a" * 300_000, "short words stay", " " * 5000 + "b", "c" * tokenizer.LONGEST_WORD]
    train(kind, lambda: iter(texts), vocab_size=300)
    assert "".join(seen) == "".join(texts)
    runs = [run for text in seen for run in re.findall(r"\S+|\s+", text)]
    assert max(map(len, runs)) == tokenizer.LONGEST_WORD
    assert {"short words stay", "c" * tokenizer.LONGEST_WORD} <= set(seen)
