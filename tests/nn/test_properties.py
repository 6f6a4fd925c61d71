"""What must hold whatever the weights: identity at the start, no look ahead, padding and packing change nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless import CausalLM, MaskedLM, ModelConfig, SequenceClassifier
from skipless.nn import Attention, Mask
from skipless.nn.masks import alibi_slopes
from tests.helpers.variants import VARIANTS
from tests.helpers.weights import disturbed

POSITIONS = ["sinusoidal", "scaled-sinusoidal", "learned", "alibi", "rotary"]
V, T = 50, 24


def model(kind, block, positions="sinusoidal", **more):
    cfg = ModelConfig(block=block, n_layer=3, d_model=16, n_head=4, vocab_size=V, max_seq_len=64, positions=positions)
    return disturbed(kind(cfg, **more)).double().eval()


@pytest.mark.parametrize("block", ["sas", "sas-p", "sas-p-nonorm", "shared-gains", "qk-norm", "fig3-identity-0.2"])
@pytest.mark.parametrize("causal", [True, False])
def test_skipless_attention_starts_as_the_identity(block, causal):
    """Exactly: with W^Q = 0 the matrices A and C are equal, and α = β = γ = 1."""
    cfg = ModelConfig(block=VARIANTS[block], n_layer=2, d_model=16, n_head=4)
    whole = CausalLM(cfg).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    for layer in whole.blocks:
        for mask in (
            Mask(causal),
            Mask(causal, alibi=alibi_slopes(4)),
            Mask(causal, documents=torch.arange(9)[None] // 4),
        ):
            torch.testing.assert_close(layer.attention(x, mask), x, rtol=0, atol=1e-14)
            eye = torch.eye(9, dtype=torch.float64).expand(2, 4, 9, 9)
            torch.testing.assert_close(layer.attention.matrix(x, mask), eye, rtol=0, atol=1e-14)


def test_v_skipinit_attention_starts_as_an_orthogonal_map():
    attention = CausalLM(ModelConfig(block="v-skipinit", n_layer=1, d_model=16)).double().blocks[0].attention
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(attention(x, Mask(True)).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tie", ["tied-last", "tied-all", "vp-lr-tied-last", "vp-lr-tied-all"])
def test_tied_projections_undo_the_values(tie):
    """W^V W^P is the identity: of every layer (all-tied), or of all layers together (last-layer-tied)."""
    whole = CausalLM(ModelConfig(block=VARIANTS[tie], n_layer=4, d_model=16)).double()
    x = total = torch.randn(3, 16, dtype=torch.float64)
    for layer in whole.blocks:
        once = layer.attention.projection(layer.attention.value(x))
        assert torch.allclose(once, x, atol=1e-6) == ("all" in tie)
        total = layer.attention.projection(layer.attention.value(total))
    torch.testing.assert_close(total, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_no_token_sees_the_future(name, positions):
    lm = model(CausalLM, VARIANTS[name], positions)
    ids = torch.randint(V, (2, T))
    changed = ids.clone()
    changed[:, T // 2 :] = torch.randint(V, (2, T - T // 2))
    before, after = lm(ids), lm(changed)
    assert torch.equal(before[:, : T // 2], after[:, : T // 2])
    assert not torch.allclose(before[:, T // 2 :], after[:, T // 2 :])


@settings(max_examples=30)
@given(
    left=st.integers(0, 6),
    right=st.integers(0, 6),
    length=st.integers(1, 20),
    kind=st.sampled_from([CausalLM, MaskedLM]),
    block=st.sampled_from(["pre-ln", "post-ln", "v-skipinit", "sas", "sas-p", "sas-p-nonorm"]),
    positions=st.sampled_from(POSITIONS),
)
def test_padding_changes_nothing_for_real_tokens(left, right, length, kind, block, positions):
    lm = model(kind, block, positions)
    ids = torch.randint(V, (1, length))
    padded = torch.cat([torch.randint(V, (1, left)), ids, torch.randint(V, (1, right))], dim=1)
    real = torch.zeros_like(padded)
    real[:, left : left + length] = 1
    # beside a row without padding, so that the mask differs between rows
    both = torch.cat([padded, torch.randint(V, padded.shape)])
    out = lm(both, attention_mask=torch.cat([real, torch.ones_like(real)]))
    torch.testing.assert_close(out[:1, left : left + length], lm(ids), rtol=0, atol=1e-10)
    torch.testing.assert_close(out[1:], lm(both[1:]), rtol=0, atol=1e-10)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    kind=st.sampled_from([CausalLM, MaskedLM]),
    block=st.sampled_from(["pre-ln", "post-ln", "v-skipinit", "sas", "sas-p", "sas-p-nonorm"]),
    positions=st.sampled_from(POSITIONS),
)
def test_packed_documents_do_not_see_each_other(lengths, kind, block, positions):
    lm = model(kind, block, positions)
    texts = [torch.randint(V, (1, n)) for n in lengths]
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1)
    together = lm(torch.cat(texts, dim=1), documents=documents)
    apart = torch.cat([lm(text) for text in texts], dim=1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-10)


def test_a_number_that_comes_again_is_another_document():
    lm = model(CausalLM, "sas-p")
    ids = torch.randint(V, (1, 12))
    again, other = torch.tensor([[0] * 4 + [1] * 4 + [0] * 4]), torch.tensor([[7] * 4 + [3] * 4 + [9] * 4])
    assert torch.equal(lm(ids, documents=again), lm(ids, documents=other))


def test_packed_and_padded_at_once():
    lm = model(CausalLM, "sas-p")
    a, b = torch.randint(V, (1, 5)), torch.randint(V, (1, 7))
    ids = torch.cat([a, b, torch.randint(V, (1, 3))], dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 7 + [2] * 3])
    out = lm(ids, attention_mask=documents < 2, documents=documents)
    torch.testing.assert_close(out[:, :12], torch.cat([lm(a), lm(b)], dim=1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("labels", [1, 3])
def test_classifier_ignores_padding(labels):
    classifier = model(SequenceClassifier, "sas", num_labels=labels)
    ids = torch.randint(V, (2, 8))
    padded = torch.cat([ids, torch.randint(V, (2, 5))], dim=1)
    real = torch.arange(13)[None].expand(2, -1) < 8
    out = classifier(padded, attention_mask=real)
    assert out.shape == (2, labels)
    torch.testing.assert_close(out, classifier(ids), rtol=0, atol=1e-10)
    loss = classifier.loss(padded, torch.tensor([0, labels - 1]), attention_mask=real)
    assert loss.isfinite()


def test_masked_loss_is_the_full_loss_on_masked_positions():
    """Also across the chunks in which the loss is computed, and for the gradients."""
    cfg = ModelConfig(block="sas", n_layer=1, d_model=16, n_head=4, vocab_size=V, max_seq_len=400)
    lm = disturbed(MaskedLM(cfg)).double()
    ids, labels = torch.randint(V, (2, 3, 400))
    labels[torch.rand(3, 400) < 0.5] = -100
    assert (labels != -100).sum() > 256
    full = torch.nn.functional.cross_entropy(lm(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    few = lm.loss(ids, labels)
    torch.testing.assert_close(few, full, rtol=1e-12, atol=0)
    for a, b in zip(*(torch.autograd.grad(loss, list(lm.parameters())) for loss in (few, full)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_causal_loss_is_the_cross_entropy_of_the_logits(tied):
    cfg = ModelConfig(block="sas-p", n_layer=1, d_model=16, vocab_size=V, max_seq_len=400, tie_embeddings=tied)
    lm = disturbed(CausalLM(cfg)).double()
    ids, labels = torch.randint(V, (2, 2, 300))
    labels[:, :7] = -100
    full = torch.nn.functional.cross_entropy(lm(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(lm.loss(ids, labels), full, rtol=1e-12, atol=0)


def test_dropout_only_while_training():
    cfg = ModelConfig(block="sas", n_layer=2, d_model=16, n_head=4, vocab_size=V, dropout=0.5)
    lm, ids = CausalLM(cfg), torch.randint(V, (2, 8))
    lm.eval()
    assert torch.equal(lm(ids), lm(ids))
    lm.train()
    assert not torch.equal(lm(ids), lm(ids))


def test_running_mean_is_summed_in_float32():
    """In bfloat16 neither the sums nor the counts beyond 256 are exact, and a mean of threes would not be three."""
    threes = torch.full((1, 1, 2048, 1), 3.0, dtype=torch.bfloat16)
    assert torch.equal(Mask(True).mean(threes), threes)


def test_alibi_slopes_are_those_of_its_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == alibi_slopes(8).tolist()
    assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_an_identity_map_is_no_module():
    attention = CausalLM(ModelConfig(block="sas", n_layer=2, d_model=16)).blocks[1].attention
    assert isinstance(attention, Attention)
    names = {name.split(".")[0] for name, _ in attention.named_parameters()}
    assert names == {"query", "key", "mixing"}
