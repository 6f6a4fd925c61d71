"""Where a model first is not finite, and for which of its inputs."""

import pytest
import torch

from skipless import BLOCKS, Mask, MaskedLM, ModelConfig
from skipless.health import first_nonfinite


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
