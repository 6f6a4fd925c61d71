"""Writing text with a causal model: a cache, several prompts at once, and the usual ways to pick a token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from skipless.config.model import ModelConfig
from skipless.errors import UserError

PREFILL = 512
"""Tokens of a prompt that go through the model at a time."""

NOT_FINITE = "no token can be picked: the model's logits are not finite"


class Decodes(Protocol):
    """What writes text: a `CausalLM`, or an export of one in ONNX Runtime."""

    config: ModelConfig
    tokenizer: Any
    training: bool

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, mode: str = "auto") -> Any:
        """Memory for decoding, with a `length`, a `device` and `reset()`."""
        ...

    def next_logits(self, ids: Tensor, cache: Any, attention_mask: Tensor | None = None) -> Tensor:
        """The logits of what follows new tokens: (B, t) → (B, V)."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As of a module."""
        ...

    def eval(self) -> Any:
        """As of a module."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked."""

    temperature: float = 1.0
    """0 takes the likeliest."""
    top_k: int | None = None
    """Draw from the k likeliest."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that were there before become less likely."""
    seed: int = 0
    """Row r of a batch draws with seed + r, whatever else is in the batch."""
    stop_ids: tuple[int, ...] = ()
    """A row ends behind one of these."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must not be negative, got {self.temperature:g}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p:g}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError(f"repetition_penalty must be above 0, got {self.repetition_penalty:g}")

    def pick(self, logits: Tensor, before: Sequence[int], generator: torch.Generator) -> int:
        """One token from (V,) logits; `before` are the tokens so far."""
        if self.repetition_penalty != 1:
            logits = penalised(logits, before, self.repetition_penalty)
        if self.temperature == 0:
            likeliest = int(logits.argmax())
            if not math.isfinite(logits[likeliest]):
                raise UserError(NOT_FINITE)
            return likeliest
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.numel():
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], float("-inf"))
        if self.top_p is not None:
            logits = nucleus(logits, self.top_p)
        try:
            return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))
        except RuntimeError:  # it looks at its numbers itself
            raise UserError(NOT_FINITE) from None


def penalised(logits: Tensor, before: Sequence[int], penalty: float) -> Tensor:
    """Logits with those of earlier tokens divided by the penalty, or multiplied where they are negative."""
    seen = torch.tensor(sorted(set(before)))
    values = logits[seen]
    return logits.index_put((seen,), torch.where(values > 0, values / penalty, values * penalty))


def nucleus(logits: Tensor, share: float) -> Tensor:
    """Logits of the fewest tokens whose probabilities add up to `share`; −∞ for the others."""
    ordered, order = logits.sort(descending=True)
    probability = torch.softmax(ordered, dim=-1)
    beyond = probability.cumsum(-1) - probability >= share  # the likeliest is always kept
    return logits.masked_fill(beyond.scatter(0, order, beyond), float("-inf"))


@torch.inference_mode()
def generate(
    model: Decodes,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    sampling: Sampling | None = None,
    *,
    mode: str = "auto",
    when_full: Literal["slide", "end"] = "slide",
) -> Iterator[list[int | None]]:
    """The next token of every prompt, again and again, up to `n_new` times; None for a row that has ended.

    When the context is full, `end` stops, and `slide` forgets the older half: the newer one is read again as a prompt,
    so that a token always sees at least half a context.
    """
    sampling = sampling or Sampling()
    if not prompts or any(not prompt for prompt in prompts):
        raise UserError("a prompt is empty: a causal model needs at least one token to continue from")
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(texts))]
    limit = model.config.max_seq_len
    cache = model.new_cache(len(texts), mode=mode)
    logits = _read(model, cache, [text[-limit:] for text in texts])
    for number in range(n_new):
        logits = logits.float().cpu()  # (B, V)
        new: list[int | None] = []
        for row, text in enumerate(texts):
            token = None if ended[row] else sampling.pick(logits[row], text, generators[row])
            new.append(token)
            text.append(text[-1] if token is None else token)
            ended[row] = ended[row] or token in sampling.stop_ids
        yield new
        if all(ended) or number == n_new - 1:
            return
        if cache.length < limit:
            ids = torch.tensor([[text[-1]] for text in texts], device=cache.device)
            logits = model.next_logits(ids, cache)
        elif when_full == "end":
            return
        else:
            cache.reset()
            logits = _read(model, cache, [text[-max(limit // 2, 1) :] for text in texts])


def _read(model: Decodes, cache: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Put prompts of any lengths into an empty cache, a chunk at a time; the logits of what follows, (B, V)."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts], device=cache.device)
    padding = None
    if any(len(text) < longest for text in texts):
        padding = torch.tensor([[False] * (longest - len(text)) + [True] * len(text) for text in texts])
        padding = padding.to(cache.device)
    # the padding has to lie inside the first chunk
    first = longest if padding is not None else PREFILL
    logits = model.next_logits(ids[:, :first], cache, padding)
    for start in range(first, longest, PREFILL):
        logits = model.next_logits(ids[:, start : start + PREFILL], cache)
    return logits


def _tokenizer_of(model: Decodes) -> Any:
    if model.tokenizer is None:
        raise UserError(
            "this model has no tokeniser, so it cannot read text: put its tokenizer.json beside it, set "
            "`model.tokenizer`, or give (batch, tokens) ids"
        )
    return model.tokenizer


def stream_text(
    model: Decodes, prompt: str, n_new: int, sampling: Sampling | None = None, *, mode: str = "auto"
) -> Iterator[str]:
    """What the model adds to a prompt, a piece for each token, by the model's own tokeniser, up to the end of text."""
    tokenizer = _tokenizer_of(model)
    ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    sampling = sampling or Sampling()
    sampling = replace(sampling, stop_ids=(*sampling.stop_ids, tokenizer.end_id))
    new: list[int] = []
    written = ""
    was_training = model.training
    model.eval()
    try:
        for (token,) in generate(model, [ids], n_new, sampling, mode=mode):
            assert token is not None
            new.append(token)
            text = tokenizer.decode(new)
            # a character may be spread over several tokens; until it is whole it decodes to a replacement mark
            whole = not text.endswith("\ufffd") or len(new) == n_new
            yield text[len(written) :] if whole else ""
            written = text if whole else written
    finally:
        model.train(was_training)


def continue_prompts(model: Decodes, prompt: Any, n_new: int, sampling: Sampling, *, mode: str = "auto") -> Any:
    """What `CausalLM.generate` returns: texts for texts, and for (B, T) ids the ids with the new ones behind them."""
    if isinstance(prompt, Tensor):
        if prompt.ndim != 2:
            raise UserError(f"a prompt of ids is (batch, tokens), got {tuple(prompt.shape)}")
        steps = list(generate(model, prompt.tolist(), n_new, sampling, mode=mode))
        fill = sampling.stop_ids[0] if sampling.stop_ids else 0  # behind the end of a row that ended before the others
        written = torch.tensor([[fill if token is None else token for token in step] for step in steps])
        return torch.cat([prompt, written.T.to(prompt)], dim=1)
    tokenizer, prompts = _tokenizer_of(model), [prompt] if isinstance(prompt, str) else list(prompt)
    sampling = replace(sampling, stop_ids=(*sampling.stop_ids, tokenizer.end_id))
    ids = [tokenizer.encode(text) or [tokenizer.end_id] for text in prompts]
    new: list[list[int]] = [[] for _ in ids]
    for step in generate(model, ids, n_new, sampling, mode=mode):
        for row, token in zip(new, step, strict=True):
            row.extend([] if token is None else [token])
    texts = [text + tokenizer.decode(row) for text, row in zip(prompts, new, strict=True)]
    return texts[0] if isinstance(prompt, str) else texts


def sample_text(model: Decodes, prompt: str, n_new: int, sampling: Sampling | None = None) -> str:
    """The prompt and what the model adds to it."""
    return prompt + "".join(stream_text(model, prompt, n_new, sampling))
