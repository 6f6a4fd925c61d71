"""The GLUE benchmark: nine tasks, read from their official TSV files or from the Hugging Face hub.

    DIR/CoLA/train.tsv, dev.tsv, test.tsv       and so on for the other tasks; test.tsv may be missing
    DIR/MNLI/dev_matched.tsv, dev_mismatched.tsv

A TSV file of GLUE has no quoting: a quotation mark is a character of the text. Columns are found by the names in the
header, so the full files and those with fewer columns both do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skipless.config.reading import read_bytes
from skipless.data.labelled import Examples, Task, TaskData, label_array, label_number
from skipless.data.sources import optional
from skipless.errors import UserError, did_you_mean, first_line, unknown, user_path

BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True, kw_only=True)
class GlueTask(Task):
    """One task of GLUE: also where its files are, and what they are called elsewhere."""

    folder: str
    dev: Mapping[str, str]
    """Column of the paper's table → file."""
    test: Mapping[str, str]
    """Name at the leaderboard → file, below the folder."""
    hub_texts: tuple[str, ...] = ()
    """The columns' names on the hub, where they differ."""
    columns: tuple[str, ...] | None = None
    """The columns of training and dev files that have no header."""
    skips_short_rows: bool = False
    """Whether the official file has rows that are cut off, which everyone leaves out."""


def _task(name: str, folder: str, texts: str, labels: tuple[str, ...], metrics: str, **more: Any) -> GlueTask:
    files: dict[str, Any] = {"dev": {name: "dev.tsv"}, "test": {folder: "test.tsv"}, "label": "label"}
    known: dict[str, Any] = {"texts": tuple(texts.split(", ")), "labels": labels, "metrics": tuple(metrics.split())}
    return GlueTask(name=name, folder=folder, **known, **files | more)


TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        _task(
            "mnli",
            "MNLI",
            "sentence1, sentence2",
            ("entailment", "neutral", "contradiction"),
            "accuracy",
            label="gold_label",
            dev={"mnli": "dev_matched.tsv", "mnli-mm": "dev_mismatched.tsv"},
            test={
                "MNLI-m": "test_matched.tsv",
                "MNLI-mm": "test_mismatched.tsv",
                "AX": "../diagnostic/diagnostic.tsv",
            },
            hub_texts=("premise", "hypothesis"),
        ),
        _task("sst2", "SST-2", "sentence", BINARY, "accuracy"),
        _task("stsb", "STS-B", "sentence1, sentence2", (), "pearson spearman", label="score", range=(0.0, 5.0)),
        _task("rte", "RTE", "sentence1, sentence2", ENTAILMENT, "accuracy"),
        _task("qnli", "QNLI", "question, sentence", ENTAILMENT, "accuracy"),
        _task("qqp", "QQP", "question1, question2", BINARY, "accuracy f1", label="is_duplicate", skips_short_rows=True),
        _task(
            "mrpc",
            "MRPC",
            "#1 String, #2 String",
            BINARY,
            "accuracy f1",
            label="Quality",
            hub_texts=("sentence1", "sentence2"),
        ),
        _task("cola", "CoLA", "sentence", BINARY, "matthews", columns=("source", "label", "original", "sentence")),
        _task("wnli", "WNLI", "sentence1, sentence2", BINARY, "accuracy"),
    )
}
"""In the order of the paper's table 2; WNLI, which the paper leaves out as everyone does, comes last."""

ALL = tuple(name for name in TASKS if name != "wnli")

COLUMNS = tuple(column for task in TASKS.values() for column in task.dev)
"""Of the paper's table 2, whose average counts both parts of MNLI."""


def parse_tasks(names: str) -> list[GlueTask]:
    """`all` (without WNLI), or names with commas, in the order of the table; SST-2 is also sst2."""
    wanted = set()
    for name in names.split(","):
        plain = name.strip().lower().replace("-", "")
        if plain != "all" and plain not in TASKS:
            raise unknown("GLUE task", name.strip(), ["all", *TASKS])
        wanted |= set(ALL) if plain == "all" else {plain}
    return [task for name, task in TASKS.items() if name in wanted]


def parse_rows(text: str) -> int | dict[str, int]:
    """`8000`, or for some tasks alone: `sst2=1000,qqp=5000`."""
    parts = [part.rpartition("=") for part in text.split(",")]
    numbers = [int(number) if number.strip().isdecimal() else 0 for _, _, number in parts]
    if not all(numbers) or (len(parts) > 1 and not all(sign for _, sign, _ in parts)):
        raise UserError(
            f"cannot read rows {text!r}: a number such as 8000, or numbers of some tasks: sst2=1000,qqp=5000"
        )
    if not parts[0][1]:
        return numbers[0]
    return {task.name: rows for (name, _, _), rows in zip(parts, numbers, strict=True) for task in parse_tasks(name)}


def read_task(source: Path | str, task: GlueTask) -> TaskData:
    """All of a task, from the folder of GLUE or from `hf:DATASET` on the hub."""
    text = str(source)
    if text.startswith("hf:"):
        return _read_hub(text.removeprefix("hf:"), task)
    folder = user_path(str(source)) / task.folder
    if not folder.is_dir():
        raise UserError(f"{task.name}: there is no folder {str(folder)!r}{_near(folder)}")
    tests = {name: folder / file for name, file in task.test.items()}
    return TaskData(
        task,
        read_tsv(folder / "train.tsv", task),
        {column: read_tsv(folder / file, task) for column, file in task.dev.items()},
        {name: read_tsv(path, task, labelled=False) for name, path in tests.items() if path.exists()},
    )


def read_one_task(source: Path | str, task: GlueTask) -> TaskData:
    """A task as rows of one's own are: one dev set to validate on, and the test set that goes with it."""
    data = read_task(source, task)
    test = data.test.get(next(iter(task.test)))
    return TaskData(task, data.train, {"valid": next(iter(data.dev.values()))}, {} if test is None else {"test": test})


def _near(path: Path) -> str:
    try:
        return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return ""


# ------------------------------------------------------------------------------ TSV files


def read_tsv(path: Path, task: GlueTask, *, labelled: bool = True) -> Examples:
    """The rows of an official file."""
    lines = _lines(path)
    columns, start = _columns(path, task, lines, labelled)
    texts, labels, numbers, index = [], [], [], []
    for number, line in enumerate(lines[start:], start=start + 1):
        fields = line.split("\t")
        if len(fields) <= max(columns[name] for name in _needed(task, labelled)):
            if task.skips_short_rows:
                continue
            raise UserError(f"{path}, row {number}: {len(fields)} fields, too few for {_listed(task, labelled)}")
        texts.append(tuple(fields[columns[name]] for name in task.texts))
        if labelled:
            labels.append(label_number(task, fields[columns[task.label]], f"{path}, row {number}"))
        index.append(fields[columns["index"]] if "index" in columns else str(len(index)))
        numbers.append(number)
    if not texts:
        raise UserError(f"{path} has no rows")
    skipped = len(lines) - start - len(texts)
    return Examples(str(path), texts, label_array(task, labels) if labelled else None, numbers, index, skipped)


def _lines(path: Path) -> list[str]:
    """Lines end with a newline, or a carriage return and one; Unicode's other line breaks belong to the text."""
    if not path.exists():
        raise UserError(f"{path} is missing{_near(path)}")
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, row {row}: not UTF-8") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _columns(path: Path, task: GlueTask, lines: list[str], labelled: bool) -> tuple[dict[str, int], int]:
    """Where each column is, and how many lines the header has."""
    header = task.columns if task.columns and labelled else tuple(lines[0].split("\t"))
    columns = {name: number for number, name in enumerate(header)}
    for name in _needed(task, labelled):
        if name not in columns:
            raise UserError(
                f"{path}, row 1: there is no column {name!r}; columns: {', '.join(header)}{did_you_mean(name, header)}"
            )
    return columns, int(header is not task.columns)


def _needed(task: GlueTask, labelled: bool) -> tuple[str, ...]:
    return (*task.texts, task.label) if labelled else task.texts


def _listed(task: GlueTask, labelled: bool) -> str:
    return ", ".join(_needed(task, labelled))


# --------------------------------------------------------------------------------- the hub


def _read_hub(name: str, task: GlueTask) -> TaskData:
    datasets = optional("datasets", "hub", f"GLUE from 'hf:{name}'")
    try:
        found = datasets.load_dataset(name, task.name)
    except Exception as error:  # datasets raises a dozen kinds, all of them about the name or the network
        raise UserError(f"'hf:{name}', {task.name}, cannot be opened: {first_line(error)}") from error

    def read(split: str, *, labelled: bool = True) -> Examples:
        if split not in found:
            raise UserError(f"'hf:{name}', {task.name}, has no split {split!r}; splits: {', '.join(found)}")
        return _hub_split(f"hf:{name}/{task.name}/{split}", task, found[split], labelled)

    return TaskData(
        task,
        read("train"),
        {column: read(file.removesuffix(".tsv").replace("dev", "validation")) for column, file in task.dev.items()},
        {
            board: read(file.removesuffix(".tsv"), labelled=False)
            for board, file in task.test.items()
            if file.removesuffix(".tsv") in found
        },
    )


def _hub_split(where: str, task: GlueTask, rows: Any, labelled: bool) -> Examples:
    names = task.hub_texts or task.texts
    missing = [column for column in (*names, "label") if column not in rows.column_names]
    if missing:
        raise UserError(f"{where}: there is no column {missing[0]!r}; columns: {', '.join(rows.column_names)}")
    labels = list(rows["label"]) if labelled else []
    for number, label in enumerate(labels, start=1):
        known = task.range[0] <= label <= task.range[1] if task.is_regression else label in range(task.outputs)
        if not known:
            raise UserError(f"{where}, row {number}: label {label} is not one of the task's")
    texts = list(zip(*(rows[name] for name in names), strict=True))
    if not texts:
        raise UserError(f"{where} has no rows")
    numbers = list(range(1, len(texts) + 1))
    return Examples(
        where, texts, label_array(task, labels) if labelled else None, numbers, [str(n - 1) for n in numbers]
    )


def predictions(task: Task, index: Sequence[str], answers: np.ndarray) -> str:
    """A file for the leaderboard: a header, and a row for each question."""
    write: Callable[[Any], str] = (
        (lambda answer: f"{np.clip(answer, *task.range):.3f}")
        if task.is_regression
        else (lambda answer: task.labels[int(answer)])
    )
    rows = (f"{number}\t{write(answer)}" for number, answer in zip(index, answers, strict=True))
    return "\n".join(["index\tprediction", *rows]) + "\n"
