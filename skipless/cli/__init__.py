"""The command line. Each command checks its input, calls the library and shows what came back.

Nothing heavy is imported before a command runs, so that `skipless --help` is quick.
"""

# in the order of the commands in --help
from skipless.cli import (  # noqa: I001
    training,
    finetuning,
    using,
    exporting,
    experiments,
    data,
    measuring,
)
from skipless.cli.frame import app, main, run

__all__ = [
    "app",
    "data",
    "experiments",
    "exporting",
    "finetuning",
    "main",
    "measuring",
    "run",
    "training",
    "using",
]
