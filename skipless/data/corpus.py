"""Prepare a corpus: read, drop repetitions, split, train a tokeniser, tokenise, and keep the result in a cache."""

import os
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import tokenizers

from skipless.config.run import DataConfig
from skipless.data.documents import Counts, Document, Piece, Seen, Split, distinct, pieces, seen_on_disk, split_of
from skipless.data.mixed_tokens import MixedTokens
from skipless.data.sources import Source, open_source
from skipless.data.token_writer import TokenWriter
from skipless.data.tokenizer import TRAINERS, Tokenizer, fetch, train
from skipless.data.tokens import Tokens
from skipless.errors import UserError, user_path
from skipless.storage.atomic_files import replaced_folder
from skipless.storage.hashing import hash_text, hash_value
from skipless.storage.lock import FolderLock
from skipless.storage.manifest import Damaged, FileEntry, Manifest

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and how much there is if that is known (both in bytes)."""

FORMAT = 2
BATCH = 2**20
"""Characters that are tokenised at a time."""

SAMPLED_FROM = 256 * 2**20
"""Bytes from which a file is not read whole when it is opened again, but checked by samples."""

_AHEAD = 2


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: two files of tokens, the tokeniser that made them, and what is known of them."""

    path: Path
    info: dict[str, Any]
    tokenizer: Tokenizer
    train: Tokens | MixedTokens
    """Of several sources, a file each, mixed by their weights."""
    valid: Tokens
    """Of several sources, the held-out documents of all, one after another."""

    @property
    def fingerprint(self) -> str:
        """A hash of the data: the same wherever and whenever the same tokens were made."""
        return hash_value({name: entry["sha256"] for name, entry in self.info["files"].items()})

    @classmethod
    def open(cls, path: Path, cfg: DataConfig) -> Self:
        """Open a finished folder; raises Damaged if a file is not as it was written."""
        manifest = Manifest.read(path)
        info = manifest.content()
        if info.get("format") != FORMAT:
            raise Damaged(f"it has format {info.get('format')}, and this version reads {FORMAT}")
        manifest.verify(path, "samples")
        parts = {
            split: Tokens(
                path / f"{split}.bin",
                info["dtype"],
                cfg.seq_len,
                cfg.packing,
                n_bytes=info["splits"][split]["bytes"],
            )
            for split in splits_of(cfg)
        }
        valid, mix = parts.pop("valid"), cfg.mix
        train = parts["train"] if mix is None else MixedTokens(list(parts.values()), list(mix.values()))
        return cls(path, info, Tokenizer.load(path / "tokenizer.json"), train, valid)


def prepare(
    cfg: DataConfig, *, cache_dir: Path | None = None, progress: Progress | None = None, rebuild: bool = False
) -> Corpus:
    """The corpus of a configuration: from the cache if it is there and intact, else built.

    The cache is `cache_dir`, or what `default_cache_dir` says. Memory holds a few batches and the
    largest document, whatever the size of the corpus. Of several processes that want the same corpus, one builds.
    """
    report = progress or _silent
    plan = _Plan.make(cfg)
    folder = Path(cache_dir or default_cache_dir()) / plan.key
    corpus = None if rebuild else _reopen(folder, cfg, _silent)
    if corpus is None:
        with _only_builder(folder, report):
            corpus = None if rebuild else _reopen(folder, cfg, report)
            if corpus is None:
                with replaced_folder(folder) as stage:
                    _build(plan, stage, report)
                corpus = Corpus.open(folder, cfg)
    _require_rows(corpus, cfg)
    return corpus


def default_cache_dir() -> Path:
    """`$SKIPLESS_CACHE`, or `$XDG_CACHE_HOME/skipless/data`, or `~/.cache/skipless/data`."""
    named = os.environ.get("SKIPLESS_CACHE")
    if named:
        return user_path(named)
    general = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(general) if Path(general).is_absolute() else user_path("~") / ".cache"  # a relative one is invalid
    return caches / "skipless" / "data"


@contextmanager
def _only_builder(folder: Path, report: Progress) -> Iterator[None]:
    """Wait until no other process builds `folder`. Its lock lies beside it, for the folder itself is replaced."""
    beside = folder.with_name(f"{folder.name}.lock")
    lock = FolderLock(folder, file=beside, on_wait=lambda: report("wait for another process", 0, None))
    try:
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cache folder {str(folder.parent)!r} cannot be written ({error.strerror}); $SKIPLESS_CACHE names another"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


def _reopen(folder: Path, cfg: DataConfig, report: Progress) -> Corpus | None:
    if not folder.exists():
        return None
    try:
        return Corpus.open(folder, cfg)
    except Damaged as error:
        report(f"rebuild: {error}", 0, None)
        return None


def splits_of(cfg: DataConfig) -> tuple[Split, ...]:
    """The parts of a corpus, a file each: of several sources, one for the training part of each."""
    mix = cfg.mix
    return ("train", "valid") if mix is None else (*(f"train-{number}" for number in range(len(mix))), "valid")


def _require_rows(corpus: Corpus, cfg: DataConfig) -> None:
    train = corpus.train.parts if isinstance(corpus.train, MixedTokens) else [corpus.train]
    for split, tokens in (*(("training", part) for part in train), ("validation", corpus.valid)):
        wanted = split == "training" or cfg.valid_source is not None or cfg.valid_fraction > 0
        if wanted and not len(tokens):
            raise UserError(
                f"the {split} text has {tokens.n_tokens} tokens, not one row of {tokens.row_len}; "
                f"a smaller seq_len or a larger source is needed"
            )


@dataclass(frozen=True)
class _Plan:
    """A configuration with its sources opened, its tokeniser loaded if it is not to be trained, and its cache key."""

    cfg: DataConfig
    sources: list[Source]
    """One, or those of a mix, in its order."""
    valid_source: Source | None
    tokenizer: Tokenizer | None
    fingerprints: list[str]
    key: str

    @classmethod
    def make(cls, cfg: DataConfig) -> Self:
        mix = cfg.mix
        sources = [open_source(str(cfg.source))] if mix is None else [open_source(spec) for spec in mix]
        valid_source = open_source(cfg.valid_source) if cfg.valid_source is not None else None
        tokenizer = None if cfg.tokenizer in TRAINERS else fetch(cfg.tokenizer)
        fingerprints = _fingerprints(sources, valid_source)
        matters = {"format": FORMAT, "fingerprints": fingerprints, **_what_matters(cfg, tokenizer)}
        key = hash_value(matters)[:32]
        return cls(cfg, sources, valid_source, tokenizer, fingerprints, key)

    def documents(self, seen: Seen, counts: Counts) -> Iterator[tuple[Split, Document]]:
        """Distinct documents and their parts; a held-out source comes first, so that training repeats none of it."""
        for part in self.in_turn(seen, counts):
            yield from part

    def in_turn(self, seen: Seen, counts: Counts) -> Iterator[Iterator[tuple[Split, Document]]]:
        """The same, source by source. A document of two sources is one of the first of them."""
        limits = {"max_documents": self.cfg.max_documents, "max_bytes": self.cfg.max_bytes}
        if self.valid_source is not None:
            yield (("valid", document) for document in distinct(self.valid_source, seen, counts, **limits))
        fraction = self.cfg.valid_fraction if self.valid_source is None else 0.0
        for split, source in zip(splits_of(self.cfg), self.sources, strict=False):
            yield self._split(split, distinct(source, seen, counts, **limits), fraction)

    @staticmethod
    def _split(split: Split, documents: Iterator[Document], fraction: float) -> Iterator[tuple[Split, Document]]:
        for document in documents:
            yield split if split_of(document, fraction) == "train" else "valid", document

    def total_bytes(self) -> int | None:
        """About how much text there is, if that is known."""
        sizes = [source.total_bytes() for source in (*self.sources, self.valid_source) if source is not None]
        limited = [min(size, self.cfg.max_bytes or size) for size in sizes if size is not None]
        return sum(limited) if len(limited) == len(sizes) else None


def _fingerprints(sources: Sequence[Source], valid_source: Source | None) -> list[str]:
    return [part.fingerprint() for part in (*sources, valid_source) if part is not None]


def _what_matters(cfg: DataConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The fields that change the files: a stream is the same for any seq_len, a given tokeniser is not trained."""
    fields = cfg.model_dump()
    if cfg.packing == "stream":
        del fields["seq_len"]
    if tokenizer is not None:
        for name in ("vocab_size", "lowercase", "tokenizer_bytes"):
            del fields[name]
        fields["tokenizer"] = hash_text(tokenizer.to_json())
    return fields


def _build(plan: _Plan, stage: Path, report: Progress) -> None:
    """Fill the staging folder."""
    tokenizer = plan.tokenizer or train(
        plan.cfg.tokenizer,
        lambda: _training_text(plan, stage, report),
        vocab_size=plan.cfg.vocab_size,
        lowercase=plan.cfg.lowercase,
    )
    tokenizer.save(stage / "tokenizer.json")
    counts = Counts()
    with seen_on_disk(stage / "seen.sqlite") as seen:
        writers = _tokenise(plan, tokenizer, plan.documents(seen, counts), stage, report)
    _require_documents(plan.cfg, writers, counts)
    if _fingerprints(plan.sources, plan.valid_source) != plan.fingerprints:
        raise UserError(f"source {plan.cfg.source!r} changed while it was read; prepare it again")
    about = {
        "format": FORMAT,
        "key": plan.key,
        "config": plan.cfg.model_dump(),
        "fingerprints": plan.fingerprints,
        "vocab_size": tokenizer.vocab_size,
        "dtype": _dtype(tokenizer),
        "duplicates": counts.duplicates,
        "empty": counts.empty,
        "splits": {split: writer.counts() for split, writer in writers.items()},
        "versions": {
            "skipless": version("skipless"),
            "tokenizers": tokenizers.__version__,
            "python": platform.python_version(),
        },
    }
    names = (*(f"{split}.bin" for split in splits_of(plan.cfg)), "tokenizer.json")
    files = {name: FileEntry.of(stage / name, sampled_from=SAMPLED_FROM) for name in names}
    Manifest(about, files).write(stage)


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 65535 else "uint32"


def _require_documents(cfg: DataConfig, writers: dict[Split, TokenWriter], counts: Counts) -> None:
    for spec, writer in zip(cfg.mix or {}, writers.values(), strict=False):
        if not writer.documents:
            why = f"{counts.empty} blank ones and {counts.duplicates} repetitions in all sources"
            raise UserError(f"source {spec!r} has no documents to train on that are its own ({why})")
    n_train = sum(writer.documents for split, writer in writers.items() if split != "valid")
    n_valid = writers["valid"].documents
    if not n_train + n_valid:
        raise UserError(f"source {cfg.source!r} has no documents ({counts.empty} blank ones)")
    if cfg.valid_source is not None and not (n_train and n_valid):
        name, empty = ("valid_source", cfg.valid_source) if not n_valid else ("source", cfg.source)
        raise UserError(f"{name} {empty!r} has no documents that are left for it ({counts.duplicates} repetitions)")
    if not n_train or (cfg.valid_fraction > 0 and not n_valid):
        part = "validation" if n_train else "training"
        raise UserError(
            f"none of the {n_train + n_valid} documents of {cfg.source!r} falls in the {part} part with "
            f"valid_fraction={cfg.valid_fraction}; give a valid_source, another valid_fraction, or more documents"
        )


def _training_text(plan: _Plan, stage: Path, report: Progress) -> Iterator[str]:
    """The first `tokenizer_bytes` of the training part, from the source's beginning; of several, by their shares."""
    mix = plan.cfg.mix
    shares = {"train": 1} if mix is None else dict(zip(splits_of(plan.cfg), mix.values(), strict=False))
    total = 0
    with seen_on_disk(stage / "seen.sqlite") as seen:
        for documents in plan.in_turn(seen, Counts()):
            done = 0
            for split, document in documents:
                if split == "valid":
                    continue
                limit = plan.cfg.tokenizer_bytes * shares[split]
                for piece in pieces(split, document, cut=True):
                    yield piece.text
                    done += len(piece.text.encode())
                    if done >= limit:
                        break
                report("train tokenizer", total + done, plan.cfg.tokenizer_bytes)
                if done >= limit:
                    break
            total += done


def _tokenise(
    plan: _Plan,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[Split, Document]],
    stage: Path,
    report: Progress,
) -> dict[Split, TokenWriter]:
    window = plan.cfg.seq_len if plan.cfg.packing == "chunks" else None
    writers = {
        split: TokenWriter(stage / f"{split}.bin", _dtype(tokenizer), tokenizer.end_id, window)
        for split in splits_of(plan.cfg)
    }
    cut, total, done = tokenizer.cuts_at_newlines(), plan.total_bytes(), 0
    parts = (piece for split, document in documents for piece in pieces(split, document, cut=cut))
    try:
        for batch, encoded in _encoded(parts, tokenizer):
            for piece, ids in zip(batch, encoded, strict=True):
                writers[piece.split].add(ids, piece.last, piece.n_bytes)
                done += piece.n_bytes
            report("tokenise", done, total)
    finally:
        for writer in writers.values():
            writer.close()
    return writers


def _encoded(parts: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[list[Piece], list[list[int]]]]:
    """Batches of pieces with their tokens, in order; while one is encoded, others are read and written."""
    waiting: deque[tuple[list[Piece], Future[list[list[int]]]]] = deque()
    with ThreadPoolExecutor(_AHEAD) as pool:
        for batch in _batches(parts):
            waiting.append((batch, pool.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
            if len(waiting) > _AHEAD:
                ready, future = waiting.popleft()
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()


def _batches(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in parts:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
