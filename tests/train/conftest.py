import pytest

from tests.train.processes import Commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Starts trainings as commands."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()
