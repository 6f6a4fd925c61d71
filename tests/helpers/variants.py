"""Every configuration of the paper: the presets, and each variant of its appendix as a change to one of them."""

from skipless import BLOCKS, BlockConfig, GainConfig, MapConfig

TRAINED = GainConfig(init=1.0, trainable=True)
SMALL = GainConfig(init=0.2, trainable=True)


def reparam(init: str, alpha: float | GainConfig = 1.0, beta: float | GainConfig = 1.0) -> MapConfig:
    return MapConfig(kind="reparam", init=init, alpha=alpha, beta=beta)


def with_maps(base: str, value: MapConfig, projection: MapConfig | None = None, **changes: object) -> BlockConfig:
    return BLOCKS[base].replace(value=value, projection=projection or value, first_value=None, **changes)


APPENDIX: dict[str, BlockConfig] = {
    # figure 2: skipless attention with orthogonal V/P (beside the preset v-skipinit)
    "fig2-shaped": with_maps("sas", MapConfig(init="orthogonal")),
    # figure 3 and `tied`: fixed gains on ΔW, each W_init
    "fig3-identity-0": with_maps("sas", reparam("identity", 1, 0)),
    "fig3-identity-0.2": with_maps("sas", reparam("identity", 1, 0.2)),
    "fig3-orthogonal-0": with_maps("sas", reparam("orthogonal", 1, 0)),
    "fig3-orthogonal-0.5": with_maps("sas", reparam("orthogonal", 1, 0.5)),
    "tied-last": with_maps("sas", reparam("orthogonal", 1, 0.2), reparam("last-layer-tied", 1, 0.2)),
    "tied-all": with_maps("sas", reparam("orthogonal", 1, 0.2), reparam("all-tied", 1, 0.2)),
    # figure 4 and `gains`: trainable gains, in four blocks
    "fig4": with_maps("sas", reparam("identity", TRAINED, SMALL)),
    "gains-parallel": with_maps("sas-p", reparam("identity", TRAINED, SMALL)),
    "gains-orthogonal": with_maps("sas", reparam("orthogonal", TRAINED, SMALL)),
    "gains-pre-ln": with_maps("pre-ln", reparam("identity", TRAINED, SMALL)),
    # a W that is only ΔW
    "delta-only": with_maps("pre-ln", reparam("orthogonal", 0, 1)),
    # `vp-lr`: free matrices that start at W_init
    "vp-lr-identity": with_maps("sas", MapConfig(init="identity")),
    "vp-lr-tied-last": with_maps("sas", MapConfig(init="orthogonal"), MapConfig(init="last-layer-tied")),
    "vp-lr-tied-all": with_maps("sas", MapConfig(init="orthogonal"), MapConfig(init="all-tied")),
    # `matrix`, shared gains, `first-value`
    "matrix-sas": BLOCKS["sas"].replace(mixing="v-skipinit", beta=GainConfig(init=0.0, trainable=True)),
    "matrix-sas-p": BLOCKS["sas-p"].replace(mixing="v-skipinit", beta=GainConfig(init=0.0, trainable=True)),
    "shared-gains": BLOCKS["sas"].replace(per_head_gains=False),
    "first-value-sas": BLOCKS["sas"].replace(first_value=None),
    "first-value-sas-p": BLOCKS["sas-p"].replace(first_value=None),
    # `preln-identity`, with the attention branch as it is and downweighted
    "preln-identity": BLOCKS["pre-ln"].replace(value=MapConfig(kind="identity"), projection=MapConfig(kind="identity")),
    "preln-identity-half": BLOCKS["pre-ln"].replace(
        value=MapConfig(kind="identity"), projection=MapConfig(kind="identity"), beta_sa=0.5
    ),
    # `mlp-skipless`, `mlp-gain`
    "mlp-skipless-relu": BLOCKS["sas"].replace(alpha_ff=None),
    "mlp-skipless-0.2": BLOCKS["sas"].replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.2),
    "mlp-skipless-0.8": BLOCKS["sas"].replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.8),
    "mlp-gain": BLOCKS["sas"].replace(beta_ff=GainConfig(init=0.2, trainable=True)),
    # the encoder's parts, the book model's activation, and what else the page of the paper asks for
    "bert-sas": BLOCKS["sas"].replace(mlp="glu", activation="gelu", norm="layernorm", norm_eps=1e-12),
    "bert-pre-ln": BLOCKS["pre-ln"].replace(mlp="glu", activation="gelu", norm="layernorm", norm_eps=1e-12),
    "languini-sas-p": BLOCKS["sas-p"].replace(activation="gelu"),
    "gpt2": BLOCKS["pre-ln"].replace(activation="gelu-tanh", norm="layernorm", norm_eps=1e-5, bias=True),
    "qk-norm": BLOCKS["sas"].replace(qk_norm=True),
    "qk-norm-pre-ln": BLOCKS["pre-ln"].replace(qk_norm=True, norm="layernorm"),
    "sas-nonorm": BLOCKS["sas"].replace(norm="none"),
    "attention-only": BLOCKS["sas"].replace(beta_ff=None),
    "mlp-only": BLOCKS["parallel"].replace(beta_sa=None),
    "fixed-depth-gain": BLOCKS["sas-p"].replace(beta_ff=GainConfig(init="depth")),
    "bias-sas": BLOCKS["sas"].replace(bias=True, first_value=MapConfig(kind="dense")),
    # the authors' released code, and cramming's layer norms
    "authors-sas": BLOCKS["sas"].replace(
        norm="rms-plus-eps", norm_eps=1e-5, norm_bias=True, qk_bias=True, alpha_ff=TRAINED
    ),
    "authors-pre-ln": BLOCKS["pre-ln"].replace(norm="rms-plus-eps", norm_eps=1e-5, norm_bias=True, qk_bias=True),
    "authors-sas-p": BLOCKS["sas-p"].replace(norm="rms-plus-eps", norm_eps=1e-5, norm_bias=True, qk_bias=True),
    "cramming-sas-p": BLOCKS["sas-p"].replace(norm="layernorm", norm_bias=True, norm_eps=1e-12, mlp="glu"),
    "naive": BLOCKS["pre-ln"].replace(alpha_sa=None),
}

VARIANTS: dict[str, BlockConfig] = {**BLOCKS, **APPENDIX}
