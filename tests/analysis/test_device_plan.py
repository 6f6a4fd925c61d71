"""What `inspect` plans for many devices is what they do."""

import json
import re
import shlex

import pytest

from skipless import BLOCKS, ModelConfig, cli
from skipless.analysis.costs import training_memory
from skipless.analysis.device_plan import plan
from skipless.config.block import MapConfig
from skipless.config.run import ParallelConfig
from tests.helpers.tiny_runs import tiny

SMALL = {"model.n_layer": 4, "model.d_model": 64, "model.n_head": 4, "train.batch_size": 8}
WAYS = {
    "ddp": {"parallel": {"kind": "ddp"}},
    "fsdp": {"parallel": {"kind": "fsdp"}},
    "fsdp-accumulating": {"parallel": {"kind": "fsdp"}, "train": {"micro_batch": 1}},
    "fsdp-kept": {"parallel": {"kind": "fsdp", "reshard": False}},
    "fsdp-sharded-sums": {"parallel": {"kind": "fsdp", "shard_accumulated": True}, "train": {"micro_batch": 1}},
    "ddp-accumulating": {"parallel": {"kind": "ddp"}, "train": {"micro_batch": 1}},
}

PLANNED, MEASURED = ("ddp-accumulating", "fsdp-sharded-sums"), "fsdp"
"""All ways are among the slow tests."""


def assert_as_planned(found, name):
    sent = {key: value for key, value in found["sent"].items() if "control" not in key}
    assert sum(sent.values()) == pytest.approx(found["planned"]["total"], rel=0.1), (name, found)
    assert sum(found["sent"].values()) - sum(sent.values()) < 1000, (name, found)  # counts, losses, signals


# weights of 65 MB, so that they and not the small change of a step make up the memory
LARGE = {"model.d_model": 512, "model.n_layer": 6, "data.vocab_size": 1000, "model.block": "sas-p"}


@pytest.fixture
def task(source, cache_dir):
    def make(name, way, *changes):
        cfg = tiny(source, SMALL, *changes).merge(way).model_dump(mode="json")
        return (name, {"cfg": cfg, "cache_dir": str(cache_dir)})

    return make


def assert_memory_as_planned(found, name):
    planned = found["planned"]
    assert found["kept"] == pytest.approx(planned["weights"] + planned["optimiser"], rel=0.02), (name, found)
    assert found["peak"] == pytest.approx(planned["total"], rel=0.15), (name, found)


def test_communication_and_memory_are_as_planned(run_tasks, task):
    tasks = [task("communication", WAYS[name], {"model.block": "sas"}) for name in PLANNED]
    *sent, measured = run_tasks(2, [*tasks, task("memory", WAYS[MEASURED], LARGE)])
    for name, found in zip(PLANNED, sent, strict=True):
        assert_as_planned(found, name)
    assert_memory_as_planned(measured, MEASURED)


@pytest.mark.slow
def test_the_plans_of_all_ways(run_tasks, task):
    blocks = ("pre-ln", "sas-p", "sas-p-nonorm")
    tasks = [task("communication", way, {"model.block": block}) for way in WAYS.values() for block in blocks]
    found = run_tasks(2, tasks + [task("memory", way, LARGE) for way in WAYS.values()])
    for name, one in zip([name for name in WAYS for _ in blocks], found, strict=False):
        assert_as_planned(one, name)
    for name, one in zip(WAYS, found[len(tasks) :], strict=True):
        assert_memory_as_planned(one, name)


@pytest.mark.slow
def test_communication_of_a_hybrid_is_as_planned(run_tasks, task):
    way = {"parallel": {"kind": "fsdp", "replicas": 2}}
    (found,) = run_tasks(4, [task("communication", way, {"model.block": "sas"})])
    assert found["planned"]["gradients of copies"] > 0
    assert_as_planned(found, "hybrid")


def test_a_plan_for_one_device_is_its_training_memory():
    cfg = ModelConfig(block="sas", n_layer=3, d_model=32, n_head=2)
    one = plan(cfg, ParallelConfig(), 1, batch_size=6, micro_batch=2)
    assert (one.memory, one.communication) == (training_memory(cfg, 2), {"total": 0})


def test_plans_add_up_and_shrink_with_devices():
    cfg = ModelConfig(block="sas", n_layer=4, d_model=64, n_head=4, vocab_size=256, max_seq_len=32)
    totals = []
    for devices in (2, 4, 8):
        ddp, fsdp = (plan(cfg, ParallelConfig(kind=kind), devices, batch_size=64) for kind in ("ddp", "fsdp"))
        for one in (ddp, fsdp):
            for parts in (one.memory, one.communication):
                assert parts["total"] == sum(size for part, size in parts.items() if part != "total")
            assert set(one.arithmetic) >= (set(one.memory) | set(one.communication)) - {"total", "logits"}
        totals.append(fsdp.memory["total"])
        assert fsdp.memory["total"] < ddp.memory["total"]
        # one gathering more than the two halves of an all-reduce, but for embedding and head
        assert 1 < fsdp.communication["total"] / ddp.communication["total"] < 1.55
    assert totals == sorted(totals, reverse=True)


def test_a_smaller_last_micro_batch_is_a_pass_of_its_own():
    """Of 10 sequences on 2 devices each has 5, two at a time: weights are gathered for three passes."""
    cfg = ModelConfig(block="sas-p", n_layer=2, d_model=16, n_head=2, vocab_size=64)
    sent = {
        own: plan(cfg, ParallelConfig(kind="fsdp"), 2, batch_size=2 * own, micro_batch=2).communication[
            "weights gathered"
        ]
        for own in (2, 4, 5, 6)
    }
    assert sent[5] == sent[6] == 3 * sent[2]
    assert sent[4] == 2 * sent[2]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_arithmetic_that_is_shown_gives_the_bytes(kind):
    block = BLOCKS["sas"].replace(
        value=MapConfig(kind="reparam", init="orthogonal"), first_value=None
    )  # W_init is fixed
    cfg = ModelConfig(block=block, n_layer=2, d_model=32, n_head=4, vocab_size=256, max_seq_len=16)
    found = plan(cfg, ParallelConfig(kind=kind), 2, batch_size=4)
    assert "fixed" in found.arithmetic["weights"]
    for part in ("weights", "gradients", "optimiser"):
        text = found.arithmetic[part].replace(",", "")
        factor = 2 if text.startswith("2 × ") else 1
        assert factor * sum(int(a) * int(b) for a, b in re.findall(r"(\d+) B × (\d+)", text)) == found.memory[part]


def test_inspect_says_what_fits(capsys):
    options = "-L 4 -d 64 -H 4 --set vocab_size=300 --set max_seq_len=16 --no-signal --batch-size 4 --devices 4"
    command = ["inspect", "sas-p", *shlex.split(options)]
    assert cli.run([*command, "--json"]) == 0
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    ddp, fsdp = (one["memory"]["total"] for one in block["plans"])
    between = f"{(ddp + fsdp) / 2e3:.0f}k"
    assert cli.run([*command, "--device-memory", between, "--json"]) == 0
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    assert [one["fits"] for one in block["plans"]] == [False, True]
    assert cli.run([*command, "--device-memory", between]) == 0
    shown = capsys.readouterr().out
    assert "sas-p, ddp: does not fit" in shown
    assert "sas-p, fsdp: fits" in shown
    assert "2 × 3/4 × 4 B" in shown


@pytest.mark.parametrize("wrong", [["--devices", "2", "--device-memory", "much"], ["--device-memory", "24G"]])
def test_inspect_refuses_half_a_plan(capsys, wrong):
    assert cli.run(["inspect", "sas-p", "--no-signal", *wrong]) == 2
    assert "--device-memory" in capsys.readouterr().err
