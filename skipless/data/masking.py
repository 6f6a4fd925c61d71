"""Masked language modelling: which tokens are hidden, and what the model sees in their place."""

from collections.abc import Iterable

import numpy as np

from skipless.data.counter_rng import mix, uniform
from skipless.errors import UserError

IGNORED = -100
_CHOICE, _ACTION, _REPLACEMENT = range(3)


def mask_tokens(
    ids: np.ndarray,
    *,
    seed: int,
    first: int,
    mask_id: int | None,
    vocab_size: int,
    special_ids: Iterable[int],
    share: float = 0.25,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels for rows of tokens (B, T), of which the first is number `first` of the stream.

    Every row gets the same number of chosen positions, round(share·T); special tokens are never chosen, and a row
    with fewer ordinary tokens than that has all of them chosen. Each chosen token is, independently, replaced by the
    mask with probability 0.8, by a random ordinary token with 0.1, and left as it is with 0.1. Labels are the
    original tokens at the chosen positions and −100 elsewhere. The result for a row depends on the seed, the row's
    number and its tokens alone, and not on the batch that it is in.
    """
    if mask_id is None:
        raise UserError("masking needs a tokenizer with a mask token, and this one has none: try tokenizer='wordpiece'")
    if not 0 <= share <= 1:
        raise UserError(f"the share of masked tokens must be between 0 and 1, got {share}")
    specials = np.unique([*special_ids, mask_id])
    ordinary = np.setdiff1d(np.arange(vocab_size), specials)
    if not ordinary.size:
        raise UserError(f"a vocabulary of {vocab_size} with {specials.size} special tokens has no ordinary token")

    sequence = np.arange(first, first + ids.shape[0])[:, None]
    position = np.arange(ids.shape[1])[None, :]
    chosen = _choose(mix(seed, sequence, position, _CHOICE), np.isin(ids, specials), round(share * ids.shape[1]))
    action = uniform(mix(seed, sequence, position, _ACTION))
    replacement = ordinary[mix(seed, sequence, position, _REPLACEMENT) % np.uint64(ordinary.size)]

    seen = np.where(action < 0.8, mask_id, np.where(action < 0.9, replacement, ids))
    return np.where(chosen, seen, ids).astype(np.int64), np.where(chosen, ids, IGNORED).astype(np.int64)


def _choose(priority: np.ndarray, special: np.ndarray, count: int) -> np.ndarray:
    """True at the `count` ordinary positions of each row with the smallest random priorities."""
    priority = np.where(special, np.uint64(2**64 - 1), priority)
    order = np.argsort(priority, axis=1, kind="stable")
    chosen = np.zeros(priority.shape, dtype=bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=1)
    return chosen & ~special
