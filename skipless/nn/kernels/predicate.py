"""The conditions under which a kernel may replace the plain form."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks

from skipless.errors import UserError

Backward = TypeVar("Backward", bound=Callable[..., Any])

EXACT = (torch.float32, torch.float64)
KINDS = (Tensor, nn.Parameter, FakeTensor)
"""Not a sharded or a quantised tensor; a fake one stands for a plain one where memory is counted."""


def runs_eagerly(*tensors: Any) -> bool:
    """Whether all of these are tensors of one exact type on a CPU, and what is done with them is done at once, as said.

    Under torch.compile, autocast or a transform of torch.func the plain equation runs: it can be traced, it knows the
    types, and accelerators and compilers fuse such things themselves.
    """
    first = tensors[0]
    return (
        all(type(x) in KINDS and x.device.type == "cpu" and x.dtype == first.dtype for x in tensors)
        and first.dtype in EXACT
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def trains(*tensors: Any) -> bool:
    """The same, where gradients are asked for."""
    return torch.is_grad_enabled() and runs_eagerly(*tensors)


def have_no_hooks(*modules: nn.Module) -> bool:
    """Whether nobody would notice that these modules are not called: no hook of any kind, no forward of their own."""
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
        return False
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        for module in modules
    )


def are_plain_linear(*layers: Any) -> bool:
    """Whether each layer is a product with a matrix and nothing else: no bias, nothing that stands in for it."""
    return all(type(layer) is nn.Linear and layer.bias is None for layer in layers) and have_no_hooks(*layers)


def once_differentiable(backward: Backward) -> Backward:
    """A backward pass that is not recorded, and so refuses to be: a gradient of what it gives would be wrong.

    PyTorch's decorator of this name lets it pass, and `torch.autograd.grad` with inputs then never sees its error.
    """

    @wraps(backward)
    def once(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise UserError(
                "the fast form has no gradients of gradients (create_graph=True): compute a loss of model(ids) within "
                "skipless.nn.kernels.disabled(model) and skipless.nn.explicit_form(model)"
            )
        return backward(ctx, *grad_outputs)

    return once  # pyrefly: ignore
