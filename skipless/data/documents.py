"""From a source to distinct documents, each in the training or the validation part, and to pieces of even size."""

import hashlib
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skipless.data.sources import Source

Split = str
"""`train` or `valid`; where several sources are mixed, `train-0`, `train-1`, … or `valid`."""

PIECE = 64 * 2**10
"""Characters from which on a document is cut for the tokeniser, which works on the pieces in parallel."""

_LONE_NEWLINE = re.compile(r"(?<=\S)\n(?=\S)")


class Document(NamedTuple):
    """A text of the corpus, cleaned of what UTF-8 cannot hold."""

    text: str
    n_bytes: int
    digest: bytes


class Piece(NamedTuple):
    """A document or a part of one; the last piece carries the document's size in bytes."""

    split: Split
    text: str
    last: bool
    n_bytes: int


@dataclass
class Counts:
    """What was left out while reading."""

    duplicates: int = 0
    empty: int = 0


class Seen:
    """A set of digests that lives on disk: exact, and of bounded memory however many there are."""

    def __init__(self, path: Path) -> None:
        # the trainer of a tokeniser asks for its texts one after another, but from several threads
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # nothing here outlives the build, so there is nothing to guard against a crash
        for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-32768"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, digest: bytes) -> bool:
        """Whether the digest is new."""
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


@contextmanager
def seen_on_disk(path: Path) -> Iterator[Seen]:
    """A set of digests in a file that is removed in the end."""
    seen = Seen(path)
    try:
        yield seen
    finally:
        seen.close()
        path.unlink(missing_ok=True)  # a failed build has removed its folder already


def distinct(
    source: Source, seen: Seen, counts: Counts, *, max_documents: int | None, max_bytes: int | None
) -> Iterator[Document]:
    """The documents of a source without blank ones and repetitions, up to the one that reaches a limit."""
    n_documents = n_bytes = 0
    for text in source:
        if not text or text.isspace():
            counts.empty += 1
            continue
        document = _document(text)
        if not seen.add(document.digest):
            counts.duplicates += 1
            continue
        yield document
        n_documents += 1
        n_bytes += document.n_bytes
        if n_documents == max_documents or (max_bytes is not None and n_bytes >= max_bytes):
            return


def _document(text: str) -> Document:
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell and UTF-8 cannot
        data = text.encode("utf-8", errors="replace")
        text = data.decode()
    return Document(text, len(data), hashlib.blake2b(data, digest_size=20).digest())


def split_of(document: Document, valid_fraction: float) -> Split:
    """The part that a document belongs to, by its content alone: order and neighbours do not matter."""
    draw = int.from_bytes(document.digest[:8], "big") / 2**64
    return "valid" if draw < valid_fraction else "train"


def pieces(split: Split, document: Document, *, cut: bool) -> Iterator[Piece]:
    """A document, if `cut` in pieces that end with a lone newline, where tokenisers end a token too.

    The tokens of a long text take a hundred times its memory, and one text is the work of one core.
    """
    text, start = document.text, 0
    while cut and len(text) - start > PIECE:
        newline = _LONE_NEWLINE.search(text, start + PIECE)
        if newline is None:
            break
        yield Piece(split, text[start : newline.end()], False, 0)
        start = newline.end()
    yield Piece(split, text[start:], True, document.n_bytes)
