"""Multi-head attention: queries, keys, the value and projection maps W^V and W^P, and the mixing matrix between them.

Shapes: B batch, H heads, T tokens, d width of the model, D = d / H width of a head.
"""

from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.nn.layers import make_map, make_query_key_norm
from skipless.nn.masks import Mask, MaskLike
from skipless.nn.mixing import make_mixing
from skipless.nn.positions import Rope, apply_rope


class Attention(nn.Module):
    """Concat_h(mixing matrix_h · (X W^V)_h) W^P: equations 2 and 3; with W^V = W^P = I equations 12 and 13."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        block = cfg.block
        self.n_head = cfg.n_head
        self.query = nn.Linear(cfg.d_model, cfg.d_model, bias=block.bias or block.qk_bias)
        self.key = nn.Linear(cfg.d_model, cfg.d_model, bias=block.bias or block.qk_bias)
        self.query_norm = make_query_key_norm(cfg)
        self.key_norm = make_query_key_norm(cfg)
        self.value = make_map(cfg, block.first_value if layer == 0 and block.first_value else block.value)
        self.projection = make_map(cfg, block.projection)
        self.mixing = make_mixing(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:  # (B, T, d) → (B, T, d)
        return self.mix(self.query(x), self.key(x), self.value(x), mask, rope)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:
        """Everything after X W^Q, X W^K and X W^V, which are (B, T, d) each: (B, T, d)."""
        mixed = self.mixing(*self.queries_keys(q, k, rope), self.heads(v), mask)  # (B, H, T, D)
        return self.dropout(self.projection(mixed.transpose(1, 2).flatten(-2)))

    def queries_keys(self, q: Tensor, k: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """X W^Q and X W^K (B, T, d) as Q and K of each head, (B, H, T, D), normalised and rotated where asked for."""
        q, k = self.query_norm(self.heads(q)), self.key_norm(self.heads(k))
        return (q, k) if rope is None else (apply_rope(q, rope), apply_rope(k, rope))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, d) → (B, H, T, D), as a view."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def matrix(self, x: Tensor, mask: Mask, rope: Rope | None = None) -> Tensor:
        """The mixing matrix of each head, (B, H, T, T), to look at."""
        return self.mixing.matrix(*self.queries_keys(self.query(x), self.key(x), rope), mask)
