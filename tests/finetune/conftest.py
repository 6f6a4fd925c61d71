import pytest

from skipless.train import train
from tests.finetune.glue import small_glue
from tests.train.tiny import MASKED, tiny, write_text


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
