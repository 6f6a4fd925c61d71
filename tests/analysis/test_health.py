"""Signs of trouble by hand; where a model first is not finite, and for which of its inputs."""

import pytest
import torch

from skipless import BLOCKS, Mask, MaskedLM, ModelConfig
from skipless.analysis.health import entropy, first_nonfinite, kurtosis, max_median_ratio, neuron_kurtosis


def encoder(block="sas-p-nonorm", **more):
    shape = {"n_layer": 4, "d_model": 16, "n_head": 2, "vocab_size": 20, "max_seq_len": 8, **more}
    return MaskedLM(ModelConfig(block=BLOCKS[block].replace(mlp="glu", activation="gelu"), **shape)).eval()


def by_hand(model, ids):
    """The same, a sequence and a block at a time."""
    found, mask = {}, Mask(causal=False)
    for row, one in enumerate(ids):
        x = model.embed(one[None]) + model.positions(torch.arange(len(one))[None], torch.float32)
        for number, block in enumerate(model.blocks):
            x = block(x, mask)
            if row not in found and not x.isfinite().all():
                found[row] = f"layer {number + 1}"
    return found


def test_a_gated_mlp_without_norms_squares_what_is_large():
    """Each layer squares, so a token of 1e6 overflows in a few layers, and only where it stands in the sequence."""
    model = encoder(embedding_norm=False, n_layer=10)
    ids = torch.randint(2, 20, (6, 8))
    ids[2, 3], ids[4, 0], ids[5, 7] = 0, 1, 0
    with torch.no_grad():
        model.embedding.weight[0], model.embedding.weight[1] = 1e6, 1e12
        model.embedding.weight[:2] *= torch.randn(16).sign()
    found = first_nonfinite(model, ids)
    assert found == by_hand(model, ids)
    assert sorted(found) == [2, 4, 5]
    assert next(iter(found)) == 4  # the larger one overflows in an earlier layer
    assert int(found[4].split()[1]) < int(found[2].split()[1])


def test_a_finite_batch_has_none_and_no_hook_is_left():
    model = encoder()
    assert first_nonfinite(model, torch.randint(20, (3, 8))) == {}
    assert not any(block._forward_hooks for block in model.blocks)


@pytest.mark.parametrize("block", ["sas-p-nonorm", "pre-ln", "post-ln"])
def test_a_broken_layer_is_named_for_all(block):
    model = encoder(block)
    with torch.no_grad():
        model.blocks[2].mlp.down.weight[0, 0] = float("nan")
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, 5:] = False
    assert first_nonfinite(model, torch.randint(20, (3, 8)), mask) == dict.fromkeys(range(3), "layer 3")


def test_the_embedding_comes_first():
    model = encoder("sas")
    with torch.no_grad():
        model.embedding.weight[7] = float("inf")
    ids = torch.tensor([[1, 2, 3], [1, 7, 3]])
    assert first_nonfinite(model, ids) == {1: "the embedding"}


# ---------------------------------------------------------------------------- signs of trouble


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_kurtosis_is_of_shape_not_of_size(size):
    torch.manual_seed(0)
    assert kurtosis(size * torch.randn(2, 50, 4000)) == pytest.approx(3, abs=0.1)
    one = torch.zeros(2, 5, 16)
    one[..., 3] = size
    assert kurtosis(one) == pytest.approx(16)
    assert kurtosis(size * torch.ones(2, 5, 16)) == pytest.approx(1)


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_neuron_kurtosis_is_of_dimensions_that_are_large_for_every_token(size):
    same = torch.zeros(2, 5, 16)
    same[..., 3] = size
    assert neuron_kurtosis(same) == pytest.approx(16)
    turning = size * torch.eye(16)[None]  # as large, but for each token another dimension
    assert neuron_kurtosis(turning) == pytest.approx(1)


def test_the_largest_is_held_against_the_median():
    x = torch.tensor([[[1.0, -2.0, 3.0, -4.0, 50.0], [2.0, 2.0, 2.0, 2.0, 2.0]]])
    assert max_median_ratio(x) == pytest.approx((50 / 3 + 1) / 2)


def test_entropy_is_that_of_what_a_query_looks_at():
    """Every query looks at the first of eight keys: no entropy, though that key is looked at by all."""
    one_key = torch.zeros(1, 2, 4, 8)
    one_key[..., 0] = 1
    assert entropy(one_key) == 0
    assert entropy(torch.full((1, 2, 4, 8), 1 / 8)) == pytest.approx(torch.tensor(8.0).log().item())
    half = torch.zeros(1, 1, 2, 8)
    half[..., 0, 0], half[..., 1, :2] = 1, 0.5
    assert entropy(half) == pytest.approx(torch.tensor(2.0).log().item() / 2)
