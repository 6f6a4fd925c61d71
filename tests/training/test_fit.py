"""`skipless.fit`: a source or data of one's own, a loss of one's own, callbacks, and the same checkpoints."""

import signal

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import skipless
from skipless.config.block import parse_block
from skipless.errors import UserError
from skipless.nn.model import IGNORED
from skipless.runs import Run
from skipless.storage.saver import BackgroundSaver
from skipless.training.stopping import Interrupted
from skipless.training.train import train
from tests.helpers.tiny_runs import assert_same_run, newest, records, tiny

CFG = skipless.ModelConfig(block="sas-p", n_layer=2, d_model=32, n_head=2, vocab_size=40, max_seq_len=16)
QUICK = {"steps": 12, "batch_size": 4, "lr": 3e-3, "log_every": 3, "save_every": 4, "eval_every": 6, "device": "cpu"}


class Counting(Dataset):
    """Rows that count upwards from a random start."""

    def __init__(self, rows=40, length=12):
        self.starts, self.length = torch.randint(20, (rows,), generator=torch.Generator().manual_seed(rows)), length

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        return self.starts[index] + torch.arange(self.length)


class Stop(Exception):
    pass


def stop_at(step: int):
    def look(record):
        if record["step"] == step:
            raise Stop

    return look


def test_a_dataset_is_learnt():
    fitted = skipless.fit(CFG, Counting(), valid=Counting(8), **{**QUICK, "steps": 200, "lr": 1e-2})
    assert not fitted.model.training
    assert fitted.run is None
    losses = [line["valid_loss"] for line in fitted.metrics if "valid_loss" in line]
    assert losses[-1] < 0.5 < losses[0]
    rows = fitted.model.generate(torch.tensor([[3, 4, 5], [7, 8, 9]]), 4, temperature=0)
    assert rows.tolist() == [[3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 10, 11, 12, 13]]


def test_a_dataset_resumes_bit_for_bit(tmp_path):
    how = {"valid": Counting(8), **QUICK}
    skipless.fit(CFG, Counting(), folder=tmp_path / "reference", **how)
    with pytest.raises(Stop):
        skipless.fit(CFG, Counting(), folder=tmp_path / "run", on_step=stop_at(7), **how)
    fitted = skipless.fit(CFG, Counting(), folder=tmp_path / "run", resume=True, **how)
    assert_same_run(tmp_path / "run", tmp_path / "reference")
    opened = skipless.load(tmp_path / "run")
    assert opened.tokenizer is None
    assert all(torch.equal(opened.state_dict()[name], value) for name, value in fitted.model.state_dict().items())
    with pytest.raises(UserError, match="was trained on other data"):
        skipless.fit(CFG, Counting(41), folder=tmp_path / "run", resume=True, **{**how, "steps": 12})


class Endless(IterableDataset):
    def __iter__(self):
        return (torch.arange(12) + number % 7 for number in range(10))


@pytest.mark.parametrize(
    "data", [Endless(), [torch.arange(12) + number for number in range(9)]], ids=["iterable", "list"]
)
def test_an_iterable_that_gives_the_same_again_resumes_too(data, tmp_path):
    skipless.fit(CFG, data, folder=tmp_path / "reference", **QUICK)
    with pytest.raises(Stop):
        skipless.fit(CFG, data, folder=tmp_path / "run", on_step=stop_at(7), **QUICK)
    skipless.fit(CFG, data, folder=tmp_path / "run", resume=True, **QUICK)
    assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_an_iterator_that_ends_says_so():
    with pytest.raises(UserError, match="has ended after 10 items, and cannot begin again"):
        skipless.fit(CFG, iter(Endless()), **QUICK)
    with pytest.raises(UserError, match="the data has no items"):
        skipless.fit(CFG, iter([]), **QUICK)


def test_every_epoch_has_all_items_in_another_order():
    seen = []

    class Noted(Counting):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    skipless.fit(CFG, Noted(24), **{**QUICK, "steps": 12, "save_every": 99})
    used = seen[-48:]  # before these it was looked at
    assert sorted(used[:24]) == sorted(used[24:]) == list(range(24))
    assert used[:24] != used[24:]


def test_pairs_mappings_and_rows_are_the_same_batches(tmp_path):
    """Rows of several lengths are padded, and padding counts for nothing."""
    rows = [torch.arange(5 + number % 7) + number for number in range(12)]
    pairs = [(row[:-1], row[1:]) for row in rows]
    mappings = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    masked = [
        {
            "ids": torch.cat([row[:-1], row[:2]]),
            "labels": torch.cat([row[1:], torch.full((2,), IGNORED)]),
            "attention_mask": torch.arange(len(row) + 1) < len(row) - 1,
        }
        for row in rows
    ]
    found = [skipless.fit(CFG, data, **QUICK) for data in (rows, pairs, mappings, masked)]
    for one in found[1:]:
        for name, value in found[0].model.state_dict().items():
            torch.testing.assert_close(one.model.state_dict()[name], value, atol=1e-5, rtol=1e-4)
    tokens = [one.metrics[-1]["tokens"] for one in found]
    assert len(set(tokens)) == 1


def test_items_without_labels_count_for_nothing():
    rows = [(torch.arange(8) + number, torch.arange(1, 9) + number) for number in range(12)]
    ignored = (torch.arange(8), torch.full((8,), IGNORED))
    how = {**QUICK, "micro_batch": 1, "steps": 3}
    fitted = skipless.fit(CFG, [*rows, ignored], valid=[ignored, *rows[:3]], **{**how, "batch_size": 13})
    alone = skipless.fit(CFG, rows, valid=rows[:3], **{**how, "batch_size": 12})
    for line, expected in zip(fitted.metrics, alone.metrics, strict=True):
        assert line["tokens"] == expected["tokens"]
        for key in line.keys() & {"loss", "valid_loss", "grad_norm"}:
            assert line[key] == pytest.approx(expected[key], rel=1e-4)
    with pytest.raises(UserError, match="step 1: all labels are ignored"):
        skipless.fit(CFG, [ignored], **how)
    with pytest.raises(UserError, match="all labels of the held-out data are ignored"):
        skipless.fit(CFG, rows, valid=[ignored], **how)


def test_a_loss_and_a_batch_of_ones_own(tmp_path):
    """A mean over the last token alone, from items that are words."""
    words = ["abc", "bcd", "cde", "def"] * 3

    def collate(items):
        return {"ids": torch.tensor([[ord(letter) - 97 for letter in item] for item in items])}

    def loss(model, batch):
        logits = model(batch["ids"][:, :-1])
        return torch.nn.functional.cross_entropy(logits[:, -1], batch["ids"][:, -1])

    how = {"loss": loss, "collate": collate, "valid": words[:4], **QUICK, "steps": 60, "lr": 1e-2, "eval_every": 0}
    fitted = skipless.fit(CFG, words, folder=tmp_path / "run", **how)
    assert fitted.metrics[-1]["valid_loss"] < 0.3
    assert fitted.metrics[-1]["tokens"] == 60 * 4
    with pytest.raises(Stop):
        skipless.fit(CFG, words, folder=tmp_path / "again", on_step=stop_at(30), **how)
    skipless.fit(CFG, words, folder=tmp_path / "again", resume=True, **how)
    assert_same_run(tmp_path / "again", tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_it():
    with pytest.raises(Exception, match="step 1: the loss is nan, first in a loss of one's own"):
        skipless.fit(CFG, Counting(), loss=lambda model, batch: model(batch).sum() * float("nan"), **QUICK)


def test_callbacks_are_told_what_happened(tmp_path):
    steps, evaluations, saves = [], [], []
    told = {"on_step": steps.append, "on_evaluate": evaluations.append}

    def saved(step, folder):
        assert (folder / "manifest.json").exists()  # it is on the disk by then
        saves.append(step)

    fitted = skipless.fit(CFG, Counting(), valid=Counting(8), folder=tmp_path / "run", on_save=saved, **told, **QUICK)
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "batch_size"}
    lines = [line for line in fitted.metrics if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(sum(record["loss"] for record in steps[:3]) / 3)
    assert [record["step"] for record in evaluations] == [0, 6, 12]
    assert saves == [4, 8, 12]


def test_interrupted_it_says_what_was_kept(tmp_path):
    def interrupt(record):
        if record["step"] == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=r"^SIGINT: stopped at step 5; nothing is kept without a folder$") as caught:
        skipless.fit(CFG, Counting(), on_step=interrupt, **QUICK)
    assert caught.value.status == 130
    with pytest.raises(Interrupted, match=r"^SIGINT: saved at step 5; continue with resume=True$"):
        skipless.fit(CFG, Counting(), folder=tmp_path / "run", on_step=interrupt, **QUICK)
    assert newest(tmp_path / "run").name == "step-00000005"


def test_a_checkpoint_is_there_while_it_is_told_of(tmp_path, monkeypatch):
    """Though only one is kept, and the next one is written in another thread."""
    seen, submit = [], BackgroundSaver.submit

    def submit_and_wait(self, *args, **more):
        submit(self, *args, **more)
        self.wait()

    monkeypatch.setattr(BackgroundSaver, "submit", submit_and_wait)
    told = {"on_save": lambda step, folder: seen.append((step, (folder / "manifest.json").exists()))}
    skipless.fit(CFG, Counting(), folder=tmp_path / "run", **{**QUICK, "keep_last": 1}, **told)
    assert seen == [(4, True), (8, True), (12, True)]


class Once:
    """An iterator that cannot begin again."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self.items


@pytest.mark.parametrize("kind", ["dataset", "iterable", "once", "loss", "collate"])
def test_a_budget_in_tokens_is_scheduled_by_what_is_counted(kind):
    """As a training of as many steps, with the same warm-up: rows are shorter than the longest that the model takes."""
    rows, more, each = [torch.arange(9) + number for number in range(24)], {}, 8
    if kind == "loss":
        more, each = {"loss": lambda model, batch: model.loss(batch[:, :-1], batch[:, 1:])}, 1
    elif kind == "collate":
        more = {"collate": torch.stack}
    elif kind in ("iterable", "once"):
        make = Once if kind == "once" else lambda items: type("Again", (), {"__iter__": lambda self: iter(items)})()
    how = {"batch_size": 4, "lr": 1e-3, "warmup": 0.3, "sample_every": 0, **more}
    found = []
    for budget in ({"steps": 6}, {"tokens": 6 * 4 * each}):
        told = []
        data = make(rows) if kind in ("iterable", "once") else rows
        skipless.fit(CFG, data, on_step=told.append, **budget, **how)
        found.append(told)
    assert found[1] == found[0]


def test_a_budget_in_tokens_on_rows_of_any_length_resumes_bit_for_bit(tmp_path):
    rows = [torch.arange(5 + number % 9) for number in range(30)]
    how = {"tokens": 500, "batch_size": 4, "micro_batch": 2, "batch_ramp": 0.5, "warmup": 0.3, "save_every": 3}
    how |= {"sample_every": 0, "log_every": 1}
    fitted = skipless.fit(CFG, rows, folder=tmp_path / "reference", **how)
    rates = [line["lr"] for line in fitted.metrics if "lr" in line]
    assert rates[0] < rates[1] < rates[2]
    assert rates[-1] < rates[-2] < max(rates)
    with pytest.raises(Stop):
        skipless.fit(CFG, rows, folder=tmp_path / "run", on_step=stop_at(5), **how)
    skipless.fit(CFG, rows, folder=tmp_path / "run", resume=True, **how)
    assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_a_source_is_what_the_command_trains(source, cache_dir, tmp_path):
    cfg = tiny(source)
    train(cfg, tmp_path / "reference", trackers=[], cache_dir=cache_dir)
    fitted = skipless.fit(cfg, folder=tmp_path / "run", cache_dir=cache_dir)
    assert_same_run(tmp_path / "run", tmp_path / "reference")
    assert fitted.run.config() == Run(tmp_path / "reference").config()
    assert isinstance(fitted.model.generate("def alpha", 8, seed=1), str)
    assert len(fitted.model.generate(["def alpha", "return"], 8)) == 2
    again = skipless.fit(cfg, source, cache_dir=cache_dir, steps=12)
    losses = [[line["loss"] for line in one if "loss" in line] for one in (records(tmp_path / "run"), again.metrics)]
    assert losses[0] == losses[1]


def test_a_model_is_gone_on_from(source, cache_dir, tmp_path):
    model = skipless.fit(CFG, Counting(), **{**QUICK, "steps": 100, "lr": 1e-2}).model
    first = skipless.fit(model, Counting(), valid=Counting(8), **{**QUICK, "steps": 1}).metrics[0]["valid_loss"]
    fresh = skipless.fit(CFG, Counting(), valid=Counting(8), **{**QUICK, "steps": 1}).metrics[0]["valid_loss"]
    assert first < fresh - 1
    with pytest.raises(UserError, match="the model is not that of the configuration: vocab_size"):
        skipless.fit(model, source, cache_dir=cache_dir, **QUICK)


def test_activation_checkpointing_is_gone_when_it_is_over():
    model = skipless.CausalLM(CFG)
    skipless.fit(model, Counting(), activation_checkpointing=True, **QUICK)
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize(
    ("model", "data", "more", "said"),
    [
        (CFG, [], {}, "the data has no items"),
        (CFG, 5, {}, "a source, a Dataset or an iterable, got int"),
        (CFG, [torch.rand(5)], {}, "an item must be a tensor of token ids"),
        (CFG, ["text"], {}, "an item must be a tensor of token ids"),
        (CFG, [torch.tensor([1])], {}, "it needs two at least"),
        (CFG, [(torch.arange(4), torch.arange(3))], {}, "labels must have the shape of the ids"),
        (CFG, Counting(), {"valid": []}, "the held-out data has no items"),
        (CFG, Counting(), {"stepz": 5}, "unknown setting of fit 'stepz'.*did you mean 'steps'"),
        (CFG, Counting(), {"resume": True}, "to resume there must be a folder"),
        (CFG, Counting(), {"health_every": 5}, "need a configured source"),
        (CFG, "files:x", {"loss": lambda model, batch: None}, "go with data of your own"),
        ("sas-p", Counting(), {}, "fit takes a ModelConfig"),
        (skipless.MaskedLM(CFG), Counting(), {}, "give pairs"),
    ],
)
def test_what_cannot_be_is_said(model, data, more, said):
    with pytest.raises(UserError, match=said):
        skipless.fit(model, data, **{**QUICK, **more})


def test_a_run_on_data_of_ones_own_cannot_be_trained_by_the_command(tmp_path):
    run = skipless.fit(CFG, Counting(), folder=tmp_path / "run", **QUICK).run
    with pytest.raises(UserError, match="unknown source 'own'"):
        train(run.config(), tmp_path / "other", trackers=[])


# ----------------------------------------------------------------------------------------- save


@pytest.mark.parametrize("kind", ["causal", "masked", "classifier"])
def test_save_and_load(kind, tmp_path):
    make = {"causal": skipless.CausalLM, "masked": skipless.MaskedLM}.get(kind) or (
        lambda cfg: skipless.SequenceClassifier(cfg, 3, causal=True)
    )
    model = make(CFG).eval()
    model.save(tmp_path / "deep" / "saved")
    opened = skipless.load(tmp_path / "deep" / "saved")
    ids = torch.randint(40, (2, 9))
    assert torch.equal(opened(ids), model(ids))
    assert sorted(path.name for path in (tmp_path / "deep").rglob("*")) == ["config.json", "model.safetensors", "saved"]
    with pytest.raises(UserError, match="is already there"):
        model.save(tmp_path / "deep" / "saved")


def test_what_cannot_be_saved_is_said(tmp_path):
    class Mine(skipless.CausalLM):
        pass

    with pytest.raises(UserError, match="a Mine cannot be saved"):
        Mine(CFG).save(tmp_path / "x")
    with pytest.raises(UserError, match="a folded model"):
        skipless.CausalLM(CFG).fold().save(tmp_path / "x")
    fixed = skipless.CausalLM(CFG.replace(block=parse_block("pre-ln:beta_ff=0.2")))
    with pytest.raises(UserError, match="a folded model"):  # whose tensors have the names of the original
        fixed.fold().save(tmp_path / "x")
    torch.nn.utils.parametrizations.weight_norm(fixed.blocks[0].mlp.down)
    with pytest.raises(UserError, match="does not have the parameters of its configuration"):
        fixed.save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_generated_text_is_that_of_the_command(source, cache_dir, tmp_path):
    run = train(tiny(source), tmp_path / "run", trackers=[], cache_dir=cache_dir)
    model = skipless.load(run.folder)
    from skipless.nn.sampling import Sampling, sample_text

    assert model.generate("def ", 20, temperature=0) == sample_text(model, "def ", 20, Sampling(temperature=0))
    model.save(tmp_path / "saved")
    assert skipless.load(tmp_path / "saved").generate("def ", 20, seed=3) == model.generate("def ", 20, seed=3)
    ids = torch.tensor([model.tokenizer.encode("def alpha")])
    ended = model.generate(ids, 30, stop_ids=range(model.config.vocab_size))
    assert ended.shape[1] == ids.shape[1] + 1
    assert newest(run.folder).exists()
