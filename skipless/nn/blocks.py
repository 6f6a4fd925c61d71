"""The paper's two block layouts. Each of its blocks is one of these with other parts (`skipless.BLOCKS`).

This is the plain form. `nn/kernels` has a faster version of each forward, for full precision on a CPU, which is used
unless a module is compiled, hooked or replaced; the tests require the two to be equal, outputs and gradients.

Shapes: B batch, T tokens, d width.
"""

from torch import Tensor, nn

from skipless.config.block import BLOCKS, GainConfig
from skipless.config.model import ModelConfig
from skipless.nn.attention import Attention
from skipless.nn.layers import Gain, WithGains, make_mlp, make_norm, no_branch
from skipless.nn.masks import MaskLike
from skipless.nn.positions import Rope

__all__ = ["BLOCKS", "Block", "ParallelBlock", "SequentialBlock", "make_block"]


class SequentialBlock(WithGains):
    """Equation 1: attention, then MLP.

    Pre-LN, with every gain at 1:

        x ─┬─ Norm ─ MHA ─ ·β_SA ─(+)─┬─ Norm ─ MLP ─ ·β_FF ─(+)─ out
           └──────── ·α_SA ────────┘  └──────── ·α_FF ────────┘

    SAS, where α_SA = 0 and MHA is the shaped attention without W^P, and without W^V except in the first layer:

        x ─── Norm ─ MHA ─ ·β_SA ─────┬─ Norm ─ MLP ─ ·β_FF ─(+)─ out
                                      └───────────────────────┘

    Post-LN has its norms after the sums instead.
    """

    alpha_sa: Gain
    beta_sa: Gain
    alpha_ff: Gain
    beta_ff: Gain

    def __init__(self, cfg: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        block = cfg.block

        def norm_if(position: str, branch: GainConfig | None) -> nn.Module:
            return make_norm(block, cfg.d_model) if branch and block.norm_position == position else nn.Identity()

        self.norm_sa, self.post_norm_sa = norm_if("pre", block.beta_sa), norm_if("post", block.beta_sa)
        self.norm_ff, self.post_norm_ff = norm_if("pre", block.beta_ff), norm_if("post", block.beta_ff)
        self.attention = Attention(cfg, layer) if block.beta_sa else no_branch
        self.mlp = make_mlp(cfg) if block.beta_ff else no_branch
        self.add_gains(cfg.n_layer, alpha_sa=block.alpha_sa, beta_sa=block.beta_sa)
        self.add_gains(cfg.n_layer, alpha_ff=block.alpha_ff, beta_ff=block.beta_ff)

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:  # (B, T, d) → (B, T, d)
        mha = self.attention(self.norm_sa(x), mask, rope)
        x_hat = self.post_norm_sa(self.weighted_sum((self.alpha_sa, x), (self.beta_sa, mha)))
        mlp = self.mlp(self.norm_ff(x_hat))
        return self.post_norm_ff(self.weighted_sum((self.alpha_ff, x_hat), (self.beta_ff, mlp)))


class ParallelBlock(WithGains):
    """Equation 7: attention and MLP side by side on one norm.

    Parallel, with every gain at 1:

                    ┌─ MLP ─ ·β_FF ──┐
        x ─┬─ Norm ─┴─ MHA ─ ·β_SA ─(+)─ out
           └─────── ·α_comb ─────────┘

    SAS-P, where α_comb = 0 and MHA is the shaped attention without W^P, and without W^V except in the first layer:

                    ┌─ MLP ─ ·β_FF ──┐
        x ─── Norm ─┴─ MHA ─ ·β_SA ─(+)─ out
    """

    alpha_comb: Gain
    beta_ff: Gain
    beta_sa: Gain

    def __init__(self, cfg: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        block = cfg.block
        self.norm = make_norm(block, cfg.d_model)
        self.attention = Attention(cfg, layer) if block.beta_sa else no_branch
        self.mlp = make_mlp(cfg) if block.beta_ff else no_branch
        self.add_gains(cfg.n_layer, alpha_comb=block.alpha_comb, beta_ff=block.beta_ff, beta_sa=block.beta_sa)

    def forward(self, x: Tensor, mask: MaskLike, rope: Rope | None = None) -> Tensor:  # (B, T, d) → (B, T, d)
        h = self.norm(x)
        mlp, mha = self.mlp(h), self.attention(h, mask, rope)
        return self.weighted_sum((self.alpha_comb, x), (self.beta_ff, mlp), (self.beta_sa, mha))


Block = SequentialBlock | ParallelBlock

LAYOUTS: dict[str, type[Block]] = {
    "sequential": SequentialBlock,
    "parallel": ParallelBlock,
}


def make_block(cfg: ModelConfig, layer: int = 0) -> Block:
    """Block number `layer` (from 0) of a model: equation 1 or 7, with the faster forms of `nn/kernels`."""
    from skipless.nn.kernels.install import install

    return install(LAYOUTS[cfg.block.layout](cfg, layer))
