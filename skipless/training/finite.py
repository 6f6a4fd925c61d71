"""Where numbers stopped being finite: the first layer, the parameter nearest to the loss.

Every function is collective, because a tensor may be non-finite on one process only.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from skipless.analysis.health import first_nonfinite, parts_of
from skipless.distributed.group import Group
from skipless.nn.model import Transformer


@torch.no_grad()
def first_bad_layer(model: Transformer, inputs: Iterable[tuple[Tensor, Tensor | None]], group: Group) -> str:
    """Run inputs (ids and attention mask) again and say in which part activations first are not finite."""
    found: set[str] = set()
    for ids, attention_mask in inputs:
        found |= set(group.forward_no_grad(first_nonfinite, model, ids, attention_mask).values())
    anywhere = {name for names in group.exchange(sorted(found)) for name in names}
    return next((name for name in parts_of(model) if name in anywhere), "the head")


def first_bad_gradient(names: Mapping[Parameter, str], group: Group) -> str:
    """The parameter nearest to the loss whose gradient is not finite; if each is, only their sum was too large."""
    gradients = {name: parameter.grad for parameter, name in names.items() if parameter.grad is not None}
    bad = nonfinite(gradients, group)
    if not bad:
        return "the norm of all gradients, each of which is finite"
    last = bad[-1]  # parameters are named in the order in which a token meets them
    number = last.split(".")[1] if last.startswith("blocks.") else None
    return last if number is None else f"layer {int(number) + 1} ({last})"


def nonfinite(named: Mapping[str, Tensor], group: Group) -> list[str]:
    """The names of tensors that are not finite in some process, in their order."""
    here = [name for name, tensor in named.items() if not group.local(tensor).isfinite().all()]
    anywhere = {name for names in group.exchange(here) for name in names}
    return [name for name in named if name in anywhere]
