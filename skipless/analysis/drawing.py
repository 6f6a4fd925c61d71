"""A block as a flow drawing, and what it does without."""

from skipless.config.block import BlockConfig, GainConfig, MapConfig
from skipless.config.parts import PartValue, find_part
from skipless.nn.layers import is_identity


def draw(block: BlockConfig) -> str:
    """The block as a flow drawing, equation 1 or 7 with the parts that are there."""
    return _draw_sequential(block) if block.layout == "sequential" else _draw_parallel(block)


def norm_name(block: BlockConfig) -> list[str]:
    """The norm, if there is one."""
    return [_drawn("norm", block.norm)] if block.norm != "none" else []


def _drawn(kind: str, value: PartValue) -> str:
    """What a part is called in a drawing."""
    drawn = find_part(kind, value).drawn
    return drawn if isinstance(drawn, str) else drawn(value)


def mixing_name(block: BlockConfig) -> str:
    """The mixing matrix: `A`, `(αI + βA − γC)`."""
    if block.mixing == "softmax":
        return "A"
    if block.mixing not in ("v-skipinit", "shaped"):
        return f"({_drawn('mixing', block.mixing)})"
    identity = "αI + " if block.alpha else ""
    centring = " − γC" if block.mixing == "shaped" and block.gamma else ""
    return f"({identity}βA{centring})"


def maps_name(block: BlockConfig) -> str:
    """What the mixing matrix is multiplied with: `X W^V W^P`, or `X` where both maps are the identity."""
    return f"X{map_name(block.value, 'W^V')}{map_name(block.projection, 'W^P')}"


def _attention_name(block: BlockConfig) -> str:
    return f"MHA[ {mixing_name(block)} {maps_name(block)} ]"


def map_name(part: MapConfig, name: str) -> str:
    """` W^V`, or nothing for the identity."""
    if is_identity(part):
        return ""
    known = {"dense": f" {name}", "reparam": f" (αW₀+βΔ{name})"}
    return known[part.kind] if part.kind in known else f" {_drawn('map', part.kind)}"


def mlp_name(block: BlockConfig) -> str:
    """`MLP[ relu ]`."""
    name = _drawn("mlp", block.mlp)
    return name if find_part("mlp", block.mlp).plugin else f"{name}[ {_drawn('activation', block.activation)} ]"


def gain_name(gain: GainConfig | None, symbol: str) -> list[str]:
    """`·β` for a gain that does something: trainable, or fixed at another value than 1."""
    if gain is None or (gain.init == 1 and not gain.trainable):
        return []
    return [f"·{symbol}" if gain.trainable else f"·{'depth' if gain.init == 'depth' else f'{gain.init:g}'}"]


def _draw_sequential(block: BlockConfig) -> str:
    line, below = " x ─", "    "
    parts = (
        (block.alpha_sa, block.beta_sa, "SA", _attention_name(block)),
        (block.alpha_ff, block.beta_ff, "FF", mlp_name(block)),
    )
    for alpha, beta, symbol, branch in parts:
        if beta is None:
            continue
        before = norm_name(block) if block.norm_position == "pre" else []
        after = norm_name(block) if block.norm_position == "post" else []
        chain = " ─ ".join([*before, branch, *gain_name(beta, f"β_{symbol}")])
        if alpha is None:
            line, below = f"{line}── {chain} ──", below + " " * (len(chain) + 6)
        else:
            skip = "".join(gain_name(alpha, f"α_{symbol}")).center(len(chain) + 5, "─")
            line, below = f"{line}┬─ {chain} ─(+)─", f"{below}└{skip}┘  "
        if after:
            line, below = f"{line} {after[0]} ─", below + " " * (len(after[0]) + 3)
    return f"{line} out\n{below}".rstrip()


def _draw_parallel(block: BlockConfig) -> str:
    top = " ─ ".join([_attention_name(block), *gain_name(block.beta_sa, "β_SA")]) if block.beta_sa else ""
    bottom = " ─ ".join([mlp_name(block), *gain_name(block.beta_ff, "β_FF")]) if block.beta_ff else ""
    width = max(len(top), len(bottom))
    norm = "".join(f" {name} ─" for name in norm_name(block)) or "─"
    start = f" x ─{'┬' if block.alpha_comb else '─'}─{norm}"
    pad = " " * len(start)
    above, beside = (f" {text} ".ljust(width + 2, "─") for text in (top, bottom))
    if top and bottom:
        lines = [f"{pad}┌─{above}─┐", f"{start}┴─{beside}(+)─ out"]
    else:
        lines = [f"{start}──{above if top else beside}(+)─ out"]
    if block.alpha_comb:
        skip = "".join(gain_name(block.alpha_comb, "α_comb")).center(len(start) + width, "─")
        lines.append(f"    └{skip}┘")
    return "\n".join(lines)


def removed(block: BlockConfig) -> list[str]:
    """What the block does without, of what Pre-LN has."""
    absent = []
    if block.layout == "sequential":
        absent += ["attention skip"] if block.alpha_sa is None else []
        absent += ["MLP skip"] if block.alpha_ff is None else []
    else:
        absent += ["sequential sub-blocks", "second norm"] if block.norm != "none" else ["sequential sub-blocks"]
        absent += ["one skip"] if block.alpha_comb else ["both skips"]
    kept_first = " (except in layer 1)" if block.first_value and not is_identity(block.first_value) else ""
    absent += [f"W^V{kept_first}"] if is_identity(block.value) else []
    absent += ["W^P"] if is_identity(block.projection) else []
    absent += ["norms"] if block.norm == "none" else []
    absent += ["attention"] if block.beta_sa is None else []
    absent += ["MLP"] if block.beta_ff is None else []
    return absent
