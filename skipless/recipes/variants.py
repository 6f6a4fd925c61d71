"""The appendix's blocks by name: each is a preset with other parts."""

from skipless.config.block import BLOCKS, FIXED, BlockConfig, GainConfig, MapConfig, WInit, parse_block

BETAS = (0.0, 0.1, 0.2, 0.5, 1.0)
"""β_V = β_P of figure 3."""

MLP_GAINS = (0.03, 0.1, 0.3, 1.0)
"""Initial β_FF of `mlp-gain`."""


def _with_maps(base: str, value: MapConfig, projection: MapConfig | None = None) -> BlockConfig:
    return BLOCKS[base].replace(value=value, projection=projection or value, first_value=None)


def _reparam(init: WInit, beta: float) -> MapConfig:
    return MapConfig(kind="reparam", init=init, beta=GainConfig(init=beta))


def _reparameterised() -> dict[str, BlockConfig]:
    """Figure 3 and `tied`: `sas` with V and P of equation 6, α = 1 and β fixed. Identity and β = 0 is no V and P."""
    blocks = {"sas-identity-0": BLOCKS["sas"].replace(first_value=None)}
    for beta in BETAS:
        orthogonal = _reparam("orthogonal", beta)
        if beta:
            blocks[f"sas-identity-{beta:g}"] = _with_maps("sas", _reparam("identity", beta))
        blocks[f"sas-orthogonal-{beta:g}"] = _with_maps("sas", orthogonal)
        blocks[f"sas-ll-tied-{beta:g}"] = _with_maps("sas", orthogonal, _reparam("last-layer-tied", beta))
        blocks[f"sas-all-tied-{beta:g}"] = _with_maps("sas", orthogonal, _reparam("all-tied", beta))
    return blocks


def _trainable_gains(base: str, init: WInit) -> BlockConfig:
    """Figure 4 and `gains`: α_V = α_P from 1 and β_V = β_P from 0.2, all of them trained."""
    gains = {"alpha": GainConfig(init=1.0, trainable=True), "beta": GainConfig(init=0.2, trainable=True)}
    return _with_maps(base, MapConfig(kind="reparam", init=init, **gains))


def _variants() -> dict[str, BlockConfig]:
    sas, sas_p, pre_ln = BLOCKS["sas"], BLOCKS["sas-p"], BLOCKS["pre-ln"]
    v_skipinit = {"mixing": "v-skipinit", "beta": GainConfig(init=0.0, trainable=True)}
    identity = MapConfig(kind="identity")
    return {
        "sas-dense-orthogonal": _with_maps("sas", MapConfig(init="orthogonal")),
        "sas-dense-identity": _with_maps("sas", MapConfig(init="identity")),
        **_reparameterised(),
        "sas-gains": _trainable_gains("sas", "identity"),
        "sas-p-gains": _trainable_gains("sas-p", "identity"),
        "sas-gains-orthogonal": _trainable_gains("sas", "orthogonal"),
        "pre-ln-gains": _trainable_gains("pre-ln", "identity"),
        "sas-v-skipinit-matrix": sas.replace(**v_skipinit),
        "sas-p-v-skipinit-matrix": sas_p.replace(**v_skipinit),
        "sas-p-identity-first": sas_p.replace(first_value=None),
        "sas-shared-gains": sas.replace(per_head_gains=False),
        "sas-fixed-gains": sas.replace(beta_sa=FIXED, beta_ff=GainConfig(init="depth")),
        "pre-ln-identity": pre_ln.replace(value=identity, projection=identity),
        "pre-ln-identity-half": pre_ln.replace(value=identity, projection=identity, beta_sa=0.5),
        "sas-no-mlp-skip": sas.replace(alpha_ff=None),
        "sas-no-mlp-skip-0.2": sas.replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.2),
        "sas-no-mlp-skip-0.8": sas.replace(alpha_ff=None, activation="leaky-relu", negative_slope=0.8),
        **{f"sas-beta-ff-{gain:g}": sas.replace(beta_ff=gain) for gain in MLP_GAINS},
    }


VARIANTS: dict[str, BlockConfig] = _variants()
"""The blocks of the experiments that are not presets, by name; each is a preset with other parts."""


def find_block(name: str) -> BlockConfig:
    """A variant of the experiments by its name, or else whatever `parse_block` knows."""
    return VARIANTS[name] if name in VARIANTS else parse_block(name)


def block_name(block: BlockConfig) -> str:
    """The name of a block that has one, else that of the preset it is nearest to: for the names of folders."""
    named = {**BLOCKS, **VARIANTS}
    exact = next((name for name, known in named.items() if known == block), None)
    if exact:
        return exact
    fields = BlockConfig.model_fields
    changed = {name: sum(getattr(known, f) != getattr(block, f) for f in fields) for name, known in BLOCKS.items()}
    return f"{min(changed, key=lambda name: changed[name])}-like"
