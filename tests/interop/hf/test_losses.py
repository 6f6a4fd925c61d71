"""Losses: what a training step gives beside its loss, and what `Trainer` makes of it."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, LlamaModel, Trainer, TrainingArguments
from transformers.models.modernbert import modeling_modernbert as modernbert

from skipless.interop.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForQuestionAnswering,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
)
from tests.interop.hf.small import SIZE, V, make

LANGUAGE = [SkiplessForCausalLM, SkiplessForMaskedLM]


# -------------------------------------------------------------------------------- signatures

ALIKE = {
    SkiplessModel: LlamaModel,
    SkiplessForCausalLM: LlamaForCausalLM,
    SkiplessForMaskedLM: modernbert.ModernBertForMaskedLM,
    SkiplessForSequenceClassification: modernbert.ModernBertForSequenceClassification,
    SkiplessForTokenClassification: modernbert.ModernBertForTokenClassification,
}


@pytest.mark.parametrize(("ours", "theirs"), ALIKE.items())
def test_arguments_have_the_names_and_places_that_others_give_them(ours, theirs):
    """Those of Llama; and of the encoder that, as ours, has no token types."""
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)


# ------------------------------------------------------------------------------- late logits


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_tuple_of_a_training_step_has_the_logits_in_their_place(kind):
    model = make("sas", kind).train()
    ids = torch.randint(V, (2, 9))
    how = {"labels": ids, "output_hidden_states": True}
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    expected = model(ids, **how, return_dict=False)
    hook.remove()
    output = model(ids, **how)
    assert "logits" not in output
    for found in (model(ids, **how, return_dict=False), output.to_tuple(), output[:]):
        assert len(found) == len(expected) == 3
        for one, other in zip(found[:2], expected, strict=False):
            torch.testing.assert_close(one, other)
        assert isinstance(found[2], tuple)
    torch.testing.assert_close(output[1], expected[1])
    torch.testing.assert_close(output.get("logits"), expected[1])
    assert output.get("made up", 3) == 3


@pytest.mark.parametrize("kind", LANGUAGE)
def test_the_first_of_a_training_step_needs_no_logits(kind):
    model = make("sas", kind).train()
    ids = torch.randint(V, (2, 9))
    output = model(ids, labels=ids)
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head was called"))
    assert output[0] is output["loss"] is output.loss


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", LANGUAGE)
def test_logits_read_without_gradients_are_made_again_with_them(kind, without):
    """An accuracy is read before a loss of the same logits is added."""
    model = make("sas", kind, tie_embeddings=False).train()
    ids = torch.randint(V, (2, 9))

    def gradient(look):
        model.zero_grad()
        output = model(ids, labels=ids)
        if look:
            with without():
                seen = output.logits
                assert not seen.requires_grad
                assert output["logits"] is not seen
        logits = output.logits
        assert output.logits is logits
        (output.loss + logits.square().mean()).backward()
        return model.lm_head.weight.grad.clone()

    torch.testing.assert_close(gradient(True), gradient(False))
    with without():
        output = model(ids, labels=ids)
        assert output.logits is output.logits


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_head_that_has_changed_are_refused(tied):
    """They would be those of the next step's head on this step's tokens."""
    model = make("sas", tie_embeddings=tied).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.randint(V, (2, 9))
    early, late = model(ids, labels=ids), model(ids, labels=ids)
    kept = early.logits
    early.loss.backward()
    optimizer.step()
    assert early.logits is kept
    with pytest.raises(ValueError, match=r"read output\.logits before the optimiser's step"):
        late.logits  # noqa: B018


def test_late_logits_are_in_the_precision_of_their_step():
    """Whoever reads them has left the autocast of the forward pass."""
    model = make("sas", dtype=torch.float32).train()
    ids = torch.randint(V, (2, 9))
    with torch.autocast("cpu", torch.float16):
        expected = model.lm_head(model.model(ids).last_hidden_state)
        output = model(ids, labels=ids)
    assert "logits" not in output
    assert output.logits.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(output.logits, expected)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_an_output_of_training_can_be_pickled(kind):
    model = make("sas", kind).train()
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        output = model(ids, labels=ids)
    again = pickle.loads(pickle.dumps(output))  # noqa: S301  (our own)
    torch.testing.assert_close(again.loss, output.loss)
    torch.testing.assert_close(again.logits, output.logits)
    assert len(pickle.dumps(output.loss)) < 1000


# ------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", LANGUAGE)
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_labels_of_another_length_are_refused(kind, share):
    """With few that count, the others are never looked at: their places would be those of other tokens."""
    model = make("sas", kind).train()
    ids = torch.randint(V, (2, 20))
    labels = torch.where(torch.rand(2, 19) < share, ids[:, 1:], -100)
    labels[0, 5] = 3
    with pytest.raises(ValueError, match=r"labels must have the shape of the tokens, \(2, 20\), got \(2, 19\)"):
        model(ids, labels=labels)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("seen", ["moved aside", "hooked", "explicit"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_loss(side, seen, training):
    """That of a padded batch is that of its rows, each by itself: no padding foretells the first token of a text."""
    model = make("sas").train(training)
    rows = [torch.randint(1, V, (length,)) for length in (4, 9)]
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    if seen == "hooked":
        model.model.blocks[0].register_forward_hook(lambda *_: None)
    found = model(ids, mask, labels=ids.masked_fill(mask == 0, -100), output_attentions=seen == "explicit").loss
    torch.testing.assert_close(found, sum(alone) / 11, rtol=1e-5, atol=1e-6)


def test_a_mask_of_another_shape_is_refused_with_labels_too():
    model = make()
    ids = torch.randint(V, (2, 9))
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of the ids, \(2, 9\), got \(2, 7\)"):
        model(ids, torch.ones(2, 7), labels=ids)


@pytest.mark.parametrize("kind", LANGUAGE)
@pytest.mark.parametrize("where", [torch.device("meta"), torch.inference_mode()])
def test_a_step_without_values_or_gradients(kind, where):
    """As those run it who count operations, or who made the model where nothing is trained."""
    with where:
        model = kind(SkiplessConfig(**SIZE)).train()
        ids = torch.zeros(2, 9, dtype=torch.long)
        output = model(ids, labels=ids)
        assert output.loss.shape == ()
        assert output.logits.shape == (2, 9, V)


@pytest.mark.parametrize("kind", [*LANGUAGE, SkiplessForTokenClassification])
@pytest.mark.parametrize("training", [True, False])
def test_a_loss_of_ones_own(kind, training):
    """Called by keyword, as Llama calls it, with what was given and nothing else."""
    model = make("sas", kind).train(training)
    ids, labels = torch.randint(V, (2, 9)), torch.randint(2, (2, 9))
    seen = []

    def loss(*, labels, logits, **others):
        seen.append(others)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 2

    model.loss_function = loss
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, 2 * F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))
    assert seen.pop().keys() == {"config" if kind is SkiplessForTokenClassification else "vocab_size"}
    model(ids, labels=labels, num_items_in_batch=7)
    assert seen.pop()["num_items_in_batch"] == 7


# ------------------------------------------------------------------------------------ Trainer


def train_for_a_step(model, rows, folder, accumulate, **keys):
    """The weights after one update of four rows by plain gradient descent, in one batch or in several."""
    how = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=4 // accumulate,
        gradient_accumulation_steps=accumulate,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **keys,
    )
    collate = lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}  # noqa: E731
    Trainer(model, how, train_dataset=rows, data_collator=collate).train()
    return [parameter.detach().clone() for parameter in model.parameters()]


LABELS = {
    "tokens": (SkiplessForTokenClassification, {}, lambda: {"labels": torch.randint(2, (7,))}),
    "classes": (SkiplessForSequenceClassification, {}, lambda: {"labels": torch.randint(2, ())}),
    "numbers": (SkiplessForSequenceClassification, {"num_labels": 1}, lambda: {"labels": torch.randn(())}),
    "several": (
        SkiplessForSequenceClassification,
        {"problem_type": "multi_label_classification"},
        lambda: {"labels": torch.rand(2).round()},
    ),
    "answers": (
        SkiplessForQuestionAnswering,
        {},
        lambda: {"start_positions": torch.randint(7, ()), "end_positions": torch.randint(7, ())},
    ),
    "next": (SkiplessForCausalLM, {}, lambda: {"labels": torch.randint(V, (7,))}),
    "hidden": (SkiplessForMaskedLM, {}, lambda: {"labels": torch.randint(V, (7,))}),
}


@pytest.mark.parametrize(
    "task", [task if task in ("next", "tokens") else pytest.param(task, marks=pytest.mark.slow) for task in LABELS]
)
def test_accumulated_gradients_are_those_of_one_batch(task, tmp_path):
    kind, keys, labels = LABELS[task]
    rows = [{"input_ids": torch.randint(V, (7,)), **labels()} for _ in range(4)]
    model = make("sas-p", kind, dtype=torch.float32, **keys)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, after = [parameter.detach().clone() for parameter in model.parameters()], []
    for accumulate in (1, 2):
        model.load_state_dict(state)
        after.append(train_for_a_step(model, rows, tmp_path, accumulate))
    assert max((one - other).abs().max() for one, other in zip(before, after[0], strict=True)) > 1e-2
    for one, other in zip(*after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    """`Trainer` computes this loss itself, and shifts the labels of models that it knows to write."""
    model = SkiplessForCausalLM(SkiplessConfig(**SIZE))
    ids = torch.randint(V, (2, 9))
    how = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    found = Trainer(model, how).compute_loss(model.eval(), {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
