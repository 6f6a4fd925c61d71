"""Held-out loss, perplexity and bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from skipless.config.run import RunConfig
from skipless.data import Corpus, MixedTokens, Tokens
from skipless.data.batches import held_out_batch
from skipless.distributed.group import Group
from skipless.errors import UserError
from skipless.nn.model import IGNORED, CausalLM, MaskedLM
from skipless.runtime.model import OnnxCausalLM


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    loss: float
    """Mean cross-entropy of a predicted token, in nats."""
    perplexity: float
    bits_per_byte: float | None
    """Of the text, for a causal model; a masked one predicts too few tokens to say."""
    sequences: int
    tokens: int


@torch.no_grad()
def evaluate(
    model: CausalLM | MaskedLM | OnnxCausalLM,
    cfg: RunConfig,
    corpus: Corpus,
    *,
    tokens: Tokens | MixedTokens | None = None,
    rows: np.ndarray | None = None,
    batch_size: int | None = None,
    between: Callable[[], None] = lambda: None,
    group: Group | None = None,
) -> Evaluation:
    """The loss on held-out rows: those of the given numbers, or all.

    `between` is called between batches and may raise to stop. The processes of a `group` share the batches.
    """
    group = group or Group()
    tokens = tokens or corpus.valid
    if not len(tokens):
        raise UserError("there is no held-out text: set data.valid_fraction or data.valid_source")
    chosen = np.arange(len(tokens)) if rows is None else rows
    count = len(chosen)
    size = batch_size or max(cfg.train.micro_rows, 8)
    was_training, total, predicted = model.training, 0.0, 0
    model.eval()
    try:
        for start in range(group.rank * size, count + group.rank * size, group.size * size):
            between()
            batch = chosen[start : start + size]
            # a process that has no rows left goes along with one that does not count, for the others wait for it
            ids, labels = held_out_batch(cfg, corpus, tokens, batch if len(batch) else chosen[:1], start)
            here = int((labels != IGNORED).sum()) if len(batch) else 0
            on_device = (torch.from_numpy(part).to(_device(model)) for part in (ids, labels))
            loss = group.forward_no_grad(model.loss, *on_device)
            total += loss.item() * here
            predicted += here
    finally:
        model.train(was_training)
    total, predicted = group.sum(total, predicted)
    loss = total / predicted
    per_byte = None
    if cfg.task == "causal" and tokens.n_bytes:
        per_byte = loss / math.log(2) * tokens.n_tokens / tokens.n_bytes
    return Evaluation(loss, math.exp(min(loss, 700)), per_byte, count, int(predicted))


def spread(n_rows: int, count: int) -> np.ndarray:
    """The numbers of `count` of the held-out rows, spread evenly over them; of all if there are no more."""
    return np.linspace(0, n_rows - 1, min(count, n_rows)).round().astype(np.int64)


def judged_and_tuning_rows(n_rows: int, judged: int, tuning: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that runs are judged by, and others that they are tuned by; where there are too few, each has its part."""
    if tuning and judged + tuning > n_rows:
        judged = max(1, n_rows * judged // (judged + tuning))
    chosen = spread(n_rows, judged)
    others = np.setdiff1d(np.arange(n_rows), chosen)
    return chosen, others[spread(len(others), tuning)] if len(others) and tuning else others[:0]


def _device(model: nn.Module | OnnxCausalLM) -> torch.device:
    return next(model.parameters()).device
