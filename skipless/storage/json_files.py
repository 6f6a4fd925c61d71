"""JSON Lines files from any source: malformed rows are reported and skipped."""

import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from skipless.config.reading import check_regular


class SkippedRow(UserWarning):
    """A row of a file was passed over; the message names both."""


def read_json_lines(path: Path, is_record: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """The records in a file of JSON lines, compressed or not; one that is not there has none.

    A row that is no record is passed over with a `SkippedRow`. A last line that is still being written is left out.
    """
    if not path.exists():
        return
    check_regular(path)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for row, line in enumerate(_lines(file, path), start=1):
            record = parse_line(line)
            if record is not None and is_record(record):
                yield record
            else:
                start = line[:40].decode(errors="replace").strip()
                warnings.warn(f"{path}, row {row} is no record and was passed over: {start}", SkippedRow, stacklevel=1)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, if it holds one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _lines(file: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    try:
        yield from (line for line in file if line.endswith(b"\n"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        warnings.warn(f"{path} cannot be read to its end: {error}", SkippedRow, stacklevel=1)


def are_numbers(value: Any) -> bool:
    """Whether all that a JSON value holds are numbers, or null."""
    if isinstance(value, dict | list):
        return all(map(are_numbers, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float)
