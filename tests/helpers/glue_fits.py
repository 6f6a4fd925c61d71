"""Fine-tunings that take a moment."""

from pathlib import Path

from skipless.config.run import FinetuneConfig
from skipless.data.glue import TASKS, read_task
from skipless.runs import Run, load
from skipless.tasks.classifier_fit import ClassifierFit
from skipless.tasks.task_rows import TaskRows

QUICK = FinetuneConfig(epochs=2, batch_size=8, lr=3e-3)
"""Twelve steps on 48 rows."""


def fit_of(run: Run, glue: Path, task: str = "cola", cfg: FinetuneConfig = QUICK, seed: int = 0) -> ClassifierFit:
    """The fine-tuning of a run's encoder on one task, before its first step."""
    data, tokenizer = read_task(glue, TASKS[task]), run.tokenizer()
    rows = TaskRows.make(data.train, tokenizer, 32, cfg.rows_of(task), seed)
    return ClassifierFit(run.config(), cfg, tokenizer, load(run.folder), TASKS[task], rows, seed)
