"""Runs and exports: their folders, and `skipless.load`."""

from skipless.runs.exports import exported_run, is_export
from skipless.runs.loading import MODELS, classifier_config, find_model, load, load_checkpoint
from skipless.runs.run import CLASSIFIER, Run, choose_checkpoint, find_run, is_classifier, is_measurement

__all__ = [
    "CLASSIFIER",
    "MODELS",
    "Run",
    "choose_checkpoint",
    "classifier_config",
    "exported_run",
    "find_model",
    "find_run",
    "is_classifier",
    "is_export",
    "is_measurement",
    "load",
    "load_checkpoint",
]
