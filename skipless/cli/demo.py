"""`skipless demo`: the standard block and the simplified one side by side, in minutes."""

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from skipless.cli.app import app
from skipless.cli.options import CacheOption, JsonOption, RunsOption, SetOption

if TYPE_CHECKING:
    from skipless.config.run import RunConfig

BLOCKS = ("pre-ln", "sas-p")


@app.command()
def demo(
    runs: RunsOption = Path("runs"),
    settings: SetOption = None,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train `pre-ln` and `sas-p` side by side on the source of Python's standard library, and show what came out.

    It takes about five minutes on two cores. Stopped or killed, the same command continues; once both are trained it
    shows them again. The runs are `demo-pre-ln` and `demo-sas-p` in `--runs`; beside them a page,
    `demo.html`, and where matplotlib is installed a plot, `demo.png`.

    Examples:

    - `skipless demo`

    - `skipless demo --set train.steps=100 --runs short`
    """
    from skipless.analysis.inspection import inspect
    from skipless.cli.report import report
    from skipless.cli.train import train_in
    from skipless.config.overrides import parse_overrides
    from skipless.recipes import recipe
    from skipless.storage.atomic_files import check_folder
    from skipless.terminal.inspection import show_inspections

    changes = parse_overrides(settings or [])
    configs = {block: recipe("demo", block).override(changes) for block in BLOCKS}
    check_folder(runs)
    if not as_json:
        shown = [inspect(cfg.model, block, causal=cfg.task == "causal") for block, cfg in configs.items()]
        show_inspections(shown, batch_size=8, context=1024, plot=None)
    folders = {block: runs / _name(block, cfg, changed=bool(changes)) for block, cfg in configs.items()}
    for block, cfg in configs.items():
        if not as_json:
            print(f"\n{block}, in {folders[block]}:", flush=True)
        train_in(cfg, folders[block], {"resume": True}, cache_dir, as_json=as_json)
    plot = runs / "demo.png" if find_spec("matplotlib") else None
    names = [str(folder) for folder in folders.values()]
    report(names, page=runs / "demo.html", plot=plot, samples=True, runs=runs, as_json=as_json)
    if not as_json:
        print(f"next: skipless generate {shlex.quote(names[-1])}")


def _name(block: str, cfg: "RunConfig", *, changed: bool) -> str:
    """A run's name; what was changed by `--set` is another run."""
    return f"demo-{block}-{cfg.digest}" if changed else f"demo-{block}"
