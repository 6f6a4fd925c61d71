"""A run that was saved by some processes goes on with any other number of them, and says where it went wrong."""

import shutil

import pytest
import torch

import skipless
from skipless.config.run import RunConfig
from skipless.runs import Run
from skipless.training.train import train
from tests.helpers.tiny_runs import Stop, newest, records, stop_at, tiny

STEPS, HALF = 10, 5
OFTEN = {
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.micro_batch": 2,
    "train.eval_every": 5,
    "train.save_every": 5,
    "train.log_every": 1,
    "train.sample_every": 5,
    "train.health_every": 5,
}
BLOCKS = ("sas", "pre-ln")
DDP, FSDP = {"kind": "ddp"}, {"kind": "fsdp"}
SHARDED = {"kind": "fsdp", "checkpoint": "sharded"}
SHARDED_TOO = {"parallel.checkpoint": "sharded"}
HYBRID = {"kind": "fsdp", "checkpoint": "sharded", "replicas": 2}


@pytest.fixture(scope="module")
def configured(source):
    def make(parallel, block="sas", **changes) -> RunConfig:
        return tiny(source, OFTEN, {"model.block": block}).merge({"parallel": parallel}).merge(changes)

    return make


@pytest.fixture(scope="module")
def reference(tmp_path_factory, configured, cache_dir):
    """A run of one process from the beginning to the end, and one that stopped in the middle."""
    folder = tmp_path_factory.mktemp("reference")
    train(configured(DDP), folder / "whole", trackers=[], cache_dir=cache_dir)
    with pytest.raises(Stop):
        train(configured(DDP), folder / "half", trackers=[], observer=stop_at(HALF + 1), cache_dir=cache_dir)
    return folder


def losses(folder):
    """What was measured, by step, in order."""
    return [
        (r["step"], key, r[key]) for r in records(folder) for key in ("loss", "valid_loss", "grad_norm") if key in r
    ]


def assert_as_reference(folder, reference):
    found, expected = losses(folder), losses(reference / "whole")
    assert [one[:2] for one in found] == [one[:2] for one in expected], folder
    for one, other in zip(found, expected, strict=True):
        assert one[2] == pytest.approx(other[2], rel=1e-5 if "loss" in one[1] else 1e-3), (folder, one)
    for key in ("gains", "health"):
        assert [r["step"] for r in records(folder) if key in r] == [
            r["step"] for r in records(reference / "whole") if key in r
        ]
    assert [s["text"] for s in Run(folder).samples()] == [s["text"] for s in Run(reference / "whole").samples()]
    for (name, one), other in zip(
        skipless.load(folder).state_dict().items(),
        skipless.load(reference / "whole").state_dict().values(),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


def copied(folder, name):
    shutil.copytree(folder, folder.with_name(name))
    return folder.with_name(name)


def task(configured, cache_dir, parallel, folder, **more):
    cfg = configured(parallel).model_dump(mode="json")
    return ("train", {"cfg": cfg, "cache_dir": str(cache_dir), "folder": str(folder), **more})


STOP = {"stop_rank": 1, "stop_step": HALF}  # one of them gets SIGTERM, and all save together
SAVED = {"ddp": DDP, "fsdp": FSDP, "sharded": SHARDED}


@pytest.fixture
def by_two(tmp_path, run_tasks, configured, cache_dir):
    """Runs that two processes saved half way."""
    tasks = [task(configured, cache_dir, parallel, tmp_path / name, **STOP) for name, parallel in SAVED.items()]
    for message in run_tasks(2, tasks):
        assert message == f"Interrupted: SIGTERM: saved at step {HALF}; continue with --resume"
    assert len(list(newest(tmp_path / "sharded").glob("model-*.safetensors"))) == 2
    assert [path.name for path in newest(tmp_path / "fsdp").glob("model*")] == ["model.safetensors"]
    return [tmp_path / name for name in SAVED]


def assert_one_goes_on(folder, configured, reference, cache_dir):
    assert losses(folder)[-1][0] == HALF
    train(configured(DDP), folder, resume=True, trackers=[], cache_dir=cache_dir)
    assert_as_reference(folder, reference)


def test_saved_under_two_resumed_under_one_and_the_reverse(by_two, run_tasks, configured, reference, cache_dir):
    from_one = copied(reference / "half", "from-one-by-two")
    run_tasks(2, [task(configured, cache_dir, SHARDED, from_one, resume=True)])
    assert_as_reference(from_one, reference)
    for folder in by_two:
        assert_one_goes_on(folder, configured, reference, cache_dir)


@pytest.mark.slow
def test_saved_under_two_resumed_under_four_and_the_reverse(
    tmp_path, by_two, run_tasks, configured, reference, cache_dir
):
    ways = (SHARDED, DDP, HYBRID)
    tasks = [task(configured, cache_dir, way, one, resume=True) for one, way in zip(by_two, ways, strict=True)]
    four = tmp_path / "four"
    tasks.append(task(configured, cache_dir, HYBRID, four, **STOP))
    run_tasks(4, tasks)
    for folder in by_two:
        assert_as_reference(folder, reference)
    by_two_again = copied(four, "four-by-two")
    run_tasks(2, [task(configured, cache_dir, FSDP, by_two_again, resume=True)])
    assert_as_reference(by_two_again, reference)
    assert_one_goes_on(four, configured, reference, cache_dir)


def test_what_differs_or_breaks_between_processes_is_said(tmp_path, run_tasks, configured, cache_dir, source):
    other_text = tmp_path / "text"
    shutil.copytree(source.removeprefix("files:").removesuffix("/*.py"), other_text)
    (other_text / "more.py").write_text("def more(x):\n    return x\n" * 50)
    where = {"cache_dir": str(cache_dir), "folder": str(tmp_path / "run")}
    cfg = configured(DDP).model_dump(mode="json")
    poisoned = [
        ("poison", {"cfg": configured(kind).model_dump(mode="json"), "cache_dir": str(cache_dir), "parameter": name})
        for kind in (DDP, FSDP)
        for name in ("blocks.1.mlp.up.weight", "embedding.weight")
    ]
    found = run_tasks(
        2,
        [
            ("train", {"cfg": cfg, **where, "other": {"train.lr": 0.25}}),
            ("train", {"cfg": cfg, **where, "other_text": str(other_text)}),
            ("train", {"cfg": cfg, **where, "other_tracker": "nowhere"}),
            ("train", {"cfg": configured(FSDP).model_dump(mode="json"), **where, "other": SHARDED_TOO}),
            ("train", {"cfg": configured({"kind": "ddp", "reduce": "bf16"}).model_dump(mode="json"), **where}),
            *poisoned,
            ("mistaken_share", {"cfg": configured(FSDP).model_dump(mode="json"), "cache_dir": str(cache_dir)}),
            ("sample_first", {"cfg": configured(FSDP).model_dump(mode="json"), "cache_dir": str(cache_dir)}),
        ],
    )
    assert found[0] == (
        "UserError: rank 1 has another configuration than rank 0: train.lr is 0.25 and not 0.003; "
        "every process needs the same"
    )
    assert "rank 1 has another corpus than rank 0" in found[1]
    assert "rank 1: unknown tracker 'nowhere'" in found[2]
    assert "parallel.checkpoint is sharded and not whole" in found[3]
    assert "parallel.reduce bf16 with ddp needs a GPU" in found[4]
    assert not (tmp_path / "run").exists()
    assert found.pop() > 0
    assert found.pop() is True
    for message in found[5:]:
        assert message.startswith("NonFinite: step 1: the loss is nan, first in "), message
    assert [message.split("first in ")[1].split(";")[0] for message in found[5:]] == ["layer 2", "the embedding"] * 2
