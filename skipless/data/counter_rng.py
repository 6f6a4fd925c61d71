"""Random numbers without state: each is a hash of a seed and of counters, so any one can be had without the others."""

import math

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4


def mix(*words: int | np.ndarray) -> np.ndarray:
    """A 64-bit hash of integers, element by element over the broadcast shape (the finaliser of SplitMix64)."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # wrapping round is the point
        for word in words:
            bits = np.uint64(word & _MASK) if isinstance(word, int) else word.astype(np.uint64)
            z = (state ^ bits) + _GOLDEN
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = z ^ (z >> np.uint64(31))
    return np.asarray(state)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Hashes as numbers in [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53


def permute(position: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where a keyed pseudo-random permutation of 0 … n−1 sends each position; nothing of size n is ever made.

    A Feistel network permutes the a×b ≥ n cells of a nearly square grid. A value that lands in one of the fewer than
    a cells from n on is sent through again until it lands below n, which keeps the map a permutation of 0 … n−1.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = position.astype(np.uint64)
    key = np.broadcast_to(key, out.shape)
    walking = np.arange(out.size)
    while walking.size:
        out[walking] = _feistel(out[walking], np.uint64(a), np.uint64(b), key[walking])
        walking = walking[out[walking] >= n]
    return out


def _feistel(cell: np.ndarray, a: np.uint64, b: np.uint64, key: np.ndarray) -> np.ndarray:
    row, column = np.divmod(cell, b)
    for turn in range(_ROUNDS):
        row = (row + mix(key, 2 * turn, column) % a) % a
        column = (column + mix(key, 2 * turn + 1, row) % b) % b
    return row * b + column
