import pytest

from tests.train.tiny import write_text


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> str:
    """Text that is written once; nothing may change it."""
    return write_text(tmp_path_factory.mktemp("text") / "modules")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """Prepared data."""
    return tmp_path_factory.mktemp("cache")
