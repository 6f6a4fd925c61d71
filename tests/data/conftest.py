from pathlib import Path

import pytest

from skipless.config.run import DataConfig
from tests.helpers.corpora import make_texts, write_jsonl


@pytest.fixture
def texts() -> list[str]:
    return make_texts(60)


@pytest.fixture
def cfg(tmp_path: Path, texts: list[str]) -> DataConfig:
    path = write_jsonl(tmp_path / "corpus.jsonl", texts)
    return DataConfig(source=f"jsonl:{path}", vocab_size=300, seq_len=16, valid_fraction=0.2)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"
