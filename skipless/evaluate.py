"""Held-out loss, perplexity and bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from skipless.batches import held_out_batch
from skipless.config import RunConfig
from skipless.data import Corpus, Tokens
from skipless.errors import UserError
from skipless.nn.model import IGNORED, CausalLM, MaskedLM
from skipless.parallel import Group


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
    model: CausalLM | MaskedLM,
    cfg: RunConfig,
    corpus: Corpus,
    *,
    tokens: Tokens | None = None,
    max_rows: int | None = None,
    batch_size: int | None = None,
    between: Callable[[], None] = lambda: None,
    group: Group | None = None,
) -> Evaluation:
    """The loss on held-out rows, spread evenly over them if there are more than `max_rows`.

    `between` is called between batches and may raise to stop. The processes of a `group` share the batches.
    """
    group = group or Group()
    tokens = tokens or corpus.valid
    if not len(tokens):
        raise UserError("there is no held-out text: set data.valid_fraction or data.valid_source")
    count = min(len(tokens), max_rows or len(tokens))
    chosen = np.linspace(0, len(tokens) - 1, count).round().astype(np.int64)
    size = batch_size or max(cfg.train.micro_rows, 8)
    was_training, total, predicted = model.training, 0.0, 0
    model.eval()
    try:
        for start in range(group.rank * size, count + group.rank * size, group.size * size):
            between()
            rows = chosen[start : start + size]
            # a process that has no rows left goes along with one that does not count, for the others wait for it
            ids, labels = held_out_batch(cfg, corpus, tokens, rows if len(rows) else chosen[:1], start)
            here = int((labels != IGNORED).sum()) if len(rows) else 0
            loss = group.look(model.loss, ids.to(_device(model)), labels.to(_device(model)))
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


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
