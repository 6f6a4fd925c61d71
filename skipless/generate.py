"""Sampling text from a causal model."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.errors import UserError
from skipless.nn.model import CausalLM


@torch.no_grad()
def sample_tokens(
    model: CausalLM,
    ids: list[int],
    n_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """New tokens after a prompt, one at a time; 0 as temperature takes the likeliest.

    The model sees the last `max_seq_len` tokens. Randomness comes from the seed alone.
    """
    if not ids:
        raise UserError("the prompt is empty: a causal model needs at least one token to go on from")
    if temperature < 0:
        raise UserError(f"temperature must not be negative, got {temperature:g}")
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    context = list(ids)
    for _ in range(n_new):
        window = torch.tensor([context[-model.config.max_seq_len :]], device=device)
        hidden = model.hidden(window)[:, -1]  # (1, d): the head is needed at the last position only
        token = pick(F.linear(hidden, model.head_weight)[0].float().cpu(), temperature, top_k, generator)
        yield token
        if token == stop_id:
            return
        context.append(token)


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from (V,) logits."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        kept = logits.topk(top_k)
        return int(kept.indices[_draw(kept.values / temperature, generator)])
    return _draw(logits / temperature, generator)


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))


def stream_text(model: CausalLM, prompt: str, n_new: int, **how: Any) -> Iterator[str]:
    """What the model adds to a prompt, piece by piece, by the model's own tokeniser, up to the end-of-text token."""
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    new: list[int] = []
    written = ""
    was_training = model.training
    model.eval()
    try:
        for token in sample_tokens(model, ids, n_new, stop_id=tokenizer.end_id, **how):
            new.append(token)
            text = tokenizer.decode(new)
            # a character may be spread over several tokens; until it is whole it decodes to a replacement mark
            if not text.endswith("\ufffd"):
                yield text[len(written) :]
                written = text
    finally:
        model.train(was_training)
    yield tokenizer.decode(new)[len(written) :]


def sample_text(model: CausalLM, prompt: str, n_new: int, **how: Any) -> str:
    """The prompt and what the model adds to it."""
    return prompt + "".join(stream_text(model, prompt, n_new, **how))
