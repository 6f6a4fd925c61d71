"""`skipless new-part`: a part of one's own to begin with."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import JsonOption, OutputOption


@app.command("new-part")
def new_part(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the part is called, as `my-norm`.")],
    kind: Annotated[str, typer.Option("--part", help="norm, mixing, map, mlp or activation.")] = "norm",
    output: OutputOption = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a part of your own to begin with: a file that works, its test, and its training in five lines.

    The test holds the part to what ours are held to; it passes as it is. Change the equation, and run it again.

    Examples:

    - `skipless new-part my-norm`

    - `skipless new-part my-mixing --part mixing --output parts`
    """
    from skipless.tasks.new_part import new_part as write

    files = write(name, kind, output)
    if as_json:
        print(json.dumps({"files": [str(path) for path in files]}))
        return
    part, test, training = files
    again = shlex.join(["skipless", "inspect", "pre-ln", f"pre-ln-{name}", "--plugin", str(part)])
    print(f"part:  {part}\ntest:  {shlex.join(['pytest', str(test)])}\ntrain: {shlex.join(['python', str(training)])}")
    print(f"next:  {again}")
