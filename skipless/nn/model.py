"""Models around the blocks: `CausalLM`, `MaskedLM`, `SequenceClassifier`.

Shapes: B batch, T tokens, d width, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.nn.cache import Cache, pick_mode
from skipless.nn.init import init_weights
from skipless.nn.masks import Mask, alibi_slopes
from skipless.nn.stack import Stack, check_ids, check_length

IGNORED = -100
"""The label of a position that has no loss."""

LOSS_ROWS = 256
"""Tokens whose logits are in memory at a time: 51 MB for 50,000 words. Half as many are a few per cent slower."""


class Transformer(Stack, nn.Module):
    """Embedding, positions, blocks, norm: what the three models share."""

    causal: bool
    tokenizer: Any = None
    """How its text becomes tokens, where the model comes from a run."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.add_parts(cfg)

    def hidden(self, ids: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """What the head sees: (B, T) token ids → (B, T, d).

        `attention_mask` (B, T) is true, or 1, where a token is real; padding may stand on either side and changes
        nothing for the real tokens. (In the midst of a row as well, but for ALiBi, whose distances count it where the
        row is not reordered: in an encoder and among packed documents.) `documents` (B, T) numbers the documents packed
        into a row: they do not see each other, and positions count from each one's start.
        """
        self._check(ids)
        return self.encode(ids, as_padding(attention_mask), documents)

    def _check(self, ids: Tensor) -> None:
        check_ids(ids)
        check_length(ids.shape[1], self.config.max_seq_len)

    def fold(self) -> Self:
        """A copy for inference: same outputs, fewer operations; see `skipless.nn.kernels.folding`.

        β_FF goes into the MLP's last matrix, β_SA into the gains of the mixing or into W^P, a reparameterised map
        becomes one matrix, and maps of one input become one product. The copy no longer has the parameters of its
        configuration, so it cannot be saved as one.
        """
        from skipless.nn.kernels.folding import fold

        return fold(self)

    def save(self, path: Path | str) -> None:
        """Write a new folder with the weights, the configuration and the tokeniser, which `skipless.load` opens."""
        from skipless.nn.saving import save

        save(self, Path(path))

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)


class LanguageModel(Transformer):
    """A transformer with a head over the vocabulary."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        _finish(self)

    @property
    def head_weight(self) -> Tensor:
        """(V, d)."""
        return self.head_matrix()

    def head_matrix(self) -> Tensor:
        """The matrix of the head, or the embedding's, (V, d)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits: (B, T) → (B, T, V)."""
        return self.logits(self.hidden(ids, attention_mask, documents))

    def reads_head(self) -> bool:
        """Whether the head is a matrix and nothing else, so that nobody notices where it is read and not called."""
        from skipless.nn.kernels.predicate import are_plain_linear

        return self.head is None or are_plain_linear(self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, d) → (…, V)."""
        return F.linear(hidden, self.head_weight) if self.head is None else self.head(hidden)

    def token_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of (N, d) hidden states against (N,) labels, a chunk of logits at a time."""
        if self.reads_head():
            return token_loss(hidden, self.head_weight, labels)
        logits = self.logits(hidden).to(self.embedding.weight.dtype)  # an adapter, a bias, a hook: it is called
        return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED)

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy; `labels[t]` is the target at position t (already shifted), −100 is ignored.

        With no label that counts it is not a number, as in PyTorch.
        """
        self._check_labels(ids, labels)
        hidden = self.hidden(ids, attention_mask, documents)
        return self.token_loss(hidden.flatten(0, 1), labels.flatten())

    def _check_labels(self, ids: Tensor, labels: Tensor) -> None:
        if labels.shape != ids.shape:
            raise UserError(f"labels must have the shape of the ids, {tuple(ids.shape)}, got {tuple(labels.shape)}")


class CausalLM(LanguageModel):
    """A GPT-style decoder: each token sees itself and those before it."""

    causal = True

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits: (B, T) → (B, T, V). With a cache, the ids are new tokens that follow what it remembers."""
        if cache is None:
            return super().forward(ids, attention_mask, documents)
        if documents is not None:
            raise UserError("a cache continues one document a row; documents= cannot go with it")
        return self.logits(self.remember(ids, cache, attention_mask))

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, mode: str = "auto") -> Cache:
        """Memory for decoding `batch_size` sequences of at most `max_len` tokens; see `skipless.nn.cache` for modes."""
        cfg, weight = self.config, self.embedding.weight
        max_len = cfg.max_seq_len if max_len is None else max_len
        if not 1 <= max_len <= cfg.max_seq_len:
            raise UserError(f"max_len must lie in 1…{cfg.max_seq_len} (max_seq_len), got {max_len}")
        alibi = alibi_slopes(cfg.n_head, weight.device) if cfg.positions == "alibi" else None
        return Cache(cfg, batch_size, max_len, pick_mode(cfg, mode), weight.dtype, weight.device, alibi)

    def next_logits(self, ids: Tensor, cache: Cache, attention_mask: Tensor | None = None) -> Tensor:
        """The logits of what follows new tokens, which the cache remembers: (B, t) → (B, V)."""
        return self.logits(self.remember(ids, cache, attention_mask)[:, -1])

    @torch.no_grad()
    def remember(self, ids: Tensor, cache: Cache, attention_mask: Tensor | None = None) -> Tensor:
        """What the head sees of new tokens that follow a cache: (B, t) → (B, t, d)."""
        self._check(ids)
        padding = as_padding(attention_mask)
        Mask(True, padding).check(*ids.shape)
        positions = cache.begin(ids, padding)
        if padding is None:
            hidden = self.through(ids, positions, cache.layers)
        else:  # rows of a cache end together, so padding goes to the left
            order = padding.long().argsort(dim=-1, stable=True)
            hidden = self.through(ids.gather(1, order), positions, cache.layers)
            hidden = hidden.gather(1, order.argsort(dim=-1)[..., None].expand_as(hidden))
        cache.advance(ids.shape[1])
        return hidden

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        cache: str = "auto",
    ) -> Any:
        """Continue a text, several texts, or (B, T) ids; returns the same kind, with the continuation.

        A text ends where the model ends it. Rows of ids end at one of `stop_ids`, of which the first then fills the
        row. A temperature of 0 takes the likeliest token. The model is in eval mode meanwhile.
        """
        from skipless.nn.sampling import Sampling, continue_prompts

        how = Sampling(temperature, top_k, top_p, repetition_penalty, seed, tuple(stop_ids))
        was_training = self.training
        self.eval()
        try:
            return continue_prompts(self, prompt, max_new_tokens, how, mode=cache)
        finally:
            self.train(was_training)


class MaskedLM(LanguageModel):
    """A BERT-style encoder: each token sees all."""

    causal = False

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy over the positions whose label is not −100; the head is computed only there."""
        self._check_labels(ids, labels)
        hidden, labels = self.hidden(ids, attention_mask, documents).flatten(0, 1), labels.flatten()
        if not torch.compiler.is_compiling():  # a compiled graph has fixed shapes; there −100 is skipped by the loss
            masked = (labels != IGNORED).nonzero().squeeze(-1)
            hidden, labels = hidden[masked], labels[masked]
            if not len(masked):
                return self.logits(hidden).sum()  # nothing was asked: zero, with a gradient of zero
        return self.token_loss(hidden, labels)


class SequenceClassifier(Transformer):
    """A head on the mean of an encoder's real tokens, or on a decoder's last one, which alone has seen all others.

    Classification, or with one label regression.
    """

    labels: tuple[str, ...] = ()
    """Names of the classes, where they are known."""
    texts: tuple[str, ...] = ("text",)
    """Columns of the text, or of both, that it was trained on."""
    max_input: int | None = None
    """Tokens to which its inputs were cut, where that is known."""

    def __init__(self, cfg: ModelConfig, num_labels: int, *, causal: bool = False) -> None:
        super().__init__(cfg)
        if num_labels < 1:
            raise UserError(f"num_labels must be at least 1, got {num_labels}")
        self.num_labels, self.causal = num_labels, causal
        self.pooler = nn.Linear(cfg.d_model, cfg.d_model)
        self.classifier = nn.Linear(cfg.d_model, num_labels)
        _finish(self)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) → (B, num_labels)."""
        padding = as_padding(attention_mask)
        if self.causal:
            # ONNX has no stable sort, by which padding is moved aside: in a graph it has to stand on the right
            exported = torch.compiler.is_exporting()
            return self._answer(last_of_real(self.hidden(ids, None if exported else attention_mask), padding))
        return self._answer(mean_of_real(self.hidden(ids, attention_mask), padding))

    def _answer(self, pooled: Tensor) -> Tensor:
        """(B, d) → (B, num_labels)."""
        return self.classifier(self.dropout(torch.tanh(self.pooler(pooled))))

    def loss(self, ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Cross-entropy of (B,) labels, or with `num_labels` 1 the mean squared error."""
        logits = self.forward(ids, attention_mask)
        if labels.shape != ids.shape[:1]:
            raise UserError(f"labels must be ({ids.shape[0]},), one for each sequence, got {tuple(labels.shape)}")
        if self.num_labels == 1:
            return F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
        return F.cross_entropy(logits, labels)


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the logits of (N, d) hidden states, by a head (V, d), against (N,) labels, in chunks."""
    hidden = hidden.to(weight.dtype)  # under autocast a bfloat16 stream would make a bfloat16 loss
    chunked = hidden.shape[0] > LOSS_ROWS and not torch.compiler.is_compiling()  # which cannot trace the chunks
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_ROWS) if chunked else None
    return F.linear_cross_entropy(hidden, weight, labels.long(), ignore_index=IGNORED, options=options)


def mean_of_real(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """The mean over the real tokens of each sequence, (B, T, d) → (B, d)."""
    if padding is None:
        padding = torch.ones(hidden.shape[:2], device=hidden.device)
    real = padding.to(hidden.dtype)[..., None]
    return (hidden * real).sum(1) / real.sum(1).clamp(min=1)


def last_of_real(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """The last real token of each sequence, (B, T, d) → (B, d)."""
    if padding is None:
        return hidden[:, -1]
    places = torch.arange(padding.shape[1], device=padding.device)
    last = torch.where(padding, places, 0).amax(dim=1)  # (B,)
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)


def as_padding(attention_mask: Tensor | None) -> Tensor | None:
    """(B, T) bool, true where a token is real."""
    if attention_mask is not None and attention_mask.is_floating_point():
        raise UserError(
            f"attention_mask must be bool, or integers 1 for real tokens and 0 for padding, got {attention_mask.dtype}"
        )
    return None if attention_mask is None else attention_mask.bool()


def _finish(model: Transformer) -> None:
    """The last that a constructor does: initial weights, and the kernels of this machine."""
    from skipless.nn.kernels.install import install

    init_weights(model)
    install(model)
