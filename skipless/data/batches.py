"""Rows of tokens → inputs and labels of a task, as numpy arrays of int64 (sequences, positions)."""

import numpy as np

from skipless.config.run import RunConfig
from skipless.data import Corpus, MixedTokens, Tokens, mask_tokens

HELD_OUT = 2**40
"""Added to the number of a held-out sequence, so that its mask is not one that training uses."""


def training_batch(cfg: RunConfig, corpus: Corpus, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of the sequences first … first + count − 1: a pure function of the seed and their numbers."""
    rows = corpus.train.batch(cfg.train.seed, first, count)
    return _inputs_and_labels(cfg, corpus, rows, cfg.train.seed, first)


def held_out_batch(
    cfg: RunConfig, corpus: Corpus, tokens: Tokens | MixedTokens, rows: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of held-out rows, the first of which is number `first` of an evaluation."""
    return _inputs_and_labels(cfg, corpus, tokens.rows(rows), 0, HELD_OUT + first)


def _inputs_and_labels(
    cfg: RunConfig, corpus: Corpus, rows: np.ndarray, seed: int, first: int
) -> tuple[np.ndarray, np.ndarray]:
    if cfg.task == "causal":
        return rows[:, :-1], rows[:, 1:]
    tokenizer = corpus.tokenizer
    return mask_tokens(
        rows[:, : cfg.data.seq_len],
        seed=seed,
        first=first,
        mask_id=tokenizer.mask_id,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        share=cfg.train.mask_share,
    )
