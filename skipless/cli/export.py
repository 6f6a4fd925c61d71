"""`skipless export`: a trained model for others."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipless.cli.app import app
from skipless.cli.options import CACHE_MODE, TO, CheckpointOption, JsonOption, ModelArgument, PluginOption, RunsOption
from skipless.cli.renamed import renamed

if TYPE_CHECKING:
    from skipless.interop.onnx_options import OnnxOptions


@app.command(cls=renamed({"--which": "--checkpoint"}))
def export(
    run: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[str, TO] = "hf",
    bits: Annotated[int | None, typer.Option(help="For onnx: bits of a weight, 4, 8 or 32.")] = None,
    cache: Annotated[str | None, CACHE_MODE] = None,
    cache_bits: Annotated[int | None, typer.Option(help="For onnx: bits of what the cache remembers, 8 or 32.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="For onnx at low bits: weights that share a scale, 16, 32, … 256.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="For onnx at low bits: scales alone, or zero points too."),
    ] = None,
    checkpoint: CheckpointOption = "last",
    runs: RunsOption = Path("runs"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as a folder for others, with a model card.

    `hf` opens with the Auto classes of `transformers`, with this package or, by `trust_remote_code=True`, without it.
    `onnx` is a graph for any batch and length, checked in ONNX Runtime against PyTorch. That of a causal model has a
    cache, and `skipless generate`, `evaluate` and `bench decode` run it; with `--cache none` it is a graph of whole
    sequences. `safetensors` is the weights and the configuration, for `skipless.load`. RUN may also be an export, or a
    folder that `save_pretrained` wrote.

    Examples, with a run of `skipless demo`:

    - `skipless export demo-sas-p exported`

    - `skipless export demo-sas-p small --to onnx --bits 4`

    - `skipless export demo-sas-p weights --to safetensors --checkpoint best`

    - `skipless export exported graph --to onnx`
    """
    from skipless.interop.export import export_run
    from skipless.runs import find_model

    given = {"bits": bits, "cache": cache, "cache_bits": cache_bits, "block_size": block_size, "symmetric": symmetric}
    given = {name: value for name, value in given.items() if value is not None}
    options = _onnx_options(given) if given else None
    folder = export_run(find_model(run, runs), to, out, checkpoint=checkpoint, overwrite=overwrite, onnx=options)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        print(json.dumps({"path": str(folder), "format": to, "files": sizes}))
    else:
        print(f"exported to {folder}: {len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB")


def _onnx_options(given: dict[str, Any]) -> "OnnxOptions":
    from pydantic import ValidationError

    from skipless.config.explain import explain
    from skipless.errors import UserError
    from skipless.interop.onnx_options import OnnxOptions

    try:
        return OnnxOptions(**given)
    except ValidationError as error:
        raise UserError(explain(error)) from None
