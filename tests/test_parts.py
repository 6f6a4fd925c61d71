"""Parts of one's own: the examples' are held to what ours are, and what is wrong with one is said in a line."""

from pathlib import Path

import pytest

from skipless.config.plugins import load_plugin
from skipless.testing import PROPERTIES, check

EXAMPLES = Path(__file__).parent.parent / "examples"
BLOCKS = {
    "dynamic_tanh": "pre-ln-dyt",
    "contrast_mixing": "pre-ln-contrast",
    "bilinear_mlp": "pre-ln-bilinear",
}
ALL = "sas-p:norm=dyt,mixing=contrast,mlp=bilinear"


@pytest.fixture(autouse=True)
def _plugins():
    for name in BLOCKS:
        load_plugin(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("block", [*BLOCKS.values(), ALL])
def test_the_examples_have_every_property(block, name):
    check(block, name)


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("block", ["pre-ln", "sas-p"])
def test_so_have_our_own(block, name):
    check(block, name)
