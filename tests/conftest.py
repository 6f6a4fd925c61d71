import hypothesis
import pytest
import torch

from tests.train.processes import Nursery
from tests.train.tiny import write_text

# how long an example takes is up to what else the machine does
hypothesis.settings.register_profile("skipless", deadline=None)
hypothesis.settings.load_profile("skipless")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> str:
    """Text that is written once; nothing may change it."""
    return write_text(tmp_path_factory.mktemp("text") / "modules")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """Prepared data, shared by the tests that do not damage it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """Starts commands as forked processes."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()
