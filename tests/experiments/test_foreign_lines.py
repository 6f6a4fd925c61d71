"""One row that nobody can read stops neither a report nor the experiments."""

import json

import pytest

from skipless import cli
from skipless.experiments.evidence import History
from skipless.experiments.run_index import RunIndex, completion
from skipless.storage.json_files import SkippedRow
from tests.helpers.made_up_runs import make_run

BAD = ['{"step": 2, "tok', "[1, 2]", '{"foreign": true}', '{"step": "x", "tokens": 0, "seconds": 0}']


@pytest.fixture(params=BAD)
def damaged(tmp_path, request):
    """A finished run with a row in the midst of its metrics that is none, beside one that is whole."""
    make_run(tmp_path / "runs" / "whole", seed=1)
    run = make_run(tmp_path / "runs" / "damaged", sample="text")
    lines = run.metrics_file.read_text().splitlines()
    run.metrics_file.write_text("\n".join([*lines[:-3], request.param, *lines[-3:]]) + "\n")
    return run, len(lines) - 2


def test_report_names_the_row_and_goes_on(tmp_path, damaged, capsys):
    run, row = damaged
    names = [str(tmp_path / "runs" / name) for name in ("damaged", "whole")]
    assert cli.run(["report", *names, "--page", str(tmp_path / "page.html"), "--samples", "--json"]) == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"skipless: {run.metrics_file}, row {row} is no record and was passed over")
    found = json.loads(said.out)
    assert "damaged" in json.dumps(found)


def test_the_experiments_read_what_is_left(tmp_path, damaged):
    run, row = damaged
    with pytest.warns(SkippedRow, match=f"row {row} "):
        assert completion(run).finished
    with pytest.warns(SkippedRow, match=f"row {row} "):
        assert History.read(run).finished
    with pytest.warns(SkippedRow):
        assert completion(RunIndex(tmp_path / "runs").find(run.config())).finished
