"""Initialisation: the one place where weights are set."""

import torch
from torch import Tensor, nn

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.nn.attention import Attention
from skipless.nn.layers import ReparamLinear, RMSNorm, WithGains
from skipless.nn.own_parts import is_own, reset_own_part
from skipless.nn.positions import LearnedPositions


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
    | anything else in a part of one's own | what its `reset_parameters` does, after all of the above |
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
    for module in model.modules():
        if is_own(module):
            reset_own_part(module, _is_set)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in attentions:
        if cfg.block.zero_query and cfg.block.qk_norm:
            if not isinstance(getattr(attention.query_norm, "weight", None), nn.Parameter):
                raise UserError("zero_query with qk_norm starts the query norm's weight at 0, and this norm has none")
            nn.init.zeros_(attention.query_norm.get_parameter("weight"))
        elif cfg.block.zero_query:
            nn.init.zeros_(attention.query.weight)
    _init_values_projections(cfg, attentions)


def _is_set(module: nn.Module, name: str) -> bool:
    """Whether the rules above set a tensor of a module."""
    if isinstance(module, RMSNorm | nn.LayerNorm | nn.Linear | nn.Embedding | LearnedPositions):
        return name in ("weight", "bias")
    return (isinstance(module, WithGains) and name in module.initial_gains) or isinstance(module, ReparamLinear)


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
