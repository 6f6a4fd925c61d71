"""A block's equation, written from its configuration."""

from skipless.config.block import BlockConfig, GainConfig
from skipless.config.parts import name_of
from skipless.nn.layers import is_identity

NAMES = {"sequential": "equation 1", "parallel": "equation 7"}


def equation(block: BlockConfig) -> str:
    """The block and its attention as formulas, without what is not there."""
    lines = _sequential(block) if block.layout == "sequential" else [_parallel(block)]
    return "\n\n".join(f"$${line}$$" for line in [*lines, _attention(block)])


def _norm(block: BlockConfig, inside: str, position: str = "pre") -> str:
    there = block.norm != "none" and block.norm_position == position
    return rf"\mathrm{{Norm}}({inside})" if there else inside


def _gain(gain: GainConfig | None, symbol: str) -> str:
    """The symbol of a gain that is trained, or its value; nothing for 1."""
    if gain is None or (gain.init == 1 and not gain.trainable):
        return ""
    return rf"{symbol}\, " if gain.trainable else rf"{gain.init}\, "


def _branch(name: str, inside: str) -> str:
    return rf"\mathrm{{{name}}}({inside})"


def _sequential(block: BlockConfig) -> list[str]:
    first = [_gain(block.alpha_sa, r"\alpha_{\mathrm{SA}}") + "X"] if block.alpha_sa else []
    second = [_gain(block.alpha_ff, r"\alpha_{\mathrm{FF}}") + r"\hat X"] if block.alpha_ff else []
    if block.beta_sa:
        first.append(_gain(block.beta_sa, r"\beta_{\mathrm{SA}}") + _branch("MHA", _norm(block, "X")))
    if block.beta_ff:
        second.append(_gain(block.beta_ff, r"\beta_{\mathrm{FF}}") + _branch("MLP", _norm(block, r"\hat X")))
    return [
        rf"\hat X = {_norm(block, ' + '.join(first), 'post')}",
        rf"X_{{\mathrm{{out}}}} = {_norm(block, ' + '.join(second), 'post')}",
    ]


def _parallel(block: BlockConfig) -> str:
    terms = [_gain(block.alpha_comb, r"\alpha_{\mathrm{comb}}") + "X"] if block.alpha_comb else []
    if block.beta_ff:
        terms.append(_gain(block.beta_ff, r"\beta_{\mathrm{FF}}") + _branch("MLP", _norm(block, "X")))
    if block.beta_sa:
        terms.append(_gain(block.beta_sa, r"\beta_{\mathrm{SA}}") + _branch("MHA", _norm(block, "X")))
    return r"X_{\mathrm{out}} = " + " + ".join(terms)


MIXINGS = {
    "softmax": "A_h",
    "v-skipinit": r"(\alpha I + \beta A_h)",
    "shaped": r"(\alpha_h I + \beta_h A_h - \gamma_h C)",
}


def _attention(block: BlockConfig) -> str:
    matrix = MIXINGS[name_of(block.mixing)]
    value = "X_h" if is_identity(block.value) else r"X W^V_h"
    projection = "" if is_identity(block.projection) else r"\, W^P"
    return rf"\mathrm{{MHA}}(X) = \mathrm{{Concat}}_h\bigl({matrix}\, {value}\bigr){projection}"
