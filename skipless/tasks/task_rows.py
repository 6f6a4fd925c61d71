"""Rows of a labelled task as tokens, and the batches of an epoch."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from skipless.data.labelled import Examples, encode
from skipless.data.tokenizer import Tokenizer

POOL = 32
"""Batches whose rows are sorted by length together, so that little of a batch is padding."""


@dataclass(frozen=True)
class TaskRows:
    """Rows of a task's file as tokens."""

    examples: Examples
    ids: list[list[int]]
    chosen: np.ndarray
    """Which rows of the file these are."""

    @classmethod
    def make(
        cls, examples: Examples, tokenizer: Tokenizer, length: int, limit: int | None = None, seed: int = 0
    ) -> "TaskRows":
        """All rows, or `limit` of them drawn with a seed: the same ones for every block and for its random encoder."""
        chosen = np.arange(len(examples))
        if limit is not None and limit < len(examples):
            chosen = np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit])
        return cls(examples, encode(tokenizer, [examples.texts[row] for row in chosen], length), chosen)

    @cached_property
    def labels(self) -> np.ndarray:
        """The answers."""
        assert self.examples.labels is not None
        return self.examples.labels[self.chosen]

    @cached_property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(map(len, self.ids))

    def lines(self, rows: Iterable[int]) -> list[int]:
        """Where rows stand in the file."""
        return [self.examples.lines[self.chosen[row]] for row in rows]

    def batch(self, rows: np.ndarray, pad_id: int) -> tuple[Tensor, Tensor | None]:
        """(B, T) ids, padded to the longest, and the mask of the real ones where there is padding."""
        return padded([self.ids[row] for row in rows], pad_id)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the inputs and the answers."""
        labels = self.labels.tolist()
        return hashlib.sha256(json.dumps([self.ids, labels]).encode()).hexdigest()[:16]


def padded(rows: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor | None]:
    """(B, T) ids, padded to the longest, and the mask of the real ones where there is padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    ragged = int(lengths.min()) < longest
    return ids, torch.arange(longest) < lengths[:, None] if ragged else None


def epoch_batches(lengths: np.ndarray, size: int, key: Sequence[int]) -> list[np.ndarray]:
    """Every row once, in batches of rows of about one length, in an order that follows from the key."""
    rng = np.random.default_rng(key)
    order = rng.permutation(len(lengths))
    pools = [order[start : start + size * POOL] for start in range(0, len(order), size * POOL)]
    order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [batches[number] for number in rng.permutation(len(batches))]


def by_length(rows: TaskRows, size: int) -> Iterator[np.ndarray]:
    """All rows in batches, the shortest first."""
    order = np.argsort([len(row) for row in rows.ids], kind="stable")
    return (order[start : start + size] for start in range(0, len(order), size))
