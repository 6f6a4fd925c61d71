"""Whatever a loss of power leaves of a save, the old is there or the new, whole; and what has returned is there.

Every write, fsync and rename is recorded, and every prefix of the record replayed with what was not forced to the disk
dropped, reordered and torn: `tests/helpers/power_loss.py` says what a disk is taken to be.
"""

import hashlib
import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch

import skipless.experiments.archive as archiving
from skipless.config.model import ModelConfig
from skipless.config.run import FinetuneConfig
from skipless.data import prepare
from skipless.data.corpus import Corpus
from skipless.data.own_task import read_own_task
from skipless.experiments.run_index import Completion, RunIndex
from skipless.interop.export import export_model
from skipless.nn.model import CausalLM
from skipless.runs import Run
from skipless.storage.atomic_files import make_folder, replaced_folder, staged_file, sweep, write_bytes, write_json
from skipless.storage.checkpoint_format import Checkpoint
from skipless.storage.checkpoints import Checkpoints
from skipless.storage.journal import Journal
from skipless.tasks.glue_results import Results
from skipless.tasks.own_labels import OwnFinetuning
from skipless.training.train import train
from tests.helpers.made_up_runs import make_run
from tests.helpers.power_loss import BLOCK, Recorder, Tree, read_tree, run_until_killed, write_tree
from tests.helpers.tiny_runs import MASKED, tiny, write_text

FEW = 48
MANY = 600
DEPTHS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two files, of several blocks and of a part of one."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(5, BLOCK // 8, generator=drawn), "bias": torch.randn(3, generator=drawn)},
        "optimizer": {"step": torch.tensor(seed)},
    }


def save(folder: Path, step: int, seed: int | None = None, **options) -> None:
    seed = step if seed is None else seed
    Checkpoints(folder, **options).save(step, tensors(seed), {"step": step, "seed": seed}, score=1.0 / step)


def digest(checkpoint: Checkpoint | None) -> tuple[int, str] | None:
    """What a checkpoint holds."""
    if checkpoint is None:
        return None
    found = {stem: {k: v.tolist() for k, v in sorted(checkpoint.tensors(stem).items())} for stem in checkpoint.stems}
    text = json.dumps([found, checkpoint.state, checkpoint.score], sort_keys=True)
    return checkpoint.step, hashlib.sha256(text.encode()).hexdigest()


def newest(folder: Path) -> tuple[int, str] | None:
    return digest(Checkpoints(folder).latest_valid()[0])


@pytest.fixture
def disk(tmp_path):
    """A folder to record."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def replay(tmp_path):
    """Calls `check(folder, over)` for every state in which the disk may be after every prefix; how many there were.

    `over` says whether all that was recorded had returned.
    """

    def run(recorder: Recorder, check, limit: int = FEW, seed: int = 0) -> int:
        assert recorder.tree() == read_tree(recorder.root), "the recorder has missed something"
        rng, looked, count = random.Random(seed), set(), 0
        for done in range(len(recorder.operations) + 1):
            over = done == len(recorder.operations)
            for tree in recorder.crashes(done, rng, limit):
                key = over, hash(tuple(tree.items()))
                if key in looked:
                    continue
                looked.add(key)
                count += 1
                folder = write_tree(tree, tmp_path / f"state-{count}")
                check(folder, over)
        return count

    return run


# -------------------------------------------------------------------------------------------------- the simulated disk


def states(recorder: Recorder, limit: int = 200) -> list[Tree]:
    rng = random.Random(0)
    return [tree for done in range(len(recorder.operations) + 1) for tree in recorder.crashes(done, rng, limit)]


def test_the_simulated_disk_loses_what_was_not_forced(disk):
    """A plain write in place, and a rename without an fsync, are what it must find fault with."""
    (disk / "a").write_text("old")
    with Recorder(disk) as recorder:
        (disk / "a").write_text("new and longer")
    assert {tree["a"] for tree in states(recorder)} >= {b"old", b"new and longer", b"", bytes(14)}
    with Recorder(disk) as recorder:
        (disk / ".tmp-a").write_text("third")
        (disk / ".tmp-a").replace(disk / "a")
    assert b"" in {tree["a"] for tree in states(recorder)}, "the name may be there before the content"
    assert recorder.tree() == {"a": b"third"}


def test_the_simulated_disk_keeps_what_was_forced(disk):
    with Recorder(disk) as recorder:
        write_bytes(disk / "a", b"x" * 2000)
    last = list(recorder.crashes(len(recorder.operations), random.Random(0), 100))
    assert last == [{"a": b"x" * 2000}]


def test_a_name_is_lost_without_an_fsync_of_its_folder(disk):
    with Recorder(disk) as recorder:
        (disk / "folder").mkdir()
        write_bytes(disk / "folder" / "a", b"x")
    assert {} in recorder.crashes(len(recorder.operations), random.Random(0), 100)


def test_blocks_are_torn(disk):
    with Recorder(disk) as recorder:
        (disk / "a").write_bytes(b"x" * 10 * BLOCK)
    sizes = {len(tree["a"]) for seed in range(20) for tree in recorder.crashes(2, random.Random(seed), 50) if tree}
    mixed = [tree["a"] for seed in range(20) for tree in recorder.crashes(2, random.Random(seed), 50) if tree.get("a")]
    assert len(sizes) > 4
    assert any(b"x" in content and b"\0" in content for content in mixed)


# --------------------------------------------------------------------------------------------------------- checkpoints


def nothing(folder: Path) -> None:
    pass


def two(folder: Path) -> None:
    save(folder / "run" / "checkpoints", 1)
    save(folder / "run" / "checkpoints", 2)


SAVES = {
    "the first": (nothing, partial(save, step=1)),
    "the third, which prunes": (two, partial(save, step=3)),
    "the only one that is kept": (two, partial(save, step=3, keep_last=1, keep_best=False)),
    "the same step again": (two, partial(save, step=2, seed=7)),
}


@pytest.mark.parametrize("limit", DEPTHS)
@pytest.mark.parametrize("name", SAVES)
def test_a_save_leaves_the_last_checkpoint_or_the_new_one(disk, replay, name, limit):
    before, action = SAVES[name]
    before(disk)
    old = newest(disk / "run" / "checkpoints")
    with Recorder(disk) as recorder:
        action(disk / "run" / "checkpoints")
    new = newest(disk / "run" / "checkpoints")
    assert old != new
    found = set()

    def check(folder, over):
        there = newest(folder / "run" / "checkpoints")
        assert there == new if over else there in (old, new)
        found.add(there)

    # more than a kill after each operation would leave
    assert replay(recorder, check, limit) > len(recorder.operations)
    assert found == {old, new}


def test_after_a_loss_of_power_the_next_save_works_and_nothing_staged_is_left(disk, replay):
    two(disk)
    with Recorder(disk) as recorder:
        save(disk / "run" / "checkpoints", 2, seed=7)

    def check(folder, over):
        place = folder / "run" / "checkpoints"
        sweep(place)
        save(place, 2, seed=8)
        assert Checkpoints(place).latest_valid()[0].state["seed"] == 8
        assert not [path.name for path in place.iterdir() if path.name.startswith(".")]

    assert replay(recorder, check, limit=6) > 50


def test_a_checkpoint_survives_whatever_process_was_killed_before_it(tmp_path):
    """Killed between a mkdir and its fsync, a process leaves a folder that the next one finds, and must force again."""

    def start(root: Path) -> None:
        run = root / "runs" / "one"
        make_folder(run)
        journal = Journal(run / "metrics.jsonl")
        journal.append({"loss": 1.0})
        journal.position()
        if (run / "checkpoints").exists():
            sweep(run / "checkpoints")
        save(run / "checkpoints", 1)
        journal.close()

    for number in range(200):
        root = tmp_path / f"{number}"
        root.mkdir()
        with Recorder(root) as recorder:
            killed = run_until_killed(root, number, partial(start, root))
            start(root)
        done = len(recorder.operations)
        for state, tree in enumerate(recorder.crashes(done, random.Random(number), 200)):
            folder = write_tree(tree, tmp_path / f"{number}-{state}")
            assert newest(folder / "runs" / "one" / "checkpoints") is not None, number
            assert (folder / "runs" / "one" / "metrics.jsonl").read_bytes().endswith(b'{"loss": 1.0}\n')
        if not killed:
            break
    assert 15 < number < 199


def test_lines_that_a_checkpoint_counts_on_are_there_before_it(disk, replay):
    make_folder(disk / "run")

    def train() -> None:
        journal = Journal(disk / "run" / "metrics.jsonl")
        checkpoints = Checkpoints(disk / "run" / "checkpoints")
        for step in (1, 2):
            journal.append({"step": step, "loss": 0.1 * step, "padding": "x" * BLOCK})
            checkpoints.save(step, tensors(step), {"journal": journal.position()})
        journal.append({"step": 3})
        journal.close()

    with Recorder(disk) as recorder:
        train()
    whole = (disk / "run" / "metrics.jsonl").read_bytes()

    def check(folder, over):
        checkpoint, _ = Checkpoints(folder / "run" / "checkpoints").latest_valid()
        if checkpoint is None:
            assert not over
            return
        journal = Journal(folder / "run" / "metrics.jsonl")
        journal.cut(checkpoint.state["journal"])
        journal.close()
        lines = (folder / "run" / "metrics.jsonl").read_bytes()
        assert whole.startswith(lines)
        assert lines.count(b"\n") == checkpoint.step

    assert replay(recorder, check, limit=12) > 50


# --------------------------------------------------------------------------------------------- single files and folders


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("limit", DEPTHS)
def test_a_file_has_the_old_content_or_the_new(disk, replay, there, limit):
    old = b"o" * 3 * BLOCK if there else None
    new = b"n" * 5 * BLOCK
    if old:
        write_bytes(disk / "a", old)
    with Recorder(disk) as recorder:
        write_bytes(disk / "a", new)
    found = set()

    def check(folder, over):
        content = (folder / "a").read_bytes() if (folder / "a").exists() else None
        assert content == new if over else content in (old, new)
        found.add(content)

    assert replay(recorder, check, limit) >= 5
    assert found == {old, new}


def test_results_of_a_fine_tuning_are_the_old_or_the_new(disk, replay):
    empty = {"tasks": {}, "data": {}, "fits": {}, "failures": {}}
    more = {**empty, "tasks": {"cola": {"seeds": {"0": {"mcc": 0.5}}}}}
    Results(disk / "glue.json", empty).write()
    old = (disk / "glue.json").read_bytes()
    with Recorder(disk) as recorder:
        Results(disk / "glue.json", more).write()
    new = (disk / "glue.json").read_bytes()

    def check(folder, over):
        content = (folder / "glue.json").read_bytes()
        assert content == new if over else content in (old, new)

    assert replay(recorder, check) >= 5


def test_prepared_data_is_whole_or_built_again(disk, replay, tmp_path):
    cfg = tiny(write_text(tmp_path / "text", files=8, functions=8)).data
    with Recorder(disk) as recorder:
        corpus = prepare(cfg, cache_dir=disk / "cache")
    name, built = corpus.path.name, 0

    def check(folder, over):
        nonlocal built
        place = folder / "cache" / name
        if place.exists():
            assert Corpus.open(place, cfg).fingerprint == corpus.fingerprint
        else:
            assert not over
        if built < 20:
            built += 1
            assert prepare(cfg, cache_dir=folder / "cache").fingerprint == corpus.fingerprint
            kept = {path.name for path in (folder / "cache").iterdir()}
            assert kept == {name, f"{name}.lock"}

    assert replay(recorder, check, limit=3) > 50


SMALL = ModelConfig(n_layer=1, d_model=8, n_head=1, vocab_size=11, max_seq_len=4)


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_an_export_is_the_old_one_or_the_new(disk, replay, to):
    torch.manual_seed(1)
    export_model(CausalLM(SMALL), to, disk / "out")
    old = read_tree(disk / "out")
    torch.manual_seed(2)
    with Recorder(disk) as recorder:
        export_model(CausalLM(SMALL), to, disk / "out", overwrite=True)
    new = read_tree(disk / "out")
    assert old != new

    def check(folder, over):
        # between the two renames of a replacement only what was set aside is there
        place = folder / "out" if (folder / "out").exists() else folder / ".old-out"
        assert read_tree(place) == new if over else read_tree(place) in (old, new)

    assert replay(recorder, check, limit=12) > 20


def test_a_saved_model_is_whole_or_not_there(disk, replay):
    with Recorder(disk) as recorder:
        CausalLM(SMALL).save(disk / "out")
    new = read_tree(disk / "out")

    def check(folder, over):
        there = read_tree(folder / "out") if (folder / "out").exists() else None
        assert there == new if over else there in (None, new)

    assert replay(recorder, check, limit=12) > 10


def test_answers_are_the_old_ones_or_the_new(disk, replay):
    """A file that is filled line by line, as `predict --output` does."""
    write_bytes(disk / "answers", b"old")

    def answer() -> None:
        with staged_file(disk / "answers") as file:
            for _ in range(4):
                file.write(b"x" * BLOCK)
                file.flush()

    with Recorder(disk) as recorder:
        answer()

    def check(folder, over):
        content = (folder / "answers").read_bytes()
        assert content == b"x" * 4 * BLOCK if over else content in (b"old", b"x" * 4 * BLOCK)

    assert replay(recorder, check) >= 5


@pytest.mark.slow
def test_a_classifier_goes_on_whatever_is_left_of_it(disk, replay, tmp_path):
    """Its folder is never taken for somebody else's, and its training ends as it would have."""
    source = write_text(tmp_path / "text", files=8, functions=8)
    run = train(
        tiny(source, MASKED, steps=1, eval_every=0), tmp_path / "run", trackers=[], cache_dir=tmp_path / "cache"
    )
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\n" + "alpha\tno\nbeta\tyes\n" * 2)
    data = read_own_task("own", str(rows), str(rows), None, texts=["text"], label="label")

    def tune(folder: Path) -> bytes:
        cfg = FinetuneConfig(epochs=2, batch_size=4)
        OwnFinetuning(run, data, folder / "own", cfg).train()
        last, _ = Run(folder / "own").checkpoints().latest_valid()
        assert last is not None
        return (last.path / "model.safetensors").read_bytes()

    with Recorder(disk) as recorder:
        expected = tune(disk)

    def check(folder, over):
        if over:
            assert newest(folder / "own" / "checkpoints") == newest(disk / "own" / "checkpoints")
        assert tune(folder) == expected
        assert [line["epoch"] for line in Run(folder / "own").metrics()] == [1, 2]

    assert replay(recorder, check, limit=1) > 20


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A finished run for the archive."""
    monkeypatch.setattr(archiving, "completion", lambda run: Completion(finished=True, share=1.0))
    run = make_run(tmp_path / "run", reached=100)
    info = json.loads(run.config_file.read_text())
    write_json(run.config_file, {**info, "data": {"fingerprint": "0"}})
    return run


def test_an_archived_run_is_the_old_or_the_new(disk, replay, published):
    place = archived(published, disk)
    old = read_tree(place)
    (published.folder / "bits.json").write_text('{"loss": {"32": 1.5}}\n')
    with Recorder(disk) as recorder:
        archiving.archive(published, disk)
    new = read_tree(place)
    assert old != new

    def check(folder, over):
        if over:
            assert read_tree(folder / place.name) == new
        elif (folder / place.name).exists():
            assert read_tree(folder / place.name) in (old, new)
        # what is half-written is no run, and to archive again puts everything right
        assert all(not run.name.startswith(".tmp-") for run in RunIndex(folder).known.values())
        archiving.archive(published, folder)
        assert read_tree(folder / place.name) == new

    assert replay(recorder, check, limit=12) > 20


def archived(run: Run, folder: Path) -> Path:
    archiving.archive(run, folder)
    (place,) = folder.iterdir()
    return place


def test_what_was_set_aside_is_put_back(disk):
    """Killed between its two renames, a replacement leaves only what it had set aside, which the next one keeps."""
    with replaced_folder(disk / "a") as staging:
        (staging / "x").write_text("old")

    def replace(text: str) -> None:
        with replaced_folder(disk / "a") as staging:
            (staging / "x").write_text(text)

    for number in range(100):
        if not run_until_killed(disk, number, partial(replace, "new")):
            break
        kept = disk / "a" if (disk / "a").exists() else disk / ".tmp-a-old"
        assert (kept / "x").read_text() in ("old", "new")

        def interrupted() -> None:
            with replaced_folder(disk / "a"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert (disk / "a" / "x").read_text() in ("old", "new")
    assert 4 < number < 99
