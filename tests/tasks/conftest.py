import shutil
from pathlib import Path

import pytest

from skipless.runs import Run
from skipless.training.train import train
from tests.helpers.glue_files import small_glue, write_tsv
from tests.helpers.tiny_runs import MASKED, tiny, write_text


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """The folder of a run with an encoder that was trained for a moment; nothing may change it."""
    folder = tmp_path_factory.mktemp("encoder")
    source = write_text(folder / "modules")
    shape = {"model.max_seq_len": 32, "data.seq_len": 32, "model.block": "sas-p", "model.embedding_norm": True}
    cfg = tiny(source, MASKED, shape, steps=6, eval_every=0)
    return train(cfg, folder / "run", trackers=[], cache_dir=folder / "cache").folder


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    """A little GLUE; nothing may change it."""
    return small_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def run(encoder, tmp_path):
    """A copy of the run that a test may write into."""
    return Run(Path(shutil.copytree(encoder, tmp_path / "run")))


@pytest.fixture
def with_a_word(tmp_path):
    """A little GLUE whose CoLA has a word in its lines 5 and 21 alone."""
    glue = small_glue(tmp_path / "glue")
    rows = [["x", n % 2, "", "alpha beta" if n not in (4, 20) else "alpha return"] for n in range(40)]
    write_tsv(glue / "CoLA" / "train.tsv", rows)
    return glue
