"""A task of one's own: rows with columns of text and of answers, and what kind of answers they are."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from skipless.data.labelled import Examples, Task, TaskData, label_array, label_number
from skipless.data.tables import Row, read_rows
from skipless.errors import UserError

Kind = Literal["classification", "regression"]
KINDS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1"),
    "regression": ("rmse", "pearson", "spearman"),
}
"""Kinds of tasks and their metrics; the first is the one that the best checkpoint is chosen by."""

MOST_CLASSES = 20
"""Whole numbers are classes if there are no more of them than these; `kind` says otherwise."""


def read_own_task(
    name: str,
    train: str,
    valid: str,
    test: str | None,
    *,
    texts: Sequence[str],
    label: str,
    kind: Kind | None = None,
    labels: Sequence[str] | None = None,
) -> TaskData:
    """A task from files of one's own (see `skipless.data.tables`).

    Classes are in the order of `labels`, or sorted. A test set may have no answers.
    """
    rows = list(read_rows(train))
    if not rows:
        raise UserError(f"{train} has no rows")
    found = [_answer(row, label) for row in rows]
    if kind is None:
        kind = "classification" if labels or not _are_measurements(found) else "regression"
    if kind not in KINDS:
        raise UserError(f"a task is classification or regression, got {kind!r}")
    classes = () if kind == "regression" else _classes(found, labels, train)
    task = Task(name, tuple(texts), label, classes, KINDS[kind])
    training = _examples(task, train, rows)
    validation = _examples(task, valid, list(read_rows(valid)))
    tests = {} if test is None else {"test": _examples(task, test, list(read_rows(test)), optional=True)}
    return TaskData(task, training, {"valid": validation}, tests)


def _answer(row: Row, column: str) -> str:
    text = row.get(column).strip()
    if not text:
        raise UserError(f"{row.where}: the column {column!r} is empty")
    return text


def _are_measurements(answers: Sequence[str]) -> bool:
    """Whether answers are numbers that measure something: not all whole, or more different ones than classes are."""
    try:
        numbers = {float(answer) for answer in answers}
    except ValueError:
        return False
    if not all(map(math.isfinite, numbers)):
        return False
    return len(numbers) > MOST_CLASSES or not all(number.is_integer() for number in numbers)


def _classes(found: Sequence[str], given: Sequence[str] | None, where: str) -> tuple[str, ...]:
    counts = Counter(found)
    if given is None:
        whole = all(re.fullmatch(r"-?\d{1,18}", answer) for answer in counts)
        names = sorted(counts, key=int) if whole else sorted(counts)
    else:
        names = [name.strip() for name in given]
        if len(set(names)) != len(names):
            raise UserError(f"a label is named twice in {', '.join(names)}")
        for name in names:
            if name not in counts:
                raise UserError(f"{where}: the class {name!r} has no row; labels there: {', '.join(sorted(counts))}")
    if len(names) < 2:
        raise UserError(f"{where}: there is one label only, {names[0]!r}: nothing can be learnt from it")
    return tuple(names)


def _examples(task: Task, where: str, rows: list[Row], *, optional: bool = False) -> Examples:
    if not rows:
        raise UserError(f"{where} has no rows")
    texts = [tuple(row.get(column) for column in task.texts) for row in rows]
    labelled = not optional or task.label in rows[0].values
    answers = [label_number(task, _answer(row, task.label), row.where) for row in rows] if labelled else []
    numbers = [row.number for row in rows]
    return Examples(
        where, texts, label_array(task, answers) if labelled else None, numbers, [str(n) for n in range(len(rows))]
    )
