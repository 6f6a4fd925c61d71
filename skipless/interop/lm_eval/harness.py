"""Evaluation by lm-evaluation-harness: its tasks, those of a local folder, and the one that ships with this package."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from skipless.distributed.devices import pick_device
from skipless.errors import MissingExtra, UserError, did_you_mean, first_line
from skipless.interop.quiet import quiet
from skipless.nn.model import CausalLM
from skipless.runs import load
from skipless.runtime.model import OnnxCausalLM

Scores = dict[str, dict[str, float]]
"""Task → metric → value; `<metric>_stderr` is the standard error."""


def evaluate_tasks(
    path: Path | str,
    tasks: Sequence[str],
    *,
    task_path: Path | None = None,
    checkpoint: int | str = "last",
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
) -> Scores:
    """Scores of a run or of an exported model; `task_path` is a folder with task files, `limit` a number of items."""
    if not tasks:
        raise UserError("there is no task to evaluate")
    if task_path is not None and not task_path.is_dir():
        raise UserError(f"there is no folder of tasks at {str(task_path)!r}")
    model = load(path, checkpoint=checkpoint)
    if isinstance(model, OnnxCausalLM):
        raise UserError(f"{str(path)!r} is an ONNX export, which the harness cannot score: give the run")
    if not isinstance(model, CausalLM):
        raise UserError(f"{str(path)!r} holds a {type(model).__name__}; the harness scores causal models")
    if model.tokenizer is None:
        raise UserError(f"{str(path)!r} has no tokenizer.json, so it cannot read text")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise MissingExtra("lm_eval", "eval", "evaluation by tasks") from None
    from skipless.interop.hf import wrap, wrap_tokenizer

    tokenizer = wrap_tokenizer(model.tokenizer, model.config.max_seq_len)
    # the harness prints remarks, and standard output is the caller's
    with (
        as_file(files("skipless.interop.lm_eval").joinpath("")) as shipped,
        quiet("lm_eval"),
        redirect_stdout(sys.stderr),
    ):
        manager = _manager(tasks, [shipped, *([] if task_path is None else [task_path])])
        wrapped = wrap(model.to(pick_device(device)))
        harness = HFLM(pretrained=wrapped, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        try:
            found = simple_evaluate(harness, tasks=list(tasks), task_manager=manager, limit=limit)
        except MemoryError:
            raise
        except Exception as error:  # a task is anybody's file, and its data anybody's: what they raise has no one type
            raise UserError(f"the harness failed at {', '.join(tasks)}: {first_line(error)}") from error
    assert found is not None
    return {task: _scores(values) for task, values in found["results"].items()}


def _manager(tasks: Sequence[str], folders: list[Path]) -> Any:
    """What knows the tasks: the local ones, and where these are not enough, the harness's own, which are many."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    local = list(manager.all_tasks)
    if not set(tasks) <= set(local):
        manager = TaskManager(include_path=[str(folder) for folder in folders])
    for task in tasks:
        if task not in manager.all_tasks:
            near = did_you_mean(task, manager.all_tasks)
            raise UserError(f"unknown task {task!r}; here: {', '.join(local)}, and those of lm-eval{near}")
    return manager


def _scores(values: dict[str, Any]) -> dict[str, float]:
    """`acc,none` → `acc`; the filter's name is kept where there is one."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in key
    }
