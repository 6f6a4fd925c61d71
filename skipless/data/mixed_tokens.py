"""Several files of tokens as one endless stream in which each has its share, exactly."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from skipless.data.counter_rng import mix, permute
from skipless.data.tokens import Tokens

LONGEST_PERIOD = 10**6
"""Sequences after which the shares hold exactly, at the most; finer shares are rounded to such a part."""

_SALT = 0x6D6978


class MixedTokens:
    """Files of tokens that are read side by side.

    The stream is cut into periods in which each file has a whole number of sequences: ten for shares of 0.7 and 0.3. In
    each period their order is another. So sequence k is a pure function of (seed, k), as in `Tokens`: of no file more
    or less is seen than its share, by less than one period's, and each file is gone through in epochs of its own.
    """

    def __init__(self, parts: Sequence[Tokens], shares: Sequence[Fraction]) -> None:
        self.parts = list(parts)
        self.counts = whole_counts(shares)
        self.period = sum(self.counts)
        self._ends = np.cumsum(self.counts)
        first = self.parts[0]
        self.path, self.seq_len, self.packing, self.row_len = (
            first.path.parent,
            first.seq_len,
            first.packing,
            first.row_len,
        )

    @property
    def n_tokens(self) -> int:
        """Tokens in all files."""
        return sum(part.n_tokens for part in self.parts)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text they stand for."""
        return sum(part.n_bytes for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def rows(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """The rows of these numbers, counted through the files one after another, as int64 (n, row_len)."""
        wanted = np.asarray(indices, dtype=np.int64)
        ends = np.cumsum([len(part) for part in self.parts])
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < ends[-1]:
            raise IndexError(f"rows {wanted.min()} … {wanted.max()} of {self.path}, which has {ends[-1]}")
        found = np.empty((len(wanted), self.row_len), dtype=np.int64)
        which = np.searchsorted(ends, wanted, side="right")
        for number, part in enumerate(self.parts):
            found[which == number] = part.rows(wanted[which == number] - (ends[number] - len(part)))
        return found

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """Sequences number first … first + count − 1 of the endless stream, as int64 (count, row_len)."""
        if first < 0 or count < 0:
            raise ValueError(f"sequences are numbered from 0, got first={first}, count={count}")
        which, numbers = self.places(seed, np.arange(first, first + count))
        found = np.empty((count, self.row_len), dtype=np.int64)
        for number, part in enumerate(self.parts):
            mine = which == number
            if mine.any():
                found[mine] = part.sequences(seed, numbers[mine])
        return found

    def places(self, seed: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of sequences by number: which file each is of, and its number there."""
        period, place = np.divmod(numbers, self.period)
        slot = permute(place, self.period, mix(seed, _SALT, period)).astype(np.int64)
        which = np.searchsorted(self._ends, slot, side="right")
        counts = np.array(self.counts)
        return which, period * counts[which] + slot - (self._ends - counts)[which]


def whole_counts(shares: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the ratio of the shares, rounded where they would add up to too many."""
    total = sum(shares)
    exact = [Fraction(share) / total for share in shares]
    period = math.lcm(*(share.denominator for share in exact))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in exact]
    counts = [max(1, math.floor(share * LONGEST_PERIOD)) for share in exact]
    rest = LONGEST_PERIOD - sum(counts)
    missing = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n] * LONGEST_PERIOD)
    for number in missing[: max(rest, 0)]:
        counts[number] += 1
    return counts
