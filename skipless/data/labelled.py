"""Labelled text: a task, the rows of its files, and their tokens. GLUE's tasks and one's own are both of this kind."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipless.data.tokenizer import Tokenizer
from skipless.errors import UserError


@dataclass(frozen=True)
class Task:
    """What is asked of a text, or of two: its columns, its answers, how they are judged."""

    name: str
    texts: tuple[str, ...]
    """Columns of the text, or of both."""
    label: str
    """Column of the answer."""
    labels: tuple[str, ...]
    """The answers, in the order of their numbers; none for a regression."""
    metrics: tuple[str, ...]
    range: tuple[float, float] = (-np.inf, np.inf)
    """Of the answers of a regression."""

    @property
    def is_regression(self) -> bool:
        """Whether the answer is a number."""
        return not self.labels

    @property
    def outputs(self) -> int:
        """Width of the classifier."""
        return len(self.labels) or 1


@dataclass(frozen=True)
class Examples:
    """Rows of a file, with their answers where they are known."""

    source: str
    """The file, for messages."""
    texts: list[tuple[str, ...]]
    labels: np.ndarray | None
    """Numbers of the answers, or the answers of a regression."""
    lines: list[int]
    """Where each row stands in the file, counted from 1."""
    index: list[str]
    """What the leaderboard calls each row."""
    skipped: int = 0
    """Short rows that were left out."""

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TaskData:
    """What a task is trained on, measured on, and asked."""

    task: Task
    train: Examples
    dev: dict[str, Examples]
    """By column of the table."""
    test: dict[str, Examples]
    """By name at the leaderboard; only those that are there."""


def label_number(task: Task, text: str, where: str) -> float:
    """The number of an answer, or the answer of a regression; a UserError with the place where it is none."""
    if not task.is_regression:
        if text not in task.labels:
            raise UserError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}")
        return task.labels.index(text)
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    low, high = task.range
    if not (np.isfinite(value) and low <= value <= high):
        bounds = f" from {low:g} to {high:g}" if np.isfinite(high) else ""
        raise UserError(f"{where}: {task.label} {text!r} is not a number{bounds}")
    return value


def label_array(task: Task, labels: Sequence[float]) -> np.ndarray:
    """Answers as the loss wants them."""
    return np.array(labels, dtype=np.float32 if task.is_regression else np.int64)


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, ...]], length: int) -> list[list[int]]:
    """Each sentence and an end token, as the pre-training packed its documents: `a [SEP]`, or `a [SEP] b [SEP]`.

    There are no token types, as crammed BERT has none: the end token tells the sentences apart. Where two sentences
    are too long together, tokens are taken from the end of the longer one.
    """
    parts = [tokenizer.encode_batch(list(column)) for column in zip(*texts, strict=True)]
    end = tokenizer.end_id
    return [[token for part in _cut(list(row), length) for token in (*part, end)] for row in zip(*parts, strict=True)]


def _cut(parts: list[list[int]], length: int) -> list[list[int]]:
    """One or two sequences that with an end token each are no longer than `length`."""
    room = length - len(parts)
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    kept = min(len(second), max(room // 2, room - len(first)))
    return [first[: room - kept], second[:kept]]
