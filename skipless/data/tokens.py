"""A flat file of tokens, seen as rows, and an endless shuffled stream of them."""

from pathlib import Path
from typing import Literal

import numpy as np

from skipless.data.counter_rng import mix, permute
from skipless.errors import UserError


class Tokens:
    """A memory-mapped file of tokens, cut into rows.

    With packing "stream", row i is tokens[i·T : i·T + T + 1] for T = seq_len: inputs are row[:-1] and targets row[1:],
    and every token but the first is a target once. With "chunks" a row is a window of exactly T tokens of one
    document; inputs and targets both lie inside it, so it has T − 1 of each. `row_len` is the length of a row.

    `n_tokens` counts the tokens of the file, and `n_bytes` the UTF-8 bytes of the text they stand for.
    """

    def __init__(
        self, path: Path, dtype: str, seq_len: int, packing: Literal["stream", "chunks"], *, n_bytes: int = 0
    ) -> None:
        self.path = path
        self.seq_len = seq_len
        self.packing = packing
        self.n_bytes = n_bytes
        kind = np.dtype(dtype).newbyteorder("<")
        # an empty file cannot be mapped
        self._tokens = np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, dtype=kind)

    @property
    def n_tokens(self) -> int:
        """Tokens in the file."""
        return self._tokens.size

    @property
    def row_len(self) -> int:
        """Tokens in a row: seq_len + 1 for a stream, seq_len for chunks."""
        return self.seq_len + 1 if self.packing == "stream" else self.seq_len

    def __len__(self) -> int:
        return max(0, self.n_tokens - (self.row_len - self.seq_len)) // self.seq_len

    def rows(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """The rows of these numbers, as int64 (n, row_len)."""
        start = np.asarray(indices, dtype=np.int64)
        if start.size and not 0 <= start.min() <= start.max() < len(self):
            raise IndexError(f"rows {start.min()} … {start.max()} of {self.path}, which has {len(self)}")
        return self._tokens[start[:, None] * self.seq_len + np.arange(self.row_len)].astype(np.int64)

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """Sequences number first … first + count − 1 of an endless stream, as int64 (count, row_len).

        Sequence k is a pure function of (seed, k): epoch k // n_rows visits every row once, each epoch in another
        order. To resume, or to give each of many workers its part, ask for other numbers.
        """
        if first < 0 or count < 0:
            raise ValueError(f"sequences are numbered from 0, got first={first}, count={count}")
        return self.sequences(seed, np.arange(first, first + count))

    def sequences(self, seed: int, numbers: np.ndarray) -> np.ndarray:
        """Sequences of any numbers of the endless stream, as int64 (numbers, row_len)."""
        if not len(self):
            raise UserError(f"{self.path} has {self.n_tokens} tokens: not one row of {self.row_len}")
        epoch, position = np.divmod(numbers, len(self))
        return self.rows(permute(position, len(self), mix(seed, epoch)))
