"""Rows of tokens → inputs and labels of a task, as tensors."""

import numpy as np
import torch
from torch import Tensor

from skipless.config import RunConfig
from skipless.data import Corpus, Tokens, mask_tokens

HELD_OUT = 2**40
"""Added to the number of a held-out sequence, so that its mask is not one that training uses."""


def training_batch(cfg: RunConfig, corpus: Corpus, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the sequences first … first + count − 1: a pure function of the seed and their numbers."""
    rows = corpus.train.batch(cfg.train.seed, first, count)
    return _task(cfg, corpus, rows, cfg.train.seed, first)


def held_out_batch(
    cfg: RunConfig, corpus: Corpus, tokens: Tokens, rows: np.ndarray, first: int
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of held-out rows, the first of which is number `first` of an evaluation."""
    return _task(cfg, corpus, tokens.rows(rows), 0, HELD_OUT + first)


def _task(cfg: RunConfig, corpus: Corpus, rows: np.ndarray, seed: int, first: int) -> tuple[Tensor, Tensor]:
    if cfg.task == "causal":
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
    tokenizer = corpus.tokenizer
    inputs, labels = mask_tokens(
        rows[:, : cfg.data.seq_len],
        seed=seed,
        first=first,
        mask_id=tokenizer.mask_id,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        share=cfg.train.mask_share,
    )
    return torch.from_numpy(inputs), torch.from_numpy(labels)
