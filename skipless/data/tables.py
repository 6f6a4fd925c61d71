"""Rows with named columns, one at a time: TSV, CSV, JSON lines, plain text, or a data set of the Hugging Face hub.

x.tsv                        columns by the header; no quoting, as GLUE's files have none
x.csv                        columns by the header; quoted as spreadsheets do
x.jsonl, .jsonl.gz, .zst     an object a line
x.txt                        a text a line, in the column `text`
hf:DATASET[:config][@split]  a data set of the hub; class numbers become their names
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.data.sources import file_lines, optional
from skipless.errors import UserError, did_you_mean, first_line, user_path

FORMATS = (".tsv", ".csv", ".jsonl", ".json", ".txt")
LONGEST_FIELD = 2**27
"""Characters of a field of a CSV file; Python's own limit is 131,072."""


@dataclass(frozen=True)
class Row:
    """One row, by column."""

    values: dict[str, str]
    where: str
    """The file and the row, for messages."""
    number: int
    """Where it stands in the file, counted from 1; the header is a row."""

    def get(self, column: str) -> str:
        """A column's text; a UserError that lists the columns where there is no such column."""
        if column not in self.values:
            known = ", ".join(self.values)
            raise UserError(
                f"{self.where}: there is no column {column!r}; columns: {known}{did_you_mean(column, self.values)}"
            )
        return self.values[column]


def read_rows(spec: str) -> Iterator[Row]:
    """The rows of a file or of a data set of the hub, read as they are asked for."""
    if spec.startswith("hf:"):
        return _hub(spec)
    path = user_path(spec)
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in (".gz", ".zst")), "")
    if kind not in FORMATS:
        raise UserError(f"{spec!r}: rows are read from {', '.join(FORMATS)}, also .gz and .zst, or hf:DATASET")
    if not path.is_file():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{str(path)!r} is missing{did_you_mean(path.name, near)}")
    return text_rows(_decoded(path), kind, str(path))


def text_rows(lines: Iterable[str], kind: str, where: str) -> Iterator[Row]:
    """Rows of lines of text in one of `FORMATS`."""
    if kind == ".txt":
        return (Row({"text": line}, f"{where}, row {n}", n) for n, line in enumerate(lines, start=1))
    return {".tsv": _tsv, ".csv": _csv}.get(kind, _json)(iter(lines), where)


def _decoded(path: Path) -> Iterator[str]:
    """Lines without their ends, which are a newline or a carriage return and one."""
    for number, line in enumerate(file_lines(path), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}, row {number}: not UTF-8") from None
        yield text.removesuffix("\n").removesuffix("\r")


def _tsv(lines: Iterator[str], where: str) -> Iterator[Row]:
    header = _header(next(lines, "").split("\t"), where)
    for number, line in enumerate(lines, start=2):
        yield _row(header, line.split("\t"), where, number)


def _csv(lines: Iterator[str], where: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    try:
        header = _header(next(reader, []), where)
        for fields in reader:
            if fields:
                yield _row(header, fields, where, reader.line_num)
    except csv.Error as error:
        raise UserError(f"{where}, row {reader.line_num}: {error}") from None


def _header(names: list[str], where: str) -> list[str]:
    if not any(names):
        raise UserError(f"{where} is empty")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"{where}, row 1: the column {min(twice)!r} is there twice")
    return names


def _row(header: list[str], fields: list[str], where: str, number: int) -> Row:
    if len(fields) != len(header):
        raise UserError(f"{where}, row {number}: {len(fields)} fields, and the header has {len(header)}")
    return Row(dict(zip(header, fields, strict=True)), f"{where}, row {number}", number)


def _json(lines: Iterator[str], where: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}, row {number}: not valid JSON ({first_line(error)})") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}, row {number}: expected a JSON object, got {type(record).__name__}")
        yield Row({str(key): as_text(value) for key, value in record.items()}, f"{where}, row {number}", number)


def as_text(value: Any) -> str:
    """A value of JSON as a file of text would have it."""
    if isinstance(value, str):  # half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes `?`
        return value.encode(errors="replace").decode()
    return "" if value is None else json.dumps(value)


def _hub(spec: str) -> Iterator[Row]:
    name, _, split = spec.removeprefix("hf:").partition("@")
    dataset, _, config = name.partition(":")
    datasets = optional("datasets", "hub", f"{spec!r}")
    try:
        rows = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
    except Exception as error:  # datasets raises a dozen kinds, all of them about the name or the network
        raise UserError(f"{spec!r} cannot be opened: {first_line(error)}") from error
    features = rows.features or {}
    names = {key: feature.names for key, feature in features.items() if hasattr(feature, "names")}
    for number, record in enumerate(rows, start=1):
        values = {key: _named(names.get(key), value) for key, value in record.items()}
        yield Row(values, f"{spec}, row {number}", number)


def _named(names: list[str] | None, value: Any) -> str:
    known = names is not None and isinstance(value, int) and 0 <= value < len(names)
    return names[value] if known and names is not None else as_text(value)
