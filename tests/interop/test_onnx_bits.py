"""Matrices at low bits: the layout, and an error no larger than llama.cpp's formats have."""

import numpy as np
import pytest
import torch

from skipless.interop.onnx_bits import REACHES, pack, relative_error, unpack
from skipless.interop.onnx_options import OnnxOptions


def q8_0(w):
    """What llama.cpp's Q8_0 makes of a matrix: blocks of 32, a scale in float16."""
    blocks = w.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).round() * scale.half().float()).flatten(1)


def q4_0(w):
    """The same of Q4_0: the largest weight is −8."""
    blocks = w.unflatten(1, (-1, 32))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    q = (blocks / scale + 8.5).floor().clamp(0, 15)
    return ((q - 8) * scale.half().float()).flatten(1)


MATRICES = {
    "gaussian": lambda: torch.randn(256, 768) * 0.02,
    "heavy tails": lambda: torch.distributions.StudentT(4.0).sample((256, 768)) * 0.02,
    "rows of different size": lambda: torch.randn(256, 768) * torch.logspace(-3, 0, 256)[:, None],
    "shifted": lambda: torch.randn(256, 768) + 0.5,
}


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(("bits", "theirs"), [(8, q8_0), (4, q4_0)])
def test_the_error_is_not_larger_than_llama_cpps(bits, theirs, matrix):
    torch.manual_seed(0)
    w = MATRICES[matrix]()
    options = OnnxOptions(bits=bits)
    own = relative_error(w, pack(w, bits, options.block, symmetric=options.symmetric))
    assert 0 < own <= float((theirs(w) - w).norm() / w.norm())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_fits_the_grid_is_exact(bits, symmetric):
    """Integers times a scale come back as they were, the last block being only a part of one."""
    torch.manual_seed(0)
    q = torch.randint(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, (5, 40)).float()
    q[:, [0, 32]], q[:, [1, 33]] = (
        -float(1 << (bits - 1)),
        float((1 << (bits - 1)) - 1),
    )  # the whole range in each block
    w = q * 0.25
    packed = pack(w, bits, 32, symmetric=symmetric)
    np.testing.assert_allclose(packed.dense(), w.numpy(), atol=1e-6)
    assert packed.weights.shape == (5, 64 * bits // 8)
    assert packed.scales.shape == (5, 2)


def test_zeros_stay_zeros():
    assert not pack(torch.zeros(3, 64), 4, 32, symmetric=True).dense().any()
    assert not pack(torch.zeros(3, 64), 8, 32, symmetric=False).dense().any()


def test_two_of_four_bits_in_a_byte():
    assert unpack(np.array([[0x21, 0x43]], np.uint8), 4).tolist() == [[1, 2, 3, 4]]


def test_more_bits_and_smaller_blocks_are_closer():
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    errors = [
        relative_error(w, pack(w, bits, size, symmetric=True)) for bits, size in ((8, 32), (4, 16), (4, 32), (4, 128))
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.006


def test_of_the_scales_that_are_tried_the_best_is_taken_and_fitted():
    """No block is worse than with any of them, and all together are better than with the best of each."""
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    blocks = w.unflatten(1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))

    def error(made):
        return (made - blocks).square().sum(-1)

    def plain(reach):
        scale = -largest * reach / 8
        return ((blocks / scale + 8).round().clamp(0, 15) - 8) * scale

    tried = torch.stack([error(plain(reach)) for reach in REACHES[4]])
    own = error(torch.from_numpy(pack(w, 4, 32, symmetric=True).dense()).unflatten(1, (-1, 32)))
    assert (own <= tried * (1 + 1e-5)).all()
    assert own.sum() < 0.985 * tried.amin(0).sum()


def test_a_block_on_one_side_of_zero_keeps_its_spread():
    torch.manual_seed(0)
    for w in (5 + torch.rand(8, 64), -5 - torch.rand(8, 64)):
        assert relative_error(w, pack(w, 4, 32, symmetric=False)) < 0.03
