import pytest

from tests.train.processes import Commands, Nursery
from tests.train.tiny import write_text


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
    """Starts trainings as forked processes."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Starts trainings as commands."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()
