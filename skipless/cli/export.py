"""`skipless export`: a trained model for others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from skipless.cli.app import app
from skipless.cli.options import CheckpointOption, JsonOption, ModelArgument, PluginOption, RunsOption
from skipless.cli.renamed import renamed


@app.command(cls=renamed({"--which": "--checkpoint"}))
def export(
    run: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[str, typer.Option(help="hf, onnx or safetensors.")] = "hf",
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as a folder for others, with a model card.

    `hf` opens with the Auto classes of `transformers`, with this package or, by `trust_remote_code=True`, without it.
    `onnx` is a graph for any batch and length, checked in ONNX Runtime against PyTorch. `safetensors` is the weights
    and the configuration, for `skipless.load`. RUN may also be an export, or a folder that `save_pretrained` wrote.

    Examples:

    - `skipless export runs/baseline exported`

    - `skipless export runs/baseline graph --to onnx --checkpoint best`

    - `skipless export exported graph --to onnx`
    """
    from skipless.interop.export import export_run
    from skipless.runs import find_model

    folder = export_run(find_model(run, runs), to, out, checkpoint=checkpoint, overwrite=overwrite)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        print(json.dumps({"path": str(folder), "format": to, "files": sizes}))
    else:
        print(f"exported to {folder}: {len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB")
