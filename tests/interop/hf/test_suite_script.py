"""The script that applies transformers' own tests, without them: what it says, and how it counts."""

import subprocess
import sys
from pathlib import Path

from benchmarks import transformers_suite

SCRIPT = Path(transformers_suite.__file__)


def test_a_folder_without_the_tests_is_refused(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--transformers-tests", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no tests/test_modeling_common.py; --help says how to make such a folder" in done.stderr


def test_what_is_skipped_here_and_not_there_is_shown(capsys):
    outcomes = {
        "Test_Llama::test_a": ("passed", ""),
        "Test_Llama::test_b": ("skipped", "needs a GPU"),
        "Test_sas_causal::test_a": ("skipped", "no such thing here"),
        "Test_sas_causal::test_b": ("skipped", "needs a GPU"),
        "Test_sas_causal::test_c": ("failed", "two is not three"),
        "Test_sas_causal::test_sdpa_padding_matches_padding_free_with_position_ids": ("passed", ""),
        "Test_Llama::test_sdpa_padding_matches_padding_free_with_position_ids": ("passed", ""),
    }
    transformers_suite.show(outcomes)
    shown = capsys.readouterr().out
    assert "sas_causal                               1       1        2" in shown
    assert "failed: Test_sas_causal::test_c: two is not three" in shown
    assert "skipped here and not there, 1 cases: test_a (no such thing here)" in shown
    assert "test_b (needs" not in shown
    flagged = "test_sdpa_padding_matches_padding_free_with_position_ids, passed"
    assert f"run here with _supports_attention_backend set for it alone, 1 cases: {flagged}" in shown
