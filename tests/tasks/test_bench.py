"""The benchmarks measure what they say; how fast things are is not tested here."""

import json

import pytest
import torch

from skipless.cli import run
from skipless.tasks import bench
from skipless.tasks.bench import EXPLICIT, HF, Shape, compare, own_stack, slope

TINY = ["--d-model", "16", "--n-head", "2", "--rounds", "2", "--batch-size", "2", "--seq-len", "8", "--n-layer", "1"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("what", ["train", pytest.param("step", marks=pytest.mark.slow), "decode", "caches"])
def test_bench_prints_a_table_and_a_json_line_and_draws(what, tmp_path, capsys):
    plot = tmp_path / "bars.png"
    assert run(["bench", what, *TINY, "--vocab-size", "50", "--max-new-tokens", "4", "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 1000
    found = last_line(capsys)
    assert found["benchmark"] == what
    names = {row["name"] for row in found["rows"]}
    assert any(name.startswith("sas-p") for name in names)
    assert any(name.startswith("pre-ln") for name in names)
    for row in found["rows"]:
        assert row["milliseconds"] > 0
        if row["name"] in row["speedup"]:
            assert row["speedup"][row["name"]][0] == pytest.approx(1)
    if what == "step":
        assert all(row["peak_bytes"] > 0 for row in found["rows"])


def test_hugging_face_is_among_the_cases(capsys):
    assert run(["bench", "train", *TINY, "--json"]) == 0
    assert HF in {row["name"] for row in last_line(capsys)["rows"]}


def test_explicit_form_is_really_explicit(monkeypatch):
    calls = []
    shape = Shape(8, 16, 1, 16, 2)
    monkeypatch.setattr("skipless.nn.mixing.attention_matrix", lambda q, k, m: calls.append(1) or q @ k.mT)
    own_stack(shape, "sas-p", torch.device("cpu"))()
    assert not calls
    own_stack(shape, "sas-p" + EXPLICIT, torch.device("cpu"))()
    assert calls


def test_ratios_are_of_medians_with_the_spread_of_rounds():
    times = {"slow": [2.0, 4.0, 6.0], "fast": [1.0, 2.0, 6.0]}
    rows = {row.name: row for row in compare(times, ("slow",), {}, 1.0)}
    ratio, low, high = rows["fast"].speedup["slow"]
    assert ratio == 2.0
    assert low < high == 2.0
    assert rows["slow"].speedup["slow"] == (1.0, 1.0, 1.0)


def test_memory_over_lengths_and_depths_is_measured_and_drawn(tmp_path, capsys, fork_server, monkeypatch):
    """Each in a process of its own, forked. That begins with what its parent has freed: one layer may cost nothing."""

    def in_child(**case):
        child = fork_server.start([json.dumps(case)], "tests.helpers.fork_server:measure_memory")
        assert child.wait() == 0, child.err
        return int(child.out)

    monkeypatch.setattr(bench, "in_child", in_child)
    plot = tmp_path / "growth.png"
    size = ["-d", "64", "-H", "2", "--seq-len", "256", "-L", "8"]
    assert run(["bench", "memory", *size, "--rounds", "1", "--plot", str(plot)]) == 0
    found = last_line(capsys)
    assert found["length"]["x"] == [128, 256]
    assert found["depth"]["x"] == [1, 2, 4, 8]
    assert found["depth"]["peak_bytes"][-1] > 1.5 * found["depth"]["peak_bytes"][0]
    assert plot.stat().st_size > 1000


@pytest.mark.slow
def test_memory_of_a_layer_grows_linearly(capsys):
    assert run(["bench", "memory", "-d", "256", "-H", "4", "--seq-len", "4096", "--rounds", "1"]) == 0
    found = last_line(capsys)
    assert found["length"]["x"] == [128, 256, 512, 1024, 2048, 4096]
    assert found["memory_slope_from_1024"] < 1.1


def test_slope():
    assert slope([1, 10], [1, 100]) == pytest.approx(2)
    assert slope([1], [1]) is None


def test_unknown_benchmark(capsys):
    assert run(["bench", "speed"]) == 2
    assert "known: train, step, decode, caches, memory" in capsys.readouterr().err
