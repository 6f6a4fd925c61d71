"""`skipless export`: a trained model for others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.frame import JsonOption, RunArgument, app
from skipless.errors import UserError


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[str, typer.Option(help="hf, onnx or safetensors.")] = "hf",
    which: Annotated[str, typer.Option(help="Checkpoint: last or best.")] = "last",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as a folder for others, with a model card.

    `hf` opens with the Auto classes of `transformers`, with this package or, by `trust_remote_code=True`, without it.
    `onnx` is a graph for any batch and length, checked in ONNX Runtime against PyTorch. `safetensors` is the weights
    and the configuration, for `skipless.load`. RUN may also be an export, or a folder that `save_pretrained` wrote.

    Examples:

    - `skipless export runs/baseline exported`

    - `skipless export runs/baseline graph --to onnx --which best --overwrite`

    - `skipless export exported graph --to onnx`
    """
    if which not in ("last", "best"):
        raise UserError(f"--which takes last or best, got {which!r}")
    from skipless.export import export_run

    folder = export_run(run, to, out, which=which, overwrite=overwrite)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        print(json.dumps({"path": str(folder), "format": to, "files": sizes}))
    else:
        print(f"exported to {folder}: {len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB")
