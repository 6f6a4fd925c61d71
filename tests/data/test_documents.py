"""Which part of a corpus a document belongs to."""

import pytest

from skipless.data.documents import _document, split_of

TEXTS = [_document(f"text number {number}") for number in range(4000)]


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.2, 0.9, 1.0])
def test_the_held_out_part_is_as_large_as_asked_for(fraction):
    held_out = sum(split_of(document, fraction) == "valid" for document in TEXTS)
    assert abs(held_out - fraction * 4000) <= 4 * (4000 * fraction * (1 - fraction)) ** 0.5


def test_a_larger_held_out_part_has_the_smaller_one_in_it():
    small, large = ({d.text for d in TEXTS if split_of(d, fraction) == "valid"} for fraction in (0.1, 0.3))
    assert small < large
