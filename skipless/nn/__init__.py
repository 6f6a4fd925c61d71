"""The paper's equations in PyTorch. Read `blocks.py` first, then `attention.py`, `mask.py`, `layers.py`, `model.py`."""

from skipless.nn.attention import Attention, explicit_form
from skipless.nn.blocks import ParallelBlock, SequentialBlock, make_block
from skipless.nn.mask import Mask
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier, Transformer, init_weights

__all__ = [
    "Attention",
    "CausalLM",
    "Mask",
    "MaskedLM",
    "ParallelBlock",
    "SequenceClassifier",
    "SequentialBlock",
    "Transformer",
    "explicit_form",
    "init_weights",
    "make_block",
]
