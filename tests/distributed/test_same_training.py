"""The number of processes changes speed, not the training: one process, DDP and FSDP2 have the same losses."""

import pytest

from skipless.distributed import devices
from skipless.recipes.laptop import smoke
from tests.helpers import torchrun_worker as worker
from tests.helpers.tiny_runs import MASKED, tiny

STEPS, FEWER = 30, 10
ACCUMULATE = {"train.batch_size": 8, "train.micro_batch": 1}
TASKS = {"causal": {}, "masked": MASKED}
CASES = {
    f"{task}-{block}": [TASKS[task], {"model.block": block}, ACCUMULATE]
    for task in TASKS
    for block in ("pre-ln", "sas", "sas-p")
}
# six sequences for four processes, one at a time: the last process has none; at first there are fewer still
CASES["uneven"] = [{"model.block": "sas", "train.batch_size": 6, "train.micro_batch": 1, "train.batch_ramp": 0.5}]
PLAIN = {"model.block": "sas-p-nonorm", "model.tie_embeddings": False, "train.optimizer": "sgd", "train.lr": 0.3}
CASES["plain"] = [MASKED, PLAIN]
# tokens enough that the loss is made chunk by chunk
CASES["long"] = [{"model.block": "sas-p", "train.batch_size": 40}]
# Muon rounds to bfloat16 inside, so the last bits of a gradient come out larger
CASES["muon"] = [{"model.block": "sas", "train.optimizer": "muon", **ACCUMULATE}]
CASES["average"] = [{"train.ema": 0.9, "train.activation_checkpointing": True, "model.dropout": 0.0}, ACCUMULATE]
LOOSE = {"muon": 1e-3}

WAYS = {
    "ddp-2": (2, {"parallel": {"kind": "ddp"}}),
    "fsdp-2": (2, {"parallel": {"kind": "fsdp"}}),
    "ddp-4": (4, {"parallel": {"kind": "ddp"}}),
    "hybrid-4": (4, {"parallel": {"kind": "fsdp", "replicas": 2, "reshard": False, "shard_accumulated": True}}),
}
FEW = {
    "ddp-2": ["causal-sas-p", "masked-pre-ln", "plain", "long", "muon", "average"],
    "fsdp-2": ["causal-sas-p", "masked-pre-ln", "plain", "long", "muon", "average"],
}
"""Four processes are among the slow tests, with every case."""


@pytest.fixture(scope="module")
def configured(source):
    def make(changes, steps, way=None):
        cfg = tiny(source, *changes, steps=steps)
        return cfg.merge(way or {}).model_dump(mode="json")

    return make


@pytest.fixture(scope="module")
def alone(configured, cache_dir):
    """What one process finds, in this one."""
    known = {}

    def find(name, steps):
        if (name, steps) not in known:
            known[name, steps] = worker.losses(configured(CASES[name], steps), str(cache_dir), steps)
        return known[name, steps]

    return find


def assert_same(found, expected, name, tolerance):
    for key in ("losses", "norms"):
        for step, (one, other) in enumerate(zip(found[key], expected[key], strict=True)):
            allowed = tolerance * (1 if key == "losses" else 100)
            assert one == pytest.approx(other, rel=allowed), f"{name}: {key} of step {step + 1}"
    assert found["valid"] == pytest.approx(expected["valid"], rel=tolerance), name
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-3, abs=1e-4), name
    assert found["losses"][-1] < found["losses"][0] - 0.01 * len(found["losses"]), name  # it learns


@pytest.fixture
def check(run_tasks, configured, cache_dir, alone):
    def look(way, names, steps, tolerance=1e-5, reduce="fp32", **train):
        size, parallel = WAYS[way]
        parallel = {"parallel": parallel["parallel"] | {"reduce": reduce}}
        where = {"cache_dir": str(cache_dir), "steps": steps}
        configs = [configured(CASES[name], steps, parallel | {"train": train}) for name in names]
        tasks = [("losses", {"cfg": cfg, **where}) for cfg in configs]
        compiled = "compile" in train
        *found, guard = run_tasks(size, [*tasks, ("unpickle", {})], may_pickle=compiled)
        for name, one in zip(names, found, strict=True):
            assert set(one["compiled"]) == {compiled}
            assert_same(one, alone(name, steps), name, LOOSE.get(name, tolerance))
        assert compiled or guard == "a pickle was read or written"  # so it would have been seen in any of the tasks

    return look


@pytest.mark.parametrize("way", FEW)
def test_losses_do_not_depend_on_the_number_of_processes(check, way):
    check(way, FEW[way], FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_losses_do_not_depend_on_it_for_any_case(check, way):
    check(way, list(CASES), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_losses_do_not_depend_on_compiling_the_blocks(check, way):
    assert devices.compiler_problem() is None
    check(way, ["causal-sas-p", "masked-pre-ln", "plain"], FEWER, tolerance=1e-4, compile="block")


def test_gradients_may_be_added_up_in_bfloat16(check):
    check("fsdp-2", ["causal-sas-p"], FEWER, tolerance=1e-2, reduce="bf16")


def test_processes_are_no_part_of_what_a_run_is():
    cfg = smoke()
    assert cfg.override({"parallel.kind": "fsdp", "parallel.replicas": 4}).digest == cfg.digest
    assert cfg.override({"parallel": "fsdp"}).parallel.kind == "fsdp"
