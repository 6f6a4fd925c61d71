"""What a training does when nothing goes wrong."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skipless
from skipless import BLOCKS, CausalLM, ModelConfig, TrainConfig, UserError, cli
from skipless.analysis.evaluation import Evaluation, evaluate, spread
from skipless.config.block import parse_block
from skipless.data import prepare
from skipless.distributed import devices
from skipless.experiments.report.summary import summarise
from skipless.nn.layers import ReparamLinear
from skipless.nn.positions import LearnedPositions
from skipless.runs import Run, choose_checkpoint
from skipless.storage.checkpoints import Checkpoints
from skipless.training.optimizers import make_optimizers, set_lr
from skipless.training.schedule import batch_rows, learning_rate
from skipless.training.train import train
from skipless.training.trainer import Trainer, fit_vocabulary
from tests.helpers.tiny_runs import MASKED, Recorder, Stop, newest, records, steps_kept, stop_at, tiny, write_config

TASKS = {"causal": {}, "masked": MASKED}


@pytest.fixture(scope="module")
def make_trainer(source, cache_dir):
    """A trainer without a run: only a model, its optimisers and its data."""

    def make(*changes, **train):
        cfg = tiny(source, *changes, **train)
        corpus = prepare(cfg.data, cache_dir=cache_dir)
        return Trainer(fit_vocabulary(cfg, corpus), corpus)

    return make


def losses(trainer: Trainer, count: int) -> list[float]:
    found = []
    for _ in range(count):
        before = trainer.state.loss_sum
        trainer.step()
        found.append(trainer.state.loss_sum - before)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_loss_goes_down(make_trainer, block, task):
    trainer = make_trainer(TASKS[task], {"model.block": block}, steps=30, lr=5e-3, batch_size=8)
    first, last = trainer.evaluate().loss, losses(trainer, 30)
    assert first == pytest.approx(math.log(trainer.cfg.model.vocab_size), abs=0.3)
    assert sum(last[-5:]) / 5 < first - 0.5
    assert trainer.evaluate().loss < first - 0.5


# --------------------------------------------------------------------------------------- schedules

SHARES = st.floats(0.01, 0.9)
PROGRESS = st.floats(0, 1)
TO_ZERO = ["linear", "cosine", "triangle"]


@given(st.sampled_from([*TO_ZERO, "constant"]), SHARES, st.floats(1e-6, 1))
def test_schedules_rise_to_the_peak_and_end(schedule, warmup, lr):
    cfg = TrainConfig(schedule=schedule, warmup=warmup, lr=lr)
    assert learning_rate(cfg, 0) == 0
    assert learning_rate(cfg, warmup) == pytest.approx(lr)
    assert learning_rate(cfg, 1) == pytest.approx(0 if schedule in TO_ZERO else lr)
    assert learning_rate(cfg, warmup / 2) == pytest.approx(lr / 2)


@given(st.sampled_from([*TO_ZERO, "constant"]), SHARES, PROGRESS, PROGRESS)
def test_schedules_rise_before_the_peak_and_never_after(schedule, warmup, one, other):
    cfg = TrainConfig(schedule=schedule, warmup=warmup, lr=1.0)
    early, late = sorted([one, other])
    at_early, at_late = learning_rate(cfg, early), learning_rate(cfg, late)
    assert 0 <= at_early <= 1 + 1e-12
    if late <= warmup:
        assert at_early <= at_late + 1e-12
    if early >= warmup:
        assert at_early >= at_late - 1e-12


def test_schedules_have_their_shapes():
    half = {name: learning_rate(TrainConfig(schedule=name, warmup=0.5, lr=1), 0.625) for name in [*TO_ZERO, "constant"]}
    assert half["linear"] == half["triangle"] == pytest.approx(0.75)
    assert half["cosine"] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert half["constant"] == 1
    assert learning_rate(TrainConfig(warmup=0, lr=1), 0) == 1
    assert TrainConfig(schedule="triangle").warmup_share == 0.75
    assert TrainConfig().warmup_share == 0.05
    assert TrainConfig(steps=200, warmup=50).warmup_share == 0.25


@given(st.sampled_from(["linear", "triangle"]), st.floats(0, 1), SHARES)
def test_the_warm_up_begins_where_it_is_asked_to(schedule, start, warmup):
    cfg = TrainConfig(schedule=schedule, warmup=warmup, warmup_from=start, lr=2.0)
    assert learning_rate(cfg, 0) == pytest.approx(2 * start)
    assert learning_rate(cfg, warmup / 2) == pytest.approx(2 * (start + 1) / 2)
    assert learning_rate(cfg, warmup) == pytest.approx(2)


def test_the_learning_rate_of_a_training_starts_above_zero_and_ends_near_it(tmp_path, source, cache_dir):
    train(tiny(source, log_every=1, warmup=4, lr=1e-2), tmp_path, trackers=[], cache_dir=cache_dir)
    rates = [record["lr"] for record in records(tmp_path) if "lr" in record]
    assert len(rates) == 12
    assert 0 < min(rates) < 2e-3
    assert rates.index(max(rates)) in (3, 4)
    assert rates[-1] < rates[-2]


@given(st.integers(1, 8), st.integers(1, 16), st.floats(0.01, 1), PROGRESS, PROGRESS)
def test_the_batch_ramp_grows_by_whole_micro_batches(micro, count, ramp, one, other):
    cfg = TrainConfig(batch_size=micro * count, micro_batch=micro, batch_ramp=ramp)
    early, late = (batch_rows(cfg, progress) for progress in sorted([one, other]))
    assert micro <= early <= late <= cfg.batch_size
    assert early % micro == late % micro == 0
    assert batch_rows(cfg, 0) == micro
    assert batch_rows(cfg, ramp) == batch_rows(cfg, 1) == cfg.batch_size


def test_the_batch_ramp_is_linear_over_its_share_of_the_budget():
    cfg = TrainConfig(batch_size=16, micro_batch=2, batch_ramp=0.5)
    assert [batch_rows(cfg, progress) for progress in (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)] == [2, 4, 8, 12, 16, 16]


def test_without_a_ramp_the_batch_is_whole():
    assert batch_rows(TrainConfig(batch_size=8, micro_batch=2), 0) == 8


# ----------------------------------------------------------------------------------- groups, updates


def make_model(block: str) -> CausalLM:
    shape = {"n_layer": 2, "d_model": 8, "n_head": 2, "vocab_size": 16, "max_seq_len": 8}
    return CausalLM(ModelConfig(block=parse_block(block), positions="learned", tie_embeddings=False, **shape))


REPARAM = "{kind: reparam; init: identity; beta: {init: 0.2; trainable: true}}"
SPECS = [
    *BLOCKS,
    "pre-ln:bias=true,norm=layernorm",
    "sas:qk_norm=true",
    f"sas:first_value=null,value={REPARAM},projection={REPARAM}",
]


def matrices(model: nn.Module) -> set[str]:
    """The names of weight matrices and embeddings, by the modules that they are in."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | LearnedPositions):
            found.add(f"{path}.weight")
        if isinstance(module, ReparamLinear) and module.delta is not None:
            found.add(f"{path}.delta")
    return found


def grouped(model: nn.Module, cfg: TrainConfig) -> dict[str, dict]:
    """The options of each parameter's group, each in exactly one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    optimizers = make_optimizers(model, cfg)
    set_lr(optimizers, cfg.lr)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert names[id(parameter)] not in found
                found[names[id(parameter)]] = {**group, "kind": type(optimizer).__name__}
    assert set(found) == set(names.values())
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("spec", SPECS)
def test_exactly_matrices_decay(spec, optimizer):
    model = make_model(spec)
    found = grouped(model, TrainConfig(optimizer=optimizer, weight_decay=0.3))
    assert {name for name, group in found.items() if group["weight_decay"] == 0.3} == matrices(model)
    assert {group["weight_decay"] for group in found.values()} == {0.0, 0.3}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_learning_rate_of_values_and_projections(spec, optimizer):
    model = make_model(spec)
    found = grouped(model, TrainConfig(optimizer=optimizer, lr=0.5, vp_lr_factor=0.25))
    reached = {name for name, group in found.items() if group["lr"] == 0.125}
    assert reached == {name for name in found if ".value." in name or ".projection." in name}
    assert {group["lr"] for name, group in found.items() if name not in reached} == {0.5}
    assert reached


def test_muon_takes_the_matrices_inside_the_blocks():
    model = make_model("sas")
    found = grouped(model, TrainConfig(optimizer="muon"))
    inside = {name for name in matrices(model) if name.startswith("blocks.")}
    assert {name for name, group in found.items() if group["kind"] == "Muon"} == inside
    assert {group["kind"] for group in found.values()} == {"Muon", "AdamW"}


@pytest.mark.parametrize("task", TASKS)
def test_accumulated_gradients_make_the_same_update(make_trainer, task):
    found = []
    for micro in (None, 1, 2, 4):
        trainer = make_trainer(TASKS[task], optimizer="sgd", lr=0.5, batch_size=8, micro_batch=micro, warmup=0)
        measured = [trainer.step() for _ in range(2)]
        assert trainer.state.sequences == 16
        found.append((trainer.state.loss_sum, measured, trainer.model.state_dict()))
    whole = found[0]
    for loss, measured, weights in found[1:]:
        assert loss == pytest.approx(whole[0], abs=1e-5)
        assert measured[1]["grad_norm"] == pytest.approx(whole[1][1]["grad_norm"], abs=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, whole[2][name], rtol=0, atol=1e-5)


def test_the_gradient_is_clipped(make_trainer):
    """With plain descent the step is as long as the clipped gradient."""
    lengths = {}
    for clip in (None, 1e-2):
        trainer = make_trainer(optimizer="sgd", lr=1.0, weight_decay=0.0, clip=clip, schedule="constant", warmup=0)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        norm = trainer.step()["grad_norm"]
        moved = [p.detach() - q for p, q in zip(trainer.model.parameters(), before, strict=True)]
        lengths[clip] = norm, torch.linalg.vector_norm(torch.cat([part.flatten() for part in moved])).item()
    assert lengths[None][1] == pytest.approx(lengths[None][0], rel=1e-3)
    assert lengths[1e-2] == (lengths[None][0], pytest.approx(1e-2, rel=1e-3))


def test_the_same_seed_is_the_same_training(make_trainer):
    first, again, other = (losses(make_trainer({"model.dropout": 0.1}, seed=seed), 4) for seed in (1, 1, 2))
    assert first == again
    assert first != other


# ----------------------------------------------------------------------------------------- budgets


def test_a_budget_in_tokens(tmp_path, source, cache_dir):
    train(tiny(source, steps=None, tokens=1000), tmp_path, trackers=[], cache_dir=cache_dir)
    last = records(tmp_path)[-1]
    assert (last["step"], last["tokens"]) == (16, 16 * 4 * 16)
    assert steps_kept(tmp_path)[-1] == 16


def test_a_budget_in_tokens_with_windows_counts_their_targets(tmp_path, source, cache_dir):
    cfg = tiny(source, {"data.packing": "chunks"}, steps=None, tokens=1000)
    train(cfg, tmp_path, trackers=[], cache_dir=cache_dir)
    last = records(tmp_path)[-1]
    assert (last["step"], last["tokens"]) == (17, 17 * 4 * 15)


def test_a_budget_that_fits_exactly_is_not_overrun(make_trainer):
    trainer = make_trainer(steps=None, tokens=2 * 4 * 16)
    for _ in range(2):
        assert not trainer.done()
        trainer.step()
    assert trainer.state.tokens == 2 * 4 * 16
    assert trainer.done()


@pytest.mark.parametrize("task", TASKS)
def test_a_step_takes_the_next_sequences(make_trainer, monkeypatch, task):
    trainer, seen = make_trainer(TASKS[task], batch_size=4, micro_batch=2), []
    sequences = trainer._sequences
    monkeypatch.setattr(
        trainer, "_sequences", lambda first, count: seen.append((first, count)) or sequences(first, count)
    )
    for _ in range(3):
        trainer.step()
    assert seen == [(first, 2) for first in range(0, 12, 2)]


def test_a_budget_in_minutes(tmp_path, source, cache_dir):
    seen = Recorder()
    cfg = tiny(source, steps=None, minutes=0.01, eval_every=0, log_every=1, save_every=1000)
    train(cfg, tmp_path, trackers=[], cache_dir=cache_dir, observer=seen)
    *before, last = [record for record in seen.records if "loss" in record]
    assert before[-1]["seconds"] <= 0.6 <= last["seconds"] < 5  # rounded to milliseconds
    assert last["lr"] < before[len(before) // 2]["lr"]
    assert steps_kept(tmp_path) == [last["step"]]


@pytest.mark.parametrize(
    "budget",
    [
        {"steps": 4},
        {"steps": None, "tokens": 200},
        {"steps": None, "minutes": 1e-3},
    ],
    ids=["steps", "tokens", "minutes"],
)
def test_a_report_knows_that_a_run_is_finished(tmp_path, source, cache_dir, budget):
    with pytest.raises(Stop):
        train(tiny(source, **budget), tmp_path / "one", trackers=[], cache_dir=cache_dir, observer=stop_at(0))
    assert not summarise(Run(tmp_path / "one")).finished
    train(tiny(source, **budget), tmp_path / "two", trackers=[], cache_dir=cache_dir)
    assert summarise(Run(tmp_path / "two")).finished


# ------------------------------------------------------------------------------ what is written down


@pytest.fixture(scope="module")
def trained(tmp_path_factory, source, cache_dir):
    """The folder of a finished run with everything on."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    cfg = tiny(source, steps=30, lr=1e-2, eval_every=10, save_every=10, health_every=6, sample_every=15)
    train(cfg, folder, trackers=["tensorboard"], cache_dir=cache_dir)
    return folder


@pytest.fixture(scope="module")
def trained_masked(tmp_path_factory, source, cache_dir):
    folder = tmp_path_factory.mktemp("masked") / "run"
    train(tiny(source, MASKED), folder, trackers=[], cache_dir=cache_dir)
    return folder


def test_a_run_has_the_files_that_it_is_to_have(trained):
    names = {path.name for path in trained.iterdir() if not path.name.startswith(".")}
    journals = {"metrics.jsonl", "samples.jsonl"}
    assert names == {"config.json", "tokenizer.json", "checkpoints", "tensorboard"} | journals
    info = json.loads((trained / "config.json").read_text())
    assert {"config", "command", "versions", "machine", "data"} <= info.keys()
    assert info["versions"]["torch"] == torch.__version__
    assert [sample["step"] for sample in Run(trained).samples()] == [15, 30]
    assert all(sample["text"].startswith("def ") for sample in Run(trained).samples())
    assert list((trained / "tensorboard").iterdir())


def test_lines_of_metrics(trained):
    lines = records(trained)
    assert [line["step"] for line in lines if "loss" in line] == list(range(3, 31, 3))
    assert [line["step"] for line in lines if "valid_loss" in line] == [0, 10, 20, 30]
    assert all({"step", "tokens", "seconds"} <= line.keys() for line in lines)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    valid = [line for line in lines if "valid_loss" in line]
    for line in valid:
        assert line["valid_perplexity"] == pytest.approx(math.exp(line["valid_loss"]))
        assert 0 < line["valid_bits_per_byte"] < 8
    assert valid[-1]["valid_loss"] < valid[0]["valid_loss"] - 1


def test_a_line_has_the_mean_loss_since_the_line_before(tmp_path, source, cache_dir):
    found = {}
    for every in (1, 3):
        cfg = tiny(source, steps=8, log_every=every, eval_every=0)
        train(cfg, tmp_path / str(every), trackers=[], cache_dir=cache_dir)
        found[every] = {line["step"]: line["loss"] for line in records(tmp_path / str(every)) if "loss" in line}
    each = list(found[1].values())
    means = {3: sum(each[:3]) / 3, 6: sum(each[3:6]) / 3, 8: sum(each[6:]) / 2}
    assert found[3] == pytest.approx(means, rel=1e-6)


def test_gains_of_every_layer_are_recorded(trained):
    lines = [line for line in records(trained) if "gains" in line]
    assert [line["step"] for line in lines] == [6, 12, 18, 24, 30]
    model = skipless.load(trained)
    gains = {name: p for name, p in model.named_parameters() if name not in matrices(model) and "norm" not in name}
    assert {name.split(".")[1] for name in gains} == {"0", "1"}
    assert lines[-1]["gains"].keys() == gains.keys()
    for name, parameter in gains.items():
        assert torch.tensor(lines[-1]["gains"][name]).flatten().equal(parameter.detach().flatten()), name
    assert lines[0]["gains"] != lines[-1]["gains"]


def test_health_is_recorded_and_sane(trained):
    lines = [line for line in records(trained) if "health" in line]
    assert [line["step"] for line in lines] == [6, 12, 18, 24, 30]
    bounds = {
        "rms": (0, 10),
        "kurtosis": (1, 32),
        "neuron_kurtosis": (1, 32),
        "max_median_ratio": (1, 1000),
        "attention_entropy": (0, math.log(16)),
        "token_similarity": (-1, 1),
    }
    for line in lines:
        assert line["health"].keys() == bounds.keys()
        for name, (low, high) in bounds.items():
            assert len(line["health"][name]) == 2
            assert all(low <= value <= high for value in line["health"][name]), name


def test_measuring_changes_nothing(trained, tmp_path, source, cache_dir):
    quiet = {"health_every": 0, "sample_every": 0, "gains_every": 0, "eval_every": 0}
    cfg = tiny(source, **{"steps": 30, "lr": 1e-2, "save_every": 30, **quiet})
    train(cfg, tmp_path, trackers=[], cache_dir=cache_dir)
    for name in ("model.safetensors", "optimizer0.safetensors"):
        assert (newest(tmp_path) / name).read_bytes() == (newest(trained) / name).read_bytes()
    assert not [line for line in records(tmp_path) if "gains" in line or "health" in line]


def test_gains_are_recorded_when_they_are_due(tmp_path, source, cache_dir):
    train(tiny(source, gains_every=4, log_every=3), tmp_path, trackers=[], cache_dir=cache_dir)
    assert [line["step"] for line in records(tmp_path) if "gains" in line] == [4, 8, 12]


def with_losses(by_step: dict[int, float]) -> Recorder:
    """An observer that gives a trainer these held-out losses."""

    def begin(trainer):
        trainer.evaluate = lambda between: Evaluation(by_step[trainer.state.step], 1.0, None, 1, 1)

    return Recorder(on_begin=begin)


@pytest.mark.parametrize(("best", "kept"), [(4, [4, 16, 20]), (8, [8, 16, 20]), (16, [16, 20]), (20, [16, 20])])
def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, source, cache_dir, best, kept):
    by_step = {step: 2.0 - (step == best) for step in range(0, 21, 4)}
    train(tiny(source, steps=20), tmp_path, trackers=[], cache_dir=cache_dir, observer=with_losses(by_step))
    assert steps_kept(tmp_path) == kept
    best_model, last_model = skipless.load(tmp_path, checkpoint="best"), skipless.load(tmp_path)
    stored = Checkpoints.load(tmp_path / "checkpoints" / f"step-{best:08d}").tensors("model")
    assert torch.equal(best_model.embedding.weight, stored["embedding.weight"])
    assert torch.equal(best_model.embedding.weight, last_model.embedding.weight) == (best == 20)


def test_a_checkpoint_has_the_score_of_its_own_step_or_none(tmp_path, source, cache_dir):
    """Saved more often than evaluated: a loss of an earlier step would make other weights the best."""
    by_step = {0: 9.0, 8: 1.0, 16: 2.0}
    cfg = tiny(source, steps=16, eval_every=8, save_every=4, keep_last=9)
    train(cfg, tmp_path, trackers=[], cache_dir=cache_dir, observer=with_losses(by_step))
    scores = {one.step: one.score for one in map(Checkpoints.load, Run(tmp_path).checkpoints().all())}
    assert scores == {4: None, 8: 1.0, 12: None, 16: 2.0}
    assert choose_checkpoint(Run(tmp_path), "best").step == 8


@pytest.mark.parametrize("keep_last", [1, 3])
def test_as_many_checkpoints_are_kept_as_asked(tmp_path, source, cache_dir, keep_last):
    cfg = tiny(source, steps=20, keep_last=keep_last, eval_every=0)
    train(cfg, tmp_path, trackers=[], cache_dir=cache_dir)
    assert steps_kept(tmp_path) == [4, 8, 12, 16, 20][-keep_last:]


@pytest.mark.parametrize("task", TASKS)
def test_a_loaded_model_has_the_recorded_loss(trained, trained_masked, cache_dir, task):
    folder = trained if task == "causal" else trained_masked
    model, cfg = skipless.load(folder), Run(folder).config()
    assert not model.training
    assert model.tokenizer.vocab_size == cfg.model.vocab_size
    corpus = prepare(cfg.data, cache_dir=cache_dir)
    found = evaluate(model, cfg, corpus, rows=spread(len(corpus.valid), cfg.train.eval_rows))
    assert found.loss == records(folder)[-1]["valid_loss"]
    again = skipless.load(newest(folder))
    assert torch.equal(again.embedding.weight, model.embedding.weight)


# ------------------------------------------------------------------------------------ the command line


def printed(capsys, *arguments, status=0) -> str:
    assert cli.run([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


def test_train_prints_json(tmp_path, source, cache_dir, capsys):
    file = write_config(tmp_path / "config.yaml", tiny(source))
    where = ["--runs", tmp_path / "runs", "--cache-dir", cache_dir, "--track", "none", "--name", "one"]
    found = json.loads(printed(capsys, "train", "--config", file, *where, "--json"))
    assert found["run"] == str(tmp_path / "runs" / "one")
    assert (found["steps"], found["finished"]) == (12, True)
    assert found["valid_loss"] == records(tmp_path / "runs" / "one")[-1]["valid_loss"]


def test_a_dry_run_leaves_nothing_behind(tmp_path, source, cache_dir, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_config(tmp_path / "config.yaml", tiny(source, steps=10**9))
    arguments = ["train", "--config", file, "--runs", "runs", "--cache-dir", cache_dir, "--dry-run"]
    found = json.loads(printed(capsys, *arguments, "--json"))
    assert found["config"]["train"]["steps"] == 10**9
    assert found["loss"] == pytest.approx(math.log(300), abs=0.3)
    assert found["total_seconds"] == pytest.approx(found["step_seconds"] * 10**9, rel=0.01)
    assert "nothing kept" in printed(capsys, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_evaluate(trained, trained_masked, source, cache_dir, capsys):
    for folder in (trained, trained_masked):
        found = json.loads(printed(capsys, "evaluate", folder, "--limit", 8, "--cache-dir", cache_dir, "--json"))
        assert found["loss"] == pytest.approx(records(folder)[-1]["valid_loss"], abs=1e-6)
        assert found["sequences"] == 8
        assert (found["bits_per_byte"] is None) == (folder == trained_masked)
    everything = json.loads(printed(capsys, "evaluate", trained, "--cache-dir", cache_dir, "--json"))
    assert everything["sequences"] > 100
    elsewhere = source.replace("*", "module0[01]")
    there = ["--source", elsewhere, "--cache-dir", cache_dir]
    found = json.loads(printed(capsys, "evaluate", trained, *there, "--json"))
    assert found["source"] == elsewhere
    assert 0 < found["sequences"] < everything["sequences"]
    assert "bits per byte" in printed(capsys, "evaluate", trained, *there)


def test_generate(trained, trained_masked, capsys):
    def text(*arguments):
        out = printed(
            capsys, "generate", trained, "--prompt", "def alpha", "--max-new-tokens", 20, "--json", *arguments
        )
        return json.loads(out)["texts"]

    assert text("--seed", 1) == text("--seed", 1)
    assert text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    both = text("--seed", 1, "--num-samples", 2)
    assert both == text("--seed", 1) + text("--seed", 2)
    assert all(one.startswith("def alpha") for one in both)
    plain = printed(capsys, "generate", trained, "--prompt", "def alpha", "--max-new-tokens", 20, "--seed", 1)
    assert plain.strip() == text("--seed", 1)[0].strip()
    assert cli.run(["generate", str(trained_masked), "--prompt", "a"]) == 2
    assert "masked model, which cannot write text" in capsys.readouterr().err


def test_report(trained, trained_masked, tmp_path, capsys):
    first, second = json.loads(printed(capsys, "report", trained, trained_masked, "--json"))["runs"]
    assert (first["name"], first["steps"], first["finished"]) == ("run", 30, True)
    assert first["parameters"] == skipless.load(trained).num_parameters()
    assert first["valid_loss"] == records(trained)[-1]["valid_loss"]
    assert first["tokens"] == 30 * 4 * 16
    assert second["valid_bits_per_byte"] is None
    assert "def " in printed(capsys, "report", trained, "--samples")
    pytest.importorskip("matplotlib")
    printed(capsys, "report", trained, trained_masked, "--plot", tmp_path / "losses.svg")
    assert "<svg" in (tmp_path / "losses.svg").read_text()


def test_data_build_and_show(tmp_path, source, capsys):
    how = ["--recipe", "smoke", "--source", source, "--set", "data.vocab_size=300", "--set", "data.valid_fraction=0.2"]
    how += ["--cache-dir", tmp_path]
    built = json.loads(printed(capsys, "data", "build", *how, "--json"))
    assert Path(built["path"]).parent == tmp_path
    assert 257 < built["vocab_size"] <= 300
    assert sum(split["documents"] for split in built["splits"].values()) == 40
    stamp = Path(built["path"], "train.bin").stat().st_mtime_ns
    shown = printed(capsys, "data", "show", *how, "--num-samples", 2)
    assert shown.count("─" * 40 + "\n") == 2
    assert "return" in shown
    assert Path(built["path"], "train.bin").stat().st_mtime_ns == stamp
    printed(capsys, "data", "build", *how, "--rebuild")
    assert Path(built["path"], "train.bin").stat().st_mtime_ns > stamp


# ------------------------------------------------------------------------- precision, compiler, memory


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_half_precision_needs_an_accelerator(tmp_path, source, cache_dir, capsys, dry):
    file = write_config(tmp_path / "config.yaml", tiny(source, precision="fp16", device="cpu"))
    where = ["--runs", str(tmp_path / "runs"), "--cache-dir", str(cache_dir)]
    assert cli.run(["train", "--config", str(file), *where, *dry]) == 2
    assert capsys.readouterr().err == "skipless: precision fp16 needs an accelerator; on a CPU use fp32\n"
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def probe(monkeypatch):
    """Makes the process that tries bfloat16 end with a status."""
    devices.check_cpu_bf16.cache_clear()

    def make(status):
        def run(command, **_):
            assert "bfloat16" in command[-1]
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(devices.subprocess, "run", run)

    yield make
    devices.check_cpu_bf16.cache_clear()


def test_a_processor_without_bfloat16_is_named_before_anything_is_done(tmp_path, source, probe):
    probe(-4)
    with pytest.raises(UserError, match=r"bfloat16 products do not work on this CPU .* status -4.*use precision fp32"):
        train(tiny(source, precision="bf16", device="cpu"), tmp_path / "run", cache_dir=tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_processor_with_bfloat16_may_use_it(probe):
    probe(0)
    assert devices.pick_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    assert devices.pick_dtype("auto", torch.device("cpu")) == torch.float32


def test_compiled_blocks_have_the_same_losses(make_trainer):
    if problem := devices.compiler_problem():
        pytest.skip(f"there is no compiler here: {problem}")
    plain, compiled = (losses(make_trainer({"model.n_layer": 1}, compile=what), 3) for what in ("off", "block"))
    assert compiled == pytest.approx(plain, abs=1e-4)


def test_without_a_compiler_it_says_so_and_goes_on(tmp_path, monkeypatch, source, cache_dir):
    monkeypatch.setattr(devices, "compiler_problem", lambda: "no C++")
    seen = Recorder()
    train(tiny(source, compile="block"), tmp_path, trackers=[], cache_dir=cache_dir, observer=seen)
    assert seen.messages == ["compile: block was asked for, but there is no compiler: no C++; going on without"]
    assert steps_kept(tmp_path)[-1] == 12


def test_a_training_that_does_not_fit_into_memory_is_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 10**6)
    with pytest.raises(UserError, match=r"this training needs about .* GB, and 0\.0 GB are free on cpu"):
        make_trainer({"model.d_model": 256})


def test_a_model_for_longer_sequences_can_be_trained_on_short_ones(make_trainer):
    assert losses(make_trainer({"model.max_seq_len": 10_000_000}), 1)
