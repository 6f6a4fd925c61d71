"""DDP: every process has the whole model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skipless.distributed.group import MultiProcessGroup, Root

if TYPE_CHECKING:
    from skipless.nn.model import CausalLM, MaskedLM

    Model = CausalLM | MaskedLM


class DDPGroup(MultiProcessGroup):
    """DDP: every process has the whole model; gradients are averaged while the backward pass runs."""

    def wrap(self, model: "Model", device: torch.device, dtype: torch.dtype, *, accumulates: bool) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        self.root = DistributedDataParallel(
            Root(model),
            device_ids=None if device.type == "cpu" else [device.index],
            forward_sync_buffers=False,  # W_init is fixed
            gradient_as_bucket_view=True,
            static_graph=not accumulates,
        )
        # else those of the first micro-batches would lie beside DDP's buckets, and take their memory once more
        self.drops_gradients = not accumulates
        if self.cfg.reduce == "bf16":
            self.root.register_comm_hook(None, bf16_compress_hook)

    def first_pass(self, run: Callable[[], Tensor]) -> None:
        # After its first backward pass DDP puts gradients into other buckets, in which they may add up in another
        # order. Made before the first step of every process, it is the same in one that resumes and one that does not.
        (self.forward(run) * 0).backward()
        self.root.zero_grad(set_to_none=True)

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.root(function, *args)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.root.no_sync()  # pyrefly: ignore
