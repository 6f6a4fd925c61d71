"""The notebooks run from beginning to end, and are small."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_small_and_clean(path):
    assert path.stat().st_size < LARGEST
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert "/home/" not in text
    assert str(Path.home()) not in text
    assert "/tmp/" not in text


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["own_part", "two_blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch, cache_dir):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("SKIPLESS_SMOKE", "1")
    monkeypatch.setenv("SKIPLESS_CACHE", str(cache_dir))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in shown) >= 2
    warned = [output.text for output in shown if output.get("name") == "stderr"]
    assert warned == []
