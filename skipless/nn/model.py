"""Models around the blocks: `CausalLM`, `MaskedLM`, `SequenceClassifier`, and the one place for initialisation.

Shapes: B batch, T tokens, d width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.nn import fast
from skipless.nn.attention import Attention
from skipless.nn.blocks import ParallelBlock, SequentialBlock, make_block
from skipless.nn.cache import Cache, Past, pick_mode
from skipless.nn.folded import along_longer_side, fold_block, slab_product
from skipless.nn.layers import (
    LearnedPositions,
    ReparamLinear,
    RMSNorm,
    WithGains,
    make_outer_norm,
    make_positions,
    rotation,
)
from skipless.nn.mask import Mask, alibi_slopes

IGNORED = -100
"""The label of a position that has no loss."""

LOSS_ROWS = 256
"""Tokens whose logits are in memory at a time: 51 MB for 50,000 words. Half as many are a few per cent slower."""


class Transformer(nn.Module):
    """Embedding, positions, blocks, norm: what the three models share."""

    causal: bool
    tokenizer: Any = None
    """How its text becomes tokens, where the model comes from a run."""
    _tied: tuple[Tensor, Tensor] | None = None
    """Within a loss: the matrix that embedding and head share, once for each."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.positions = make_positions(cfg)
        self.embedding_norm = make_outer_norm(cfg) if cfg.normalises_embedding else nn.Identity()
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(make_block(cfg, layer) for layer in range(cfg.n_layer))
        ends_in_norm = cfg.block.norm_position == "post" and cfg.block.norm != "none"
        self.norm = nn.Identity() if ends_in_norm else make_outer_norm(cfg)

    def hidden(self, ids: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """What the head sees: (B, T) token ids → (B, T, d).

        `attention_mask` (B, T) is true, or 1, where a token is real; padding may stand on either side and changes
        nothing for the real tokens. (In the midst of a row as well, but for ALiBi, whose distances count it where the
        row is not reordered: in an encoder and among packed documents.) `documents` (B, T) numbers the documents packed
        into a row: they do not see each other, and positions count from each one's start.
        """
        self._check(ids)
        padding = as_padding(attention_mask)
        if documents is not None:  # each run of one number is a document, also where a number comes again
            documents = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0)).cumsum(-1)
        alibi = alibi_slopes(self.config.n_head, ids.device) if self.config.positions == "alibi" else None
        mask = Mask(self.causal, padding, documents, alibi)
        mask.check(*ids.shape)
        if padding is None or documents is not None or not self.causal:
            return self._run(ids, mask)
        # Real tokens first: then the causal mask alone keeps them from the padding, and no other mask is needed.
        order = padding.long().argsort(dim=-1, descending=True, stable=True)
        hidden = self._run(ids.gather(1, order), Mask(self.causal, alibi=alibi))
        return hidden.gather(1, order.argsort(dim=-1)[..., None].expand_as(hidden))

    def _run(self, ids: Tensor, mask: Mask) -> Tensor:
        return self._through(ids, mask.positions(ids.shape[1], ids.device), [mask] * len(self.blocks))

    def _through(self, ids: Tensor, positions: Tensor, masks: Sequence[Mask | Past]) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(positions, x.dtype)
        x = self.dropout(self.embedding_norm(x))
        turn = rotation(positions, self.config.d_head, x.dtype) if self.config.positions == "rotary" else None
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block(x, mask, turn)
        return self.norm(x)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, d)."""
        try:
            return self.embedding(ids) if self._tied is None else F.embedding(ids, self._tied[0], sparse=True)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            raise IndexError(f"token ids must lie in 0…{self.config.vocab_size - 1}, got {low}…{high}") from None

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise UserError(f"ids must be a tensor of (batch, tokens) integers, got {type(ids).__name__}")
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise UserError(f"ids must be (batch, tokens) integers, got {tuple(ids.shape)} of {ids.dtype}")
        if ids.shape[1] > self.config.max_seq_len:
            raise UserError(f"a sequence of {ids.shape[1]} tokens is longer than max_seq_len {self.config.max_seq_len}")

    @torch.no_grad()
    def fold(self) -> Self:
        """A copy for inference: same outputs, fewer operations; see `skipless.nn.folded`.

        β_FF goes into the MLP's last matrix, β_SA into the gains of the mixing or into W^P, a reparameterised map
        becomes one matrix, and maps of one input become one product. The copy no longer has the parameters of its
        configuration, so it cannot be saved as one.
        """
        folded = copy.deepcopy(self).eval()
        for number, block in enumerate(folded.blocks):
            assert isinstance(block, SequentialBlock | ParallelBlock)
            folded.blocks[number] = fold_block(block)
        folded.embedding.weight = nn.Parameter(along_longer_side(folded.embedding.weight))
        return folded.requires_grad_(False)

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)


class _LanguageModel(Transformer):
    """A transformer with a head over the vocabulary."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        init_weights(self)

    @property
    def head_weight(self) -> Tensor:
        """(V, d)."""
        if self._tied is not None:
            return self._tied[1]
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits: (B, T) → (B, T, V)."""
        return F.linear(self.hidden(ids, attention_mask, documents), self.head_weight)

    def token_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of (N, d) hidden states against (N,) labels, a chunk of logits at a time."""
        hidden = hidden.to(self.head_weight.dtype)  # under autocast a bfloat16 stream would make a bfloat16 loss
        # the chunked forms make their gradients by hand, which torch.compile and torch.func cannot trace
        chunked, weight, labels = hidden.shape[0] > LOSS_ROWS, self.head_weight, labels.long()
        if chunked and fast.trains_by_hand(hidden, weight):
            return fast.cross_entropy(hidden, weight, labels, IGNORED, LOSS_ROWS)
        chunked = chunked and not torch.compiler.is_compiling()
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_ROWS) if chunked else None
        return F.linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, options=options)

    @contextmanager
    def _tying(self) -> Iterator[None]:
        """Where the head has the embedding's matrix, their gradients are one array, as `fast.tie` adds them up."""
        plain = self.head is None and fast.is_untouched(self.embedding) and type(self.embedding) is nn.Embedding
        if plain and fast.trains_by_hand(self.embedding.weight):
            self._tied = fast.tie(self.embedding.weight)
        try:
            yield
        finally:
            self._tied = None

    def _check_labels(self, ids: Tensor, labels: Tensor) -> None:
        if labels.shape != ids.shape:
            raise UserError(f"labels must have the shape of the ids, {tuple(ids.shape)}, got {tuple(labels.shape)}")


class CausalLM(_LanguageModel):
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
        return slab_product(self.remember(ids, cache, attention_mask), self.head_weight)

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, mode: str = "auto") -> Cache:
        """Memory for decoding `batch_size` sequences of at most `max_len` tokens; see `skipless.nn.cache` for modes."""
        cfg, weight = self.config, self.embedding.weight
        max_len = cfg.max_seq_len if max_len is None else max_len
        if not 1 <= max_len <= cfg.max_seq_len:
            raise UserError(f"max_len must lie in 1…{cfg.max_seq_len} (max_seq_len), got {max_len}")
        alibi = alibi_slopes(cfg.n_head, weight.device) if cfg.positions == "alibi" else None
        return Cache(cfg, batch_size, max_len, pick_mode(cfg, mode), weight.dtype, weight.device, alibi)

    @torch.no_grad()
    def remember(self, ids: Tensor, cache: Cache, attention_mask: Tensor | None = None) -> Tensor:
        """What the head sees of new tokens that follow a cache: (B, t) → (B, t, d)."""
        self._check(ids)
        padding = as_padding(attention_mask)
        Mask(True, padding).check(*ids.shape)
        cache.begin(ids, padding)
        if padding is None:
            hidden = self._through(ids, cache.positions(ids.shape[1]), cache.layers)
        else:  # rows of a cache end together, so padding goes to the left
            order = padding.long().argsort(dim=-1, stable=True)
            hidden = self._through(ids.gather(1, order), cache.positions(ids.shape[1]), cache.layers)
            hidden = hidden.gather(1, order.argsort(dim=-1)[..., None].expand_as(hidden))
        cache.advance(ids.shape[1])
        return hidden

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
        with self._tying():
            hidden = self.hidden(ids, attention_mask, documents)
            return self.token_loss(hidden.flatten(0, 1), labels.flatten())


class MaskedLM(_LanguageModel):
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
        with self._tying():
            hidden, labels = self.hidden(ids, attention_mask, documents).flatten(0, 1), labels.flatten()
            # a compiled graph has fixed shapes; there −100 is skipped by the loss
            if not torch.compiler.is_compiling():
                masked = (labels != IGNORED).nonzero().squeeze(-1)
                hidden, labels = hidden[masked], labels[masked]
                if not len(masked):
                    return F.linear(hidden, self.head_weight).sum()  # nothing was asked: zero, with a gradient of zero
            return self.token_loss(hidden, labels)


class SequenceClassifier(Transformer):
    """An encoder with a head on the mean of the real tokens: classification, or regression with one label."""

    causal = False

    def __init__(self, cfg: ModelConfig, num_labels: int) -> None:
        super().__init__(cfg)
        if num_labels < 1:
            raise UserError(f"num_labels must be at least 1, got {num_labels}")
        self.num_labels = num_labels
        self.pooler = nn.Linear(cfg.d_model, cfg.d_model)
        self.classifier = nn.Linear(cfg.d_model, num_labels)
        init_weights(self)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) → (B, num_labels)."""
        hidden = self.hidden(ids, attention_mask)
        padding = as_padding(attention_mask)
        real = (torch.ones_like(ids) if padding is None else padding).to(hidden.dtype)[..., None]
        pooled = (hidden * real).sum(1) / real.sum(1).clamp(min=1)  # (B, d)
        return self.classifier(self.dropout(torch.tanh(self.pooler(pooled))))

    def loss(self, ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Cross-entropy of (B,) labels, or with `num_labels` 1 the mean squared error."""
        logits = self.forward(ids, attention_mask)
        if labels.shape != ids.shape[:1]:
            raise UserError(f"labels must be ({ids.shape[0]},), one for each sequence, got {tuple(labels.shape)}")
        if self.num_labels == 1:
            return F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
        return F.cross_entropy(logits, labels)


def as_padding(attention_mask: Tensor | None) -> Tensor | None:
    """(B, T) bool, true where a token is real."""
    if attention_mask is not None and attention_mask.is_floating_point():
        raise UserError(
            f"attention_mask must be bool, or integers 1 for real tokens and 0 for padding, got {attention_mask.dtype}"
        )
    return None if attention_mask is None else attention_mask.bool()


# --------------------------------------------------------------------- initialisation


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig | None = None) -> None:
    """Set every weight to its initial value. The only place where weights are initialised.

    Blocks in a model of someone else's are given with the configuration they were made of.

    | what | value |
    | --- | --- |
    | embeddings, learned positions, every linear map not named below | Gaussian, std `init_std` (0.02) |
    | W^Q with `zero_query` | 0 (with a query norm: that norm's weight is 0 instead) |
    | W^V, W^P dense | Gaussian, std `init_std`; or W_init of the configuration |
    | W^V, W^P reparameterised (eq. 6) | ΔW = 0, W_init of the configuration |
    | norms | weight 1, bias 0 |
    | biases | 0 |
    | gains | the `init` of their configuration |
    """
    cfg = config or model.config
    assert isinstance(cfg, ModelConfig)
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # there is nothing to fill; call this again once the model has memory
    for module in model.modules():
        if isinstance(module, WithGains):
            module.reset_gains()
        if isinstance(module, RMSNorm | nn.LayerNorm):
            module.weight.fill_(1.0)
        if isinstance(module, nn.Linear | nn.Embedding | LearnedPositions):
            module.weight.normal_(std=cfg.init_std)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            module.bias.zero_()
        if isinstance(module, ReparamLinear) and module.delta is not None:
            module.delta.zero_()
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in attentions:
        if cfg.block.zero_query and cfg.block.qk_norm:
            nn.init.zeros_(attention.query_norm.get_parameter("weight"))
        elif cfg.block.zero_query:
            nn.init.zeros_(attention.query.weight)
    _init_values_projections(cfg, attentions)


def _init_values_projections(cfg: ModelConfig, attentions: list[Attention]) -> None:
    """W_init of W^V and W^P. Matrices are stored transposed, (out, in), so W^V W^P is stored as P V."""
    block = cfg.block
    product: Tensor | None = None  # of all earlier layers and this layer's value
    for layer, attention in enumerate(attentions):
        value_cfg = block.first_value if layer == 0 and block.first_value else block.value
        value = _w_init(attention.value, value_cfg.init)
        tied = block.projection.init == "all-tied"
        tied |= block.projection.init == "last-layer-tied" and layer == len(attentions) - 1
        if value is not None and block.projection.init in ("all-tied", "last-layer-tied"):
            product = value.clone() if product is None or block.projection.init == "all-tied" else value @ product
        init = block.projection.init
        projection = _w_init(attention.projection, "orthogonal" if init.endswith("tied") else init)
        if projection is not None and product is not None:
            if tied:
                projection.copy_(product.mT)
            product = projection @ product


def _w_init(part: object, init: str) -> Tensor | None:
    """Fill the matrix of a map that starts at W_init, and return it."""
    weight = part.weight if isinstance(part, nn.Linear) else part.w_init if isinstance(part, ReparamLinear) else None
    if weight is None:
        return None
    if init == "orthogonal":
        nn.init.orthogonal_(weight)
    elif init == "identity":
        nn.init.eye_(weight)
    return weight
