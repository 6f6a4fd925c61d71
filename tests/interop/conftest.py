"""One small training and its export, shared by the tests of this folder."""

import pytest

from skipless.interop.export import export_run
from skipless.training.train import train
from tests.helpers.tiny_runs import tiny, write_text


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A `sas-p` trained for a few steps, with text that repeats itself."""
    folder = tmp_path_factory.mktemp("hf")
    changes = {"model.block": "sas-p", "model.max_seq_len": 128, "train.sample_every": 0}
    cfg = tiny(write_text(folder / "text"), changes, steps=40, eval_every=20, save_every=20)
    return train(cfg, folder / "run", cache_dir=folder / "cache", trackers=[]).folder


@pytest.fixture(scope="session")
def exported(run_folder):
    """The same for Hugging Face."""
    return export_run(run_folder, "hf", run_folder.parent / "exported")
