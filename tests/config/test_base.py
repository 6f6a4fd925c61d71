"""Configurations held against each other."""

import pytest

from skipless import BLOCKS, ModelConfig, TrainConfig
from skipless.config import differences


def test_differences_have_both_values():
    old = TrainConfig(lr=0.5)
    assert differences(old, old) == {}
    assert differences(old, old.replace(lr=0.25, clip=None)) == {"lr": (0.5, 0.25), "clip": (1.0, None)}


@pytest.mark.parametrize("turned", [False, True])
def test_a_part_that_only_one_of_them_has_is_a_difference(turned):
    with_it, without = ModelConfig(block="sas"), ModelConfig(block=BLOCKS["sas"].replace(first_value=None))
    found = differences(without, with_it) if turned else differences(with_it, without)
    pair = ("reparam", None)
    assert found["block.first_value.kind"] == (pair[::-1] if turned else pair)
