"""Gradients: the same when layers are run again to save memory, and there for all that can be seen of a pass."""

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from skipless import BLOCKS
from skipless.interop.hf import (
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForQuestionAnswering,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
)
from tests.interop.hf.small import V, make

KINDS = [
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessForQuestionAnswering,
]


def batch(kind):
    """Token ids, with padding, and labels of the model's task."""
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind is SkiplessForQuestionAnswering:
        return inputs | {"start_positions": torch.tensor([4, 5]), "end_positions": torch.tensor([6, 8])}
    labels = {SkiplessForSequenceClassification: torch.tensor([1, 0]), SkiplessForTokenClassification: ids % 2}
    return inputs | {"labels": labels.get(kind, ids)}


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_gradient_checkpointing_gives_the_same_gradients(block, kind, reentrant):
    model, inputs = make(block, kind, dropout=0.1).train(), batch(kind)
    passes = []
    for part in model.model.blocks:
        part.attention.register_forward_hook(lambda *_: passes.append(1))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert len(layers) == 2

    def gradients():
        passes.clear()
        model.zero_grad()
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], len(passes)

    assert not model.is_gradient_checkpointing
    expected, once = gradients()
    how = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model.gradient_checkpointing_enable(**how)
    assert model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in layers)
    found, twice = gradients()
    assert (once, twice) == (2, 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        model.eval()(**inputs)
    model.train().gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in layers)
    assert gradients()[1] == 2


@pytest.mark.parametrize("block", BLOCKS)
def test_checkpointing_with_a_cache_is_refused(block):
    model = make(block).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(V, (1, 4))
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="would fill a cache twice"):
        model(ids, past_key_values=DynamicCache())
    with torch.no_grad():
        assert model.eval()(ids).past_key_values.get_seq_length() == 4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_matrices_have_gradients(kind, training):
    """They are the tensors that the output is made of, not copies."""
    model = make("sas", kind).train(training)
    output = model(**batch(kind), output_hidden_states=True, output_attentions=True)
    seen = [*output.hidden_states, *output.attentions]
    for tensor in seen:
        tensor.retain_grad()
    output.loss.backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in seen)


def test_the_gradient_of_a_matrix_is_that_of_the_loss():
    """Against a finite difference: what is shown is what the values were multiplied with."""
    model = make("sas")
    inputs = batch(SkiplessForCausalLM)
    output = model(**inputs, output_attentions=True)
    (matrix,) = output.attentions[-1:]
    (gradient,) = torch.autograd.grad(output.loss, matrix)
    mixing, step = model.model.blocks[-1].attention.mixing, 1e-4
    original, losses = type(mixing).matrix, []
    direction = torch.randn_like(matrix)
    for sign in (1, -1):
        mixing.matrix = lambda *given, sign=sign: original(mixing, *given) + sign * step * direction
        losses.append(model(**inputs, output_attentions=True).loss.double())
    slope = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=2e-2, atol=1e-4)
