"""Tokenisers: trained on the corpus, read from a file, or fetched from the hub, behind one small interface."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from skipless.config.reading import Unreadable, check_regular, read_text
from skipless.errors import UserError, did_you_mean, unknown, user_path
from skipless.storage.atomic_files import write_text

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
_MASK_NAMES = ("[MASK]", "<mask>")
_NEWLINE_PROBES = ("word\nword", "x;\nif", ")\n#", "1\n2", "é\n漢")
_MAX_ALPHABET = 1000
_COVERAGE = 0.9999
"""Share of a text's letters that have tokens. Each takes two: the rarest would take a quarter of a small vocabulary."""


class Tokenizer:
    """A tokeniser of the `tokenizers` library with what a language model needs to know of it.

    Text never encodes to a special token: a document that contains the characters `<|endoftext|>` or `[MASK]` gets
    the ordinary tokens that spell them. `pad_id` is the end token's where there is no padding token; `mask_id` is
    None where there is no mask.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._vocab = backend.get_vocab(with_added_tokens=True)
        end_id = self._find(_END_NAMES)
        if end_id is None:
            raise UserError(f"the tokenizer has no end-of-text token; looked for {', '.join(_END_NAMES)}")
        self.end_id: int = end_id
        self.mask_id: int | None = self._find(_MASK_NAMES)
        pad_id = self._find(_PAD_NAMES)
        self.pad_id: int = end_id if pad_id is None else pad_id
        added = backend.get_added_tokens_decoder()
        ids = {token_id for token_id, token in added.items() if token.special} | {self.end_id, self.pad_id}
        self.special_ids: tuple[int, ...] = tuple(sorted(ids if self.mask_id is None else ids | {self.mask_id}))

    def _find(self, names: Iterable[str]) -> int | None:
        return next((self._vocab[name] for name in names if name in self._vocab), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: the number of rows that an embedding needs."""
        return max(self._vocab.values()) + 1

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The tokens of many texts, in parallel."""
        # the fast form leaves out the offsets into the text, which nothing here uses
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of some tokens, without the special ones unless they are asked for."""
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=not keep_special)

    def cuts_at_newlines(self) -> bool:
        """Whether a text cut after a lone newline has the same tokens as the whole: true of byte-level and BERT's."""
        return all(
            self.encode(text) == [token for line in text.splitlines(keepends=True) for token in self.encode(line)]
            for text in _NEWLINE_PROBES
        )

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._backend.to_str(pretty=False)

    def save(self, path: Path | str) -> None:
        """Write `tokenizer.json`, which the `tokenizers` and `transformers` libraries read too."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a `tokenizer.json`, or the one in a folder."""
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        check_regular(path)
        try:
            text = read_text(path)
        except Unreadable as error:
            raise UserError(f"tokenizer {str(path)!r} cannot be read: {error.reason}") from None
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{str(path)!r} is not a tokenizer.json: {error}") from None
        return cls(backend)


def _train_bpe(texts: Callable[[], Iterator[str]], vocab_size: int, lowercase: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2's: any text has tokens, and decodes to itself."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Lowercase() if lowercase else None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    return backend


def _train_wordpiece(texts: Callable[[], Iterator[str]], vocab_size: int, lowercase: bool) -> tokenizers.Tokenizer:
    """WordPiece, as BERT's.

    The library's trainer numbers the continuing letters (`##a`) in the order of a hash table that is seeded anew in
    every process, and breaks ties by those numbers, so the same text gives other ids each time. Here the alphabet is
    counted first and the letters are given to the trainer in order, as if they were special; the finished vocabulary
    then goes into a fresh tokeniser where they are not.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet = _alphabet((normalizer.normalize_str(text) for text in texts()), min(_MAX_ALPHABET, vocab_size // 4))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*BERT_SPECIALS, *(f"##{letter}" for letter in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _bert(models.WordPiece(unk_token="[UNK]"), normalizer)
    trained.train_from_iterator(texts(), trainer)
    return _wordpiece(trained.get_vocab(with_added_tokens=True), normalizer)


def _wordpiece(vocab: dict[str, int], normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = _bert(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100), normalizer)
    backend.add_special_tokens(BERT_SPECIALS)
    return backend


def read_vocabulary(path: Path) -> Tokenizer:
    """BERT's `vocab.txt`, a word a line; text is lower-cased where no word of it has an upper-case letter."""
    try:
        words = read_text(path).split("\n")
    except Unreadable as error:
        raise UserError(f"vocabulary {str(path)!r} cannot be read: {error.reason}") from None
    vocab = {word.removesuffix("\r"): number for number, word in enumerate(words) if word.strip()}
    missing = [name for name in BERT_SPECIALS if name not in vocab]
    if missing:
        raise UserError(f"{str(path)!r} is not a BERT vocabulary: {', '.join(missing)} missing")
    lowercase = all(word == word.lower() for word in vocab if word not in BERT_SPECIALS)
    return Tokenizer(_wordpiece(vocab, normalizers.BertNormalizer(lowercase=lowercase)))


def _bert(model: models.WordPiece, normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _alphabet(texts: Iterable[str], size: int) -> list[str]:
    """The most frequent characters, up to a share of all; equal counts by code point. The rarer ones become [UNK]."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    letters = sorted((letter for letter in counts if not letter.isspace()), key=lambda c: (-counts[c], c))
    covered = np.cumsum([counts[letter] for letter in letters])
    enough = int(np.searchsorted(covered, _COVERAGE * covered[-1])) + 1 if letters else 0
    return sorted(letters[: min(size, enough)])


TRAINERS: dict[str, Callable[[Callable[[], Iterator[str]], int, bool], tokenizers.Tokenizer]] = {
    "bpe": _train_bpe,
    "wordpiece": _train_wordpiece,
}
"""The kinds of tokeniser that can be trained."""


LONGEST_WORD = 1000
"""Characters between spaces, or of spaces, that a tokeniser is trained on in one piece."""

_LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)|\s{{{LONGEST_WORD}}}(?=\s)")


def bounded_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut inside words that are too long: to learn from one takes time with the square of its length."""
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


def train(kind: str, texts: Callable[[], Iterator[str]], *, vocab_size: int, lowercase: bool = False) -> Tokenizer:
    """Train a tokeniser; `texts()` starts the texts from the beginning each time it is called.

    A small corpus may not have as many different words as the vocabulary asked for: `vocab_size` of the result is
    what there is.
    """
    if kind not in TRAINERS:
        raise unknown("kind of tokenizer", kind, TRAINERS)
    return Tokenizer(TRAINERS[kind](lambda: bounded_words(texts()), vocab_size, lowercase))


def fetch(name: str) -> Tokenizer:
    """An existing tokeniser: a `tokenizer.json` or its folder, BERT's `vocab.txt`, or a name on the hub."""
    path = user_path(name)
    if path.exists():
        return read_vocabulary(path) if path.suffix == ".txt" else Tokenizer.load(path)
    kinds = f"allowed: {', '.join(TRAINERS)}, the path of a tokenizer.json or vocab.txt, a name on the Hugging Face hub"
    if path.suffix in (".json", ".txt") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"tokenizer {name!r}: no such file; {kinds}{did_you_mean(name, TRAINERS)}")
    try:
        backend = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # offline, unknown, private, not a tokenizer: each from another library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tokenizer {name!r} cannot be fetched from the hub ({reason}); {kinds}{did_you_mean(name, TRAINERS)}"
        ) from error
    return Tokenizer(backend)
