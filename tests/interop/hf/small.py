"""Small models whose weights are all of the same order, so that nothing they compute can be left out unseen."""

import torch

from skipless.interop.hf import SkiplessConfig, SkiplessForCausalLM
from tests.helpers.weights import disturbed

V = 40
SIZE = {"n_layer": 2, "d_model": 24, "n_head": 3, "vocab_size": V, "max_seq_len": 48}
POSITIONS = ["sinusoidal", "learned", "alibi", "rotary"]


def make(block="sas-p", kind=SkiplessForCausalLM, dtype=torch.float64, **changes):
    """A model in eval mode."""
    model = kind(SkiplessConfig(block=block, **{**SIZE, **changes}))
    disturbed(model.base_model, 0.2)
    if not model.config.tie_embeddings and isinstance(model, SkiplessForCausalLM):
        disturbed(model.lm_head, 0.2)
    return model.to(dtype).eval()
