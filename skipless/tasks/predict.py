"""Ask a classifier: texts in, answers with their probabilities out, a batch at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from skipless.data.labelled import encode
from skipless.errors import UserError
from skipless.nn.model import SequenceClassifier
from skipless.tasks.task_rows import padded


@torch.inference_mode()
def predict(
    model: SequenceClassifier, texts: Iterable[tuple[str, ...]], *, batch_size: int = 64
) -> Iterator[dict[str, Any]]:
    """For each text, or pair of texts, in order: its label and the probability of each, or the value of a regression.

    Texts are read as they are needed, and answers come as they are made.
    """
    if model.tokenizer is None:
        raise UserError("this classifier has no tokeniser: give it one as `model.tokenizer`")
    length = min(model.max_input or model.config.max_seq_len, model.config.max_seq_len)
    device = model.classifier.weight.device
    names = model.labels or tuple(f"LABEL_{number}" for number in range(model.num_labels))
    for batch in _batches(texts, batch_size):
        ids, mask = padded(encode(model.tokenizer, batch, length), model.tokenizer.pad_id)
        logits = model(ids.to(device), None if mask is None else mask.to(device)).float().cpu()
        if not logits.isfinite().all():
            raise UserError("an answer is not finite")
        if model.num_labels == 1:
            yield from ({"value": value} for value in logits[:, 0].tolist())
            continue
        for row in torch.softmax(logits.double(), dim=-1).numpy():
            best = int(np.argmax(row))
            shares = dict(zip(names, row.tolist(), strict=True))
            yield {"label": names[best], "probability": shares[names[best]], "probabilities": shares}


def _batches(texts: Iterable[tuple[str, ...]], size: int) -> Iterator[list[tuple[str, ...]]]:
    batch: list[tuple[str, ...]] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
