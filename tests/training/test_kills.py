"""A slice of `benchmarks/kills.py`: SIGKILL at random instants, over all commands that write."""

import json
import subprocess
import sys

import pytest

from tests.helpers.processes import ENVIRONMENT, ROOT


@pytest.mark.slow
def test_nothing_is_lost_by_kills():
    command = [sys.executable, "benchmarks/kills.py", "--kills", "33", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"kills": 33, "seed": 1, "lost": 0}
