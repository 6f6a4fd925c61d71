"""The paper's equations in PyTorch. Read `blocks.py` first, then `attention.py`, `mixing.py`, `masks.py`."""

from skipless.nn.attention import Attention
from skipless.nn.blocks import ParallelBlock, SequentialBlock, make_block
from skipless.nn.init import init_weights
from skipless.nn.masks import Mask
from skipless.nn.mixing import explicit_form
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier, Transformer

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
