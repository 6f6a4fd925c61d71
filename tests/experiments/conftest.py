import pytest

from tests.helpers.tiny_runs import CAUSAL

TINY = {key: value for key, value in CAUSAL.items() if key not in ("train.lr", "train.steps", "train.save_every")}
TINY["train.tuning_rows"] = 8
"""The recipes of experiments have 256, whose evaluation would take three quarters of the time."""


@pytest.fixture(scope="session")
def small(source, cache_dir):
    """Options that make every run of an experiment a matter of a second, and `steps` more."""

    def options(steps: int = 12, save_every: int = 4) -> list[str]:
        settings = {**TINY, "data.source": source, "train.steps": steps, "train.save_every": save_every}
        words = [
            word for key, value in settings.items() for word in ("--set", f"{key}={'null' if value is None else value}")
        ]
        return [*words, "--cache-dir", str(cache_dir)]

    return options
