"""The command line. Each command checks its input, calls the library and shows what came back; only here is printed.

Nothing heavy is imported before a command runs, so that `skipless --help` is quick.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from skipless.errors import UserError

app = typer.Typer(
    name="skipless",
    help="Transformer blocks with the unneeded parts taken out: build them, train them, run them faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CLICK_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base class of what typer raises for a wrong command line; typer carries its own copy of click."""

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command: status 0 if it did what was asked, 2 and one line on standard error for bad input."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    try:
        status = app(arguments, standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except typer.Abort:
        return _fail("stopped")
    except Exception as error:
        if isinstance(error, CLICK_ERROR):
            return _fail(_usage_message(error))
        if type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic"):
            from skipless.config import explain

            return _fail(explain(error))  # pyrefly: ignore
        raise
    return status if isinstance(status, int) else 0


def _usage_message(error: Any) -> str:
    """One line for a wrong command line, with the command whose help to read."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by giving nothing
        return error.format_message()
    command = getattr(getattr(error, "ctx", None), "command_path", "skipless")
    return f"{error.format_message().rstrip('.')} (see `{command} --help`)"


def _fail(message: str) -> int:
    if message:  # it is empty where typer has shown the help instead
        print(f"skipless: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from skipless import __version__

        print(f"skipless {__version__}")
        raise typer.Exit(0)


@app.command()
def inspect(
    blocks: Annotated[
        list[str] | None, typer.Argument(metavar="[BLOCK]...", help="Presets, or variants such as `pre-ln:alpha_sa=0`.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A model configuration, YAML or JSON; its block is inspected too."),
    ] = None,
    n_layer: Annotated[int | None, typer.Option("--n-layer", "-L", help="Depth.  [default: 18]")] = None,
    d_model: Annotated[int | None, typer.Option("--d-model", "-d", help="Width.  [default: 768]")] = None,
    n_head: Annotated[int | None, typer.Option("--n-head", "-H", help="Heads.  [default: 12]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any other key of the model configuration."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a training step, for its memory.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens in the cache, for the memory of decoding.", min=1)] = 1024,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Every token sees all (BERT) instead of the past (GPT).")
    ] = False,
    signal: Annotated[bool, typer.Option("--signal/--no-signal", help="Measure the signal at initialisation.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the tokens.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the signal over the layers into this file (PNG, SVG, PDF).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what blocks cost and whether their signal is healthy: parameters, FLOPs, memory, layer by layer.

    The size is the paper's CodeParrot model unless told otherwise.

    Examples:

    - `skipless inspect pre-ln sas sas-p`

    - `skipless inspect pre-ln pre-ln:alpha_sa=0 sas-p -L 72 -d 128 -H 4 --plot signal.png`

    - `skipless inspect sas --encoder --set block.mlp=glu --set vocab_size=32768 --json`
    """
    from skipless import display
    from skipless import inspect as inspection
    from skipless.config import ModelConfig, load_yaml, parse_overrides

    base: dict[str, Any] = {"n_layer": 18, "d_model": 768, "n_head": 12, "vocab_size": 50_000}
    given = {"n_layer": n_layer, "d_model": d_model, "n_head": n_head}
    base |= load_yaml(config) if config else {}
    base |= {key: value for key, value in given.items() if value is not None}
    specs: list[Any] = list(blocks or []) + ([base["block"]] if "block" in base else [])
    found = []
    if plot:
        display.check_plot(plot)
    for spec in specs or ["pre-ln", "sas-p"]:
        cfg = ModelConfig.model_validate({**base, "block": spec}).override(parse_overrides(settings or []))
        name = spec if isinstance(spec, str) else str(config)
        found.append(
            inspection.inspect(
                cfg, name, causal=not encoder, batch_size=batch_size, context=context, signal=signal, seed=seed
            )
        )
    if plot:
        display.plot_signal(found, plot)
    if as_json:
        print(json.dumps({"blocks": [one.as_dict() for one in found]}))
    else:
        display.show_inspections(found, batch_size=batch_size, context=context, plot=plot)
