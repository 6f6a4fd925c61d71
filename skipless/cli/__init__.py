"""The command line. Each command checks its input, calls the library and shows what came back.

Nothing heavy is imported before a command runs, so that `skipless --help` is quick.
"""

from skipless.cli import training, using, finetuning, data, measuring  # noqa: I001  (the order of the commands in --help)
from skipless.cli.frame import app, main, run

__all__ = ["app", "data", "finetuning", "main", "measuring", "run", "training", "using"]
