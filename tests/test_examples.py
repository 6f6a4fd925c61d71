"""The examples run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TAKE = "import os, pathlib, sys; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); sys.exit(int(sys.argv[2]))"


@pytest.mark.parametrize("status", [0, 1])
def test_slurm_workers_run_one_command_each(tmp_path, status):
    """As processes of this machine: each runs the command, and the script says if one failed."""
    pytest.importorskip("submitit")
    (tmp_path / "work").mkdir()
    script = [sys.executable, str(ROOT / "examples" / "slurm_workers.py"), "--cluster", "local", "--workers", "2"]
    command = [sys.executable, "-c", TAKE, str(tmp_path / "work"), str(status)]
    done = subprocess.run(
        [*script, "--logs", str(tmp_path / "logs"), "--", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert len(list((tmp_path / "work").iterdir())) == 2
    assert done.stdout.count("finished") == (2 if status == 0 else 0)
