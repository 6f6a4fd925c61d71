"""`skipless predict`: answers of a fine-tuned classifier, a JSON line each."""

import io
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from skipless.cli.app import app
from skipless.cli.options import (
    BATCH_SIZE,
    OUTPUT,
    CheckpointOption,
    DeviceOption,
    JsonOption,
    PluginOption,
    RunsOption,
    TextOption,
    TextPairOption,
)
from skipless.errors import UserError


@app.command()
def predict(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A classifier's folder, or its name below --runs; or an exported one."),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--input", help="Rows: a .tsv, .csv, .jsonl or .txt file, hf:DATASET@split, or - for lines of text."
        ),
    ] = "-",
    text: TextOption = None,
    text_pair: TextPairOption = None,
    output: Annotated[Path | None, OUTPUT] = None,
    batch_size: Annotated[int, BATCH_SIZE] = 64,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a classifier that `skipless finetune` made: for each row a JSON line, in order, as it is read.

    A line has the row's number, and `label`, `probability` and the `probabilities` of all classes; or `value`, where
    it was trained on numbers. With `--json` it is one object with all `answers`. The columns are those that it was
    trained on, unless others are given.

    Examples:

    - `skipless predict mood --input new.tsv`

    - `skipless predict runs/mood --input new.jsonl --text body --output out.jsonl`

    - `echo 'what a day' | skipless predict mood --checkpoint best`
    """
    from skipless.data.tables import read_rows, text_rows
    from skipless.distributed.devices import pick_device
    from skipless.nn.model import SequenceClassifier
    from skipless.runs import find_model, load
    from skipless.tasks.predict import predict as ask

    place = pick_device(device)
    opened = load(find_model(model, runs), checkpoint=checkpoint)
    if not isinstance(opened, SequenceClassifier):
        raise UserError(f"{model!r} is no classifier: make one with skipless finetune")
    rows = text_rows(_standard_input(), ".txt", "standard input") if source == "-" else read_rows(source)
    given = [column for column in (text, text_pair) if column is not None]
    if text_pair is not None and text is None:
        raise UserError("--text-pair goes with --text")
    columns = given or (["text"] if source == "-" else list(opened.texts))
    if len(columns) != len(opened.texts):
        raise UserError(
            f"{model!r} was trained on {len(opened.texts)} text(s), {', '.join(opened.texts)}; got {len(columns)}"
        )
    numbers: deque[int] = deque()

    def texts() -> Iterator[tuple[str, ...]]:
        for row in rows:
            numbers.append(row.number)
            yield tuple(row.get(column) for column in columns)

    answers = ({"row": numbers.popleft(), **one} for one in ask(opened.to(place), texts(), batch_size=batch_size))
    with _written(output) as file:
        for answer in [{"model": model, "answers": list(answers)}] if as_json else answers:
            print(json.dumps(answer, ensure_ascii=False), file=file)


@contextmanager
def _written(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that is there when it is whole; a link stays one, and a device is never replaced."""
    if path is None:
        yield sys.stdout
        return
    from skipless.storage.atomic_files import staged_file

    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is not a file: give another --output, or none and redirect what is printed")
    with staged_file(os.path.realpath(path)) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        yield text
        text.detach()  # and with it what is still to be written


def _standard_input() -> Iterator[str]:
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise UserError("there are no rows: give --input FILE, or lines of text on standard input")
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise UserError(f"standard input, row {number}: not UTF-8") from None
