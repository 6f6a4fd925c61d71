"""Our pre-ln against the GPT-2 of transformers, which no one here wrote: logits and gradients."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from skipless.interop.gpt2 import gpt2, gpt2_config, gpt2_tensors

SIZE = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}


def make(dtype, **changes):
    """A GPT-2 with random weights by its own code, then disturbed so that norms and biases are not 1 and 0."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**{**SIZE, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


CASES = [
    {},
    {"activation_function": "relu", "n_inner": 40, "layer_norm_epsilon": 1e-3},
    {"tie_word_embeddings": False, "activation_function": "gelu"},
]


@pytest.mark.parametrize("changes", CASES, ids=["plain", "relu", "untied"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_logits_and_gradients_are_gpt2s(dtype, tolerance, changes):
    theirs = make(dtype, **changes)
    ours = gpt2(theirs)
    ids, target = torch.randint(SIZE["vocab_size"], (2, 3, 20))
    expected, found = theirs(ids).logits, ours(ids)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for logits in (expected, found):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mapped = gpt2_tensors(gradients, ours.config)
    assert set(mapped) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, mapped[name], rtol=tolerance, atol=tolerance)


def test_padding_on_the_left_is_gpt2s():
    theirs = make(torch.float64)
    ours = gpt2(theirs)
    ids, mask = torch.randint(SIZE["vocab_size"], (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(ours(ids, mask)[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)


def test_the_copy_is_its_own():
    theirs = make(torch.float32)
    ours = gpt2(theirs)
    with torch.no_grad():
        ours.embedding.weight.zero_()
    assert theirs.transformer.wte.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "tanh"}, "'tanh' is not one of gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "1/√D"),
        ({"scale_attn_weights": False}, "1/√D"),
        ({"add_cross_attention": True}, "cross-attention"),
    ],
)
def test_what_has_no_counterpart_says_so(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt2_config(GPT2Config(**SIZE, **changes))
