"""Training on user-defined data: a `Dataset` or any iterable of token tensors, instead of a corpus.

Items of a `Dataset`, or of anything with a length and an index, are drawn in another order each epoch, and which comes
at a step is a function of the seed and of a counter: such a run resumes bit for bit. An iterable is read in its own
order, again and again. Resumed, it is read from its beginning and what was used is passed over: the run is the same if
the iterable gives the same items again, which cannot be verified here.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from skipless.analysis.evaluation import Evaluation
from skipless.data import Tokenizer
from skipless.data.counter_rng import mix, permute
from skipless.errors import UserError
from skipless.nn.model import IGNORED
from skipless.training.schedule import batch_rows
from skipless.training.trainer import Trainer
from skipless.training.update import MicroBatch

Loss = Callable[[Any, Any], Tensor]
"""A loss of one's own: the model and a batch → a scalar."""

FORMS = "a tensor of token ids, a pair (ids, labels), or a mapping with ids, labels and perhaps attention_mask"


@dataclass(frozen=True)
class OwnBatch:
    """A batch for a loss of one's own."""

    content: Any
    weight: int

    def on(self, device: torch.device) -> tuple[Any]:
        """The batch on a device."""
        return (_moved(self.content, device),)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    return type(value)(_moved(one, device) for one in value) if isinstance(value, list | tuple) else value


@dataclass
class OwnData:
    """What a training on data of one's own needs in the place of a corpus."""

    train: Any
    valid: Sequence[Any] | None = None
    tokenizer: Tokenizer | None = None
    causal: bool = True
    loss: Loss | None = None
    collate: Callable[[list[Any]], Any] | None = None
    seed: int = 0
    _position: int = field(default=0, init=False)
    _iterator: Iterator[Any] | None = field(default=None, init=False)
    _read: list[Any] = field(default_factory=list, init=False)
    """The items before the position that were asked for last: they may be asked for again."""

    def __post_init__(self) -> None:
        self.has_index = hasattr(self.train, "__getitem__") and hasattr(self.train, "__len__")
        if not self.has_index and not isinstance(self.train, Iterable):
            raise UserError(f"data must be a source, a Dataset or an iterable, got {type(self.train).__name__}")
        if self.has_index and not len(self.train):
            raise UserError("the data has no items")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the data set's length and three of its items; an iterable cannot be fingerprinted."""
        if not self.has_index:
            return "iterable"
        size = len(self.train)
        digest = hashlib.sha256(str(size).encode())
        for index in (0, size // 2, size - 1):
            digest.update(_bytes(self.train[index]))
        return digest.hexdigest()

    def items(self, first: int, count: int) -> list[Any]:
        """Items number first … first + count − 1 of the endless stream."""
        if self.has_index:
            size = len(self.train)
            epoch, position = np.divmod(np.arange(first, first + count), size)
            return [self.train[int(index)] for index in permute(position, size, mix(self.seed, epoch))]
        if self._iterator is None or first < self._position - len(self._read):
            self._iterator, self._position, self._read = iter(self.train), 0, []
        self._read = self._read[max(len(self._read) - (self._position - first), 0) :]
        while self._position < first:
            self._next()
        self._read += [self._next() for _ in range(count - len(self._read))]
        return self._read[:count]

    def _next(self) -> Any:
        assert self._iterator is not None
        for item in self._iterator:
            self._position += 1
            return item
        self._iterator = iter(self.train)
        for item in self._iterator:
            self._position += 1
            return item
        what = (
            "has no items" if not self._position else f"has ended after {self._position} items, and cannot begin again"
        )
        raise UserError(f"the data {what}: give a list, a Dataset, or an object whose __iter__ begins anew")

    def batch(self, items: list[Any]) -> MicroBatch | OwnBatch:
        """Items as one batch; sequences of different lengths are padded on the right."""
        if self.loss is not None:
            return OwnBatch((self.collate or default_collate)(items), len(items))
        if self.collate is not None:
            items = [self.collate(items)]
            ids, labels, mask = _parts(items[0], causal=self.causal, dims=2)
        else:
            ids, labels, mask = _padded([_parts(item, causal=self.causal, dims=1) for item in items])
        return MicroBatch(ids, labels, int((labels != IGNORED).sum()), mask)


def _bytes(item: Any) -> bytes:
    if isinstance(item, Tensor):
        return item.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(item, Mapping):
        item = [part for pair in sorted(item.items(), key=lambda pair: str(pair[0])) for part in pair]
    return b"".join(map(_bytes, item)) if isinstance(item, list | tuple) else repr(item).encode()


def _parts(item: Any, *, causal: bool, dims: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, labels and mask of an item, or of a batch."""
    mask = None
    if isinstance(item, Mapping):
        ids = item.get("ids", item.get("input_ids"))
        labels, mask = item.get("labels"), item.get("attention_mask")
    elif isinstance(item, tuple | list) and len(item) == 2:
        ids, labels = item
    else:
        ids, labels = item, None
    if isinstance(ids, np.ndarray):
        ids = torch.from_numpy(ids)
    if not isinstance(ids, Tensor) or ids.ndim != dims or ids.is_floating_point():
        shape = f" of {ids.dtype}, {tuple(ids.shape)}" if isinstance(ids, Tensor) else ""
        raise UserError(f"an item must be {FORMS}; this one has ids as {type(ids).__name__}{shape}")
    ids = ids.long()
    if labels is None:
        if not causal:
            raise UserError("a masked model has no labels in a row of tokens: give pairs (ids, labels), or a loss")
        if mask is not None:
            raise UserError("an item with attention_mask needs its labels too")
        if ids.shape[-1] < 2:
            raise UserError("a row of tokens has inputs and targets inside, so it needs two at least")
        ids, labels = ids[..., :-1], ids[..., 1:]
    labels = torch.as_tensor(labels).long()
    if labels.shape != ids.shape:
        raise UserError(f"labels must have the shape of the ids, {tuple(ids.shape)}, got {tuple(labels.shape)}")
    return ids, labels, None if mask is None else torch.as_tensor(mask).bool()


def _padded(items: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
    longest = max(len(ids) for ids, _, _ in items)
    even = all(len(ids) == longest and mask is None for ids, _, mask in items)
    shape = (len(items), longest)
    ids, labels, real = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED), torch.zeros(shape).bool()
    for row, (own, targets, mask) in enumerate(items):
        ids[row, : len(own)], labels[row, : len(own)] = own, targets
        real[row, : len(own)] = True if mask is None else mask
    return ids, labels, None if even else real


@dataclass
class OwnDataTrainer(Trainer):
    """A pre-training on data of one's own: `corpus` is an `OwnData`."""

    corpus: Any

    def __post_init__(self) -> None:
        if self.group.size > 1:
            raise UserError("data of one's own is for one process; several need a configured source, or accelerate")
        own = self.corpus.loss
        self.evaluates = self.corpus.valid is not None  # pyrefly: ignore
        self.loss = None if own is None else lambda batch: own(self.model, batch)  # pyrefly: ignore
        super().__post_init__()

    def _check_data(self) -> None:
        if self.corpus.valid is not None and not len(self.corpus.valid):
            raise UserError("the held-out data has no items; leave it out to train without evaluation")
        if self.cfg.train.health_every or self.cfg.train.tuning_rows:
            raise UserError("health_every and tuning_rows need a configured source, not data of your own")

    def _micro_batches(self, rows: int) -> list[Any]:
        items = self.corpus.items(self.state.sequences, rows)
        size = self.cfg.train.micro_rows
        return [self.corpus.batch(items[start : start + size]) for start in range(0, rows, size)]

    def _tokens_in(self, rows: int, batches: Sequence[Any]) -> int:
        """Labels, or with a loss of one's own items."""
        return sum(batch.weight for batch in batches)

    def _tokens_ahead(self) -> float:
        """What a whole batch has if its items are like those so far; before the first step, like its own first ones."""
        state, size = self.state, self.cfg.train.batch_size
        return size * state.tokens / state.sequences if state.sequences else size * self._tokens_per_first_item

    @cached_property
    def _tokens_per_first_item(self) -> float:
        if self.loss is not None:
            return 1
        rows = batch_rows(self.cfg.train, 0.0)
        return self._tokens_in(rows, self._micro_batches(rows)) / rows

    def evaluate_for_tuning(self, between: Callable[[], None] = lambda: None) -> None:
        """There are no rows for it."""

    @torch.no_grad()
    def evaluate(self, between: Callable[[], None] = lambda: None) -> Evaluation:
        """The mean loss of the held-out items."""
        valid, size = self.corpus.valid, self.cfg.train.micro_rows
        loss_of = self.update.own_loss or self.model.loss
        total, weight = 0.0, 0
        self.model.eval()
        try:
            for start in range(0, len(valid), size):
                between()
                items = [valid[index] for index in range(start, min(start + size, len(valid)))]
                batch = self.corpus.batch(items)
                with self.update.autocast():
                    total += loss_of(*batch.on(self.device)).item() * batch.weight
                weight += batch.weight
        finally:
            self.model.train()
        if not weight:
            raise UserError("all labels of the held-out data are ignored")
        loss = total / weight
        return Evaluation(loss, math.exp(min(loss, 700)), None, len(valid), weight)
