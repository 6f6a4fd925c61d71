"""The command line. Each command checks its input, calls the library and shows what came back.

Nothing heavy is imported before a command runs, so that `skipless --help` is quick.
"""

# in the order of the commands in --help
from skipless.cli import (  # noqa: I001
    demo,
    train,
    finetune,
    evaluate,
    predict,
    generate,
    report,
    export,
    reproduce,
    compare,
    family,
    sweep,
    data,
    inspect,
    bench,
    new_part,
)
from skipless.cli.app import app, main, run

__all__ = [
    "app",
    "bench",
    "compare",
    "data",
    "demo",
    "evaluate",
    "export",
    "family",
    "finetune",
    "generate",
    "inspect",
    "main",
    "new_part",
    "predict",
    "report",
    "reproduce",
    "run",
    "sweep",
    "train",
]
