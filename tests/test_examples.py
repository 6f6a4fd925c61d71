"""The examples run."""

import json
import shlex
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


SMALL = shlex.split(
    "--set model.n_layer=1 --set model.d_model=16 --set model.n_head=2 --set data.seq_len=16 --set data.vocab_size=300 "
    "--set data.max_bytes=200000 --set train.steps=3 --set train.eval_rows=4 --set train.tuning_rows=4 "
    "--set train.sample_every=0"
)


@pytest.mark.slow
def test_slurm_workers_share_a_sweep_and_an_experiment(tmp_path):
    """Two workers, as processes of this machine, do each point once."""
    pytest.importorskip("submitit")
    pytest.importorskip("optuna")
    script = [sys.executable, str(ROOT / "examples" / "slurm_workers.py"), "--cluster", "local", "--workers", "2"]
    runs = ["--runs", str(tmp_path / "runs"), "--cache-dir", str(tmp_path / "cache"), *SMALL]
    sweep = ["sweep", "--over", "train.lr=1e-3,2e-3,4e-3", "--block", "pre-ln", "--output", str(tmp_path / "lr")]
    experiment = ["reproduce", "matrix", "--output", str(tmp_path / "out")]
    for words, expected in ((sweep, 3), (experiment, 3 + 4)):
        command = [sys.executable, "-m", "skipless", *words, *runs]
        done = subprocess.run(
            [*script, "--logs", str(tmp_path / "logs"), "--", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        found = [path.read_text().splitlines() for path in (tmp_path / "runs").glob("*/metrics.jsonl")]
        assert len(found) == expected
        for lines in found:
            steps = [json.loads(line)["step"] for line in lines]
            assert steps == sorted(steps)
            assert steps[-1] == 3
    assert set(json.loads((tmp_path / "lr" / "best.json").read_text())["study"]) == {"pre-ln"}
