"""`skipless bench token-time`: each size as soon as it is measured, beside those of the same machine."""

import gc
import json
import weakref

import pytest

from skipless.cli import run
from skipless.experiments import timings
from skipless.experiments.scale import Scale
from skipless.experiments.timings import BLOCKS, Timings


class Step:
    """A training step that does nothing, and what it would hold in memory."""

    def __call__(self):
        pass


@pytest.fixture
def alive(monkeypatch):
    """Steps that cost nothing; how many of those of other sizes are in memory when one is made."""
    made, seen = [], []

    def training_step(cfg, device):
        gc.collect()
        size = (cfg.task, cfg.data.source, cfg.model.d_model)
        seen.append(sum(ref() is not None and other != size for other, ref in made))
        step = Step()
        made.append((size, weakref.ref(step)))
        return step, 8

    monkeypatch.setattr(timings, "training_step", training_step)
    return seen


def measure(folder, *sizes):
    options = [word for size in sizes for word in ("--size", size)]
    return run(["bench", "token-time", "--rounds", "2", "--runs", str(folder), "--device", "cpu", *options])


def test_the_models_of_one_size_are_gone_before_those_of_the_next(tmp_path, alive):
    assert measure(tmp_path, "decoder", "books", "encoder, width 768") == 0
    assert alive == [0] * 3 * len(BLOCKS)


def test_what_is_measured_stays_if_the_next_size_fails(tmp_path, alive, monkeypatch):
    assert measure(tmp_path, "books") == 0
    good = timings.training_step

    def fails(cfg, device):
        if cfg.model.d_model == 768:
            raise KeyboardInterrupt
        return good(cfg, device)

    monkeypatch.setattr(timings, "training_step", fails)
    assert measure(tmp_path, "decoder", "decoder, width 768") == 130
    assert set(Timings.read(tmp_path).seconds) == {"books", "decoder"}


def test_figures_of_another_machine_are_not_kept(tmp_path, alive, capsys):
    assert measure(tmp_path, "books") == 0
    path = tmp_path / timings.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 99}))
    assert measure(tmp_path, "decoder") == 0
    assert set(Timings.read(tmp_path).seconds) == {"decoder"}
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"]) == {"decoder"}


def test_the_papers_runs_have_the_time_of_their_size():
    """A CPU times four rows of them; a GPU times as many as the recipe has at once."""
    sizes = {"decoder": "decoder, width 768", "encoder": "encoder, width 768", "books": "books, width 768"}
    found = Timings({size: {block: [2.0, 1.0, 9.0] for block in BLOCKS} for size in sizes.values()})
    for kind, size in sizes.items():
        for block in BLOCKS:
            run = Scale("paper").run(kind, block)
            assert found.of(run) == 2.0
            assert found.of(run.override({"model.n_layer": 3})) is None
            assert timings.SIZES[size].config(block).train.batch_size == (1 if kind == "books" else 4)
            at_once = run.train.micro_batch or run.train.batch_size
            assert timings.SIZES[size].config(block, "cuda").train.batch_size == at_once > 4
