"""The shape that Hugging Face's libraries expect of a model: a base, a head that is called, heads for tasks."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

import skipless
from skipless.interop.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForQuestionAnswering,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
    unwrap,
)
from tests.interop.hf.small import SIZE, V, make

HEADS = [
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessForQuestionAnswering,
]


# ----------------------------------------------------------------------------------- base and head


@pytest.mark.parametrize("kind", HEADS)
def test_every_model_has_a_bare_one_that_can_be_saved_and_opened(kind, tmp_path):
    model = make("sas", kind, dtype=torch.float32)
    ids = torch.randint(V, (2, 7))
    bare = model.base_model
    assert type(bare) is SkiplessModel
    expected = bare(input_ids=ids).last_hidden_state
    assert expected.shape == (2, 7, 24)
    changed = bare(input_ids=ids.roll(1, 1)).last_hidden_state
    assert not torch.allclose(expected, changed)
    bare.save_pretrained(tmp_path / "bare")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("bare", "whole"):  # whichever was saved: the bare model looks the way it was trained
        opened = AutoModel.from_pretrained(tmp_path / folder)
        assert opened.causal == (kind is SkiplessForCausalLM)
        torch.testing.assert_close(opened(ids).last_hidden_state, expected)
    again = kind.from_pretrained(tmp_path / "bare")
    torch.testing.assert_close(again.base_model(ids).last_hidden_state, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", HEADS[:2])
def test_the_head_is_a_module_that_is_called(kind, tied):
    model = make("sas-p", kind, tie_embeddings=tied)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    assert (head.weight is model.get_input_embeddings().weight) == tied
    calls = []
    head.register_forward_hook(lambda _, inputs, output: calls.append(1) or output + 1)
    ids = torch.randint(V, (1, 5))
    for mode in (True, False):
        output = model.train(mode)(ids, labels=ids)
        expected = F.linear(model.base_model(ids, use_cache=False).last_hidden_state, head.weight) + 1
        torch.testing.assert_close(output.logits, expected)
    assert len(calls) >= 2


@pytest.mark.parametrize("kind", HEADS[:2])
@pytest.mark.parametrize("n_items", [None, 50])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_training_never_holds_all_logits_and_gives_them_to_those_who_ask(kind, n_items, share):
    """The same loss and gradients as from the logits, with labels that do not count and more rows than a chunk."""
    model = make("sas", kind, max_seq_len=600).train()
    ids = torch.randint(V, (2, 600))
    labels = torch.where(torch.rand(2, 600) < share, ids, -100)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    called = []
    hook = model.lm_head.register_forward_hook(lambda *_: called.append(1))
    plain = model(ids, labels=labels, num_items_in_batch=n_items)  # hooked, so it is called
    assert called
    assert "logits" in plain
    expected = gradients(plain.loss)
    hook.remove()
    output = model(ids, labels=labels, num_items_in_batch=n_items)
    assert list(output.keys()) == ["loss"]
    torch.testing.assert_close(output.loss, plain.loss)
    logits = output.logits
    torch.testing.assert_close(logits, plain.logits)
    assert output["logits"] is logits
    for one, other in zip(gradients(output.loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # transformers' loss is in float32
    nothing = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=n_items).loss
    assert nothing.isnan() if n_items is None else nothing == 0


def test_shifted_labels():
    model = make()
    ids = torch.randint(V, (2, 9))
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    for mode in (True, False):
        model.train(mode)
        expected = model(ids, labels=ids).loss
        torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)
        other = model(ids, labels=ids, shift_labels=shifted.roll(1, 1)).loss
        assert not torch.allclose(other, expected)


def test_tokens_and_answers_are_marked():
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    tokens = make("sas-p", SkiplessForTokenClassification, num_labels=3)
    labels = torch.randint(3, (2, 9)) * mask - 100 * (1 - mask)
    output = tokens(ids, mask, labels=labels)
    assert output.logits.shape == (2, 9, 3)
    expected = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)
    answers = make("sas-p", SkiplessForQuestionAnswering)
    output = answers(ids, mask, start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([4, 3]))
    assert output.start_logits.shape == output.end_logits.shape == (2, 9)
    expected = F.cross_entropy(output.start_logits, torch.tensor([1, 2]))
    expected = (expected + F.cross_entropy(output.end_logits, torch.tensor([4, 3]))) / 2
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("kind", HEADS)
def test_states_and_matrices_of_every_model(kind):
    model = make("sas", kind)
    ids = torch.randint(V, (2, 9))
    output = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert [matrix.shape for matrix in output.attentions] == [(2, 3, 9, 9)] * 2
    torch.testing.assert_close(output.hidden_states[-1], model.base_model(ids).last_hidden_state)


@pytest.mark.parametrize("kind", [SkiplessModel, *HEADS])
@pytest.mark.parametrize("asked", ["by argument", "by configuration"])
def test_a_tuple_is_the_output_in_its_order(kind, asked):
    model = make("sas", kind)
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    how = {"output_hidden_states": True, "output_attentions": True, "attention_mask": mask}
    if kind in HEADS:
        labels = {SkiplessForSequenceClassification: ids[:, 0] % 2, SkiplessForTokenClassification: ids % 2}
        how["labels"] = labels.get(kind, ids)
    if kind is SkiplessForQuestionAnswering:
        how["start_positions"] = how["end_positions"] = how.pop("labels")[:, 0] % 9
    output = model(ids, **how)
    if asked == "by argument":
        found = model(ids, **how, return_dict=False)
    else:
        model.config.return_dict = False
        found = model(ids, **how)
    assert isinstance(found, tuple)
    names = [name for name in output if name != "past_key_values"]
    assert names[-2:] == ["hidden_states", "attentions"]
    values = [value for value in found if isinstance(value, torch.Tensor | tuple)]
    torch.testing.assert_close(values, [output[name] for name in names])


# ------------------------------------------------------------------------------------ weights


def test_weights_of_another_shape(tmp_path):
    """They are refused, or made anew where that is asked for; everything else is as it was saved."""
    model = make("sas-p", SkiplessForSequenceClassification, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    more, smaller = {"ignore_mismatched_sizes": True}, SkiplessConfig.from_pretrained(tmp_path, vocab_size=10)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=7)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModel.from_pretrained(tmp_path, config=smaller)
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=7, **more)
    ids = torch.randint(10, (2, 9))
    assert opened(ids).logits.shape == (2, 7)
    assert 0.005 < opened.classifier.weight.std() < 0.04
    torch.testing.assert_close(opened.base_model(ids), model.base_model(ids))
    bare = AutoModel.from_pretrained(tmp_path, config=smaller, **more)
    assert bare.embedding.weight.shape == (10, 24)
    kept = [name for name in bare.state_dict() if name != "embedding.weight"]
    assert all(torch.equal(bare.state_dict()[name], model.base_model.state_dict()[name]) for name in kept)
    assert bare(ids).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_nothing_is_initialised_twice(kind, tied):
    model = make("sas", kind, dtype=torch.float32, tie_embeddings=tied)
    model.resize_token_embeddings(V + 3)
    for one in (model, copy.deepcopy(model)):
        before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        one.post_init()
        after = one.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", [SkiplessForCausalLM, SkiplessForSequenceClassification])
def test_weights_by_their_earlier_names(kind, tmp_path):
    """An untied head and a classifier had other names before; opened and saved again, they have those of today."""
    model = make("sas", kind, dtype=torch.float32, tie_embeddings=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    of_head = {"lm_head.weight": "model.head.weight"} | {
        f"{part}.{name}": f"model.{part}.{name}" for part in ("pooler", "classifier") for name in ("weight", "bias")
    }
    earlier = {of_head.get(name, name): tensor for name, tensor in tensors.items()}
    assert earlier.keys() != tensors.keys()
    save_file(earlier, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(V, (2, 7))
    opened, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(opened(ids).logits, model(ids).logits)
    by_hand = kind(model.config).eval()
    by_hand.load_state_dict(earlier)
    torch.testing.assert_close(by_hand(ids).logits, model(ids).logits)
    torch.testing.assert_close(skipless.load(tmp_path)(ids), model(ids).logits)
    opened.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
    torch.testing.assert_close(skipless.load(tmp_path)(ids), model(ids).logits)


def test_an_export_of_the_first_version_opens_as_every_model(tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(Path(__file__).parents[2] / "fixtures" / "v0_1_0" / "export", folder)
    library = skipless.load(folder)
    ids = torch.randint(library.config.vocab_size, (1, 6))
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, library(ids))
    bare = AutoModel.from_pretrained(folder)
    assert bare.causal
    torch.testing.assert_close(bare(ids).last_hidden_state, library.hidden(ids))


def test_back_to_the_library():
    """With the same modules: the caches that halve memory, folding, and what the library's commands take."""
    for tied in (True, False):
        model = make(tie_embeddings=tied)
        library = unwrap(model)
        ids = torch.randint(V, (1, 6))
        cache = library.new_cache(1, mode="x")
        with torch.no_grad():
            torch.testing.assert_close(library(ids, cache=cache), model(ids).logits)
        assert library.blocks is model.model.blocks
    with pytest.raises(ValueError, match="has no counterpart in the library"):
        unwrap(make(kind=SkiplessForTokenClassification))
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="merge it first"):
        unwrap(model)


# ------------------------------------------------------------------------------ configuration


def test_names_that_transformers_asks_for():
    config = make().base_model.config
    assert config is make().config or isinstance(config, SkiplessConfig)
    found = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert found == (2, 24, 3, 3)
    assert (config.head_dim, config.intermediate_size, config.max_position_embeddings) == (8, 96, 48)


def test_eager_is_the_explicit_form_and_others_are_refused():
    fast = make("sas", positions="rotary")
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    expected = fast(ids, mask).logits
    assert fast.config._attn_implementation == "sdpa"
    fast.set_attn_implementation("eager")
    calls = []
    mixing = type(fast.model.blocks[0].attention.mixing)
    original = mixing.matrix
    try:
        mixing.matrix = lambda *given: calls.append(1) or original(*given)
        torch.testing.assert_close(fast(ids, mask).logits[mask.bool()], expected[mask.bool()])
    finally:
        mixing.matrix = original
    assert len(calls) == 2
    for name in ("flex_attention", "flash_attention_2", "made_up"):
        with pytest.raises((ValueError, ImportError), match=r"not support|not supported"):
            SkiplessForCausalLM._from_config(SkiplessConfig(**SIZE), attn_implementation=name)
    fast.config._attn_implementation_internal = "vllm"  # as a server sets it
    with pytest.raises(ValueError, match="'vllm' gives A·V alone"):
        fast(ids)


def test_a_model_that_reads_has_no_cache():
    with pytest.raises(ValueError, match="nothing to cache"):
        make(kind=SkiplessForMaskedLM).base_model(torch.randint(V, (1, 4)), past_key_values=DynamicCache())


def test_a_classifier_of_an_export_says_how_it_was_trained(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("skipless.interop.hf.modeling.logger.warning", warnings.append)
    make().base_model.save_pretrained(tmp_path)
    AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert "opens the weights of a SkiplessModel" in warnings.pop()
