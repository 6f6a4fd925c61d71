"""One update of a model's weights. Pre-training and fine-tuning both make theirs here.

    micro-batches ─► forward and backward ─► unscale ─► norm ─► finite? ─► clip ─► optimiser step ─► zero the gradients
                     (autocast, loss scale)                       └► NonFinite, and the weights stay as they are

What the next update depends on besides its batch (weights, their average, optimiser states, loss scale, random
generators) is saved and restored here too, in one form for both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from skipless.config.run import TrainConfig
from skipless.data.counter_rng import mix
from skipless.distributed.group import Group
from skipless.errors import UserError
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.storage.checkpoint_format import AVERAGE, Checkpoint
from skipless.training.ema import WeightAverage
from skipless.training.finite import first_bad_gradient, first_bad_layer, nonfinite
from skipless.training.optimizers import clip_gradients, make_optimizers, set_lr
from skipless.training.schedule import learning_rate
from skipless.training.state import load_optimizer, optimizer_tensors, rng_state, set_rng_state
from skipless.training.stopping import NonFinite


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that are in memory together: the arguments of `model.loss`, and their weight."""

    ids: Tensor
    labels: Tensor
    weight: int
    """How many labels its mean loss is taken over. A micro-batch of weight 0 is computed but contributes nothing."""
    attention_mask: Tensor | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of `model.loss` on a device.

        Without weight any labels will do; the mean over none would be 0/0, of which nothing can be multiplied away.
        """
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        labels = self.labels if self.weight else self.labels.clamp(min=0)
        return self.ids.to(device), labels.to(device), mask


@dataclass(frozen=True)
class UpdateResult:
    """Loss, gradient norm and learning rate of an update."""

    loss: float
    """Mean over all labels of all processes, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float


class Update:
    """A model, its optimisers and loss scale, and the processes that share them; makes one update at a time.

        update = Update(model, TrainConfig(steps=100))
        update.make([MicroBatch(ids, labels, weight=labels.numel())], progress=0.5)

    A model that several processes train has to be wrapped by their group before. A `loss` of one's own takes the place
    of `model.loss` and is given what `on` of a micro-batch returns.
    """

    def __init__(
        self,
        model: CausalLM | MaskedLM | SequenceClassifier,
        cfg: TrainConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        group: Group | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        self.own_loss = loss
        self.model, self.cfg, self.device, self.dtype = model, cfg, torch.device(device), dtype
        self.group = group or Group()
        self.names: dict[Parameter, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizers: list[Optimizer] = make_optimizers(model, cfg, self.group)
        held = {p for optimizer in self.optimizers for options in optimizer.param_groups for p in options["params"]}
        self.trained = {parameter: name for parameter, name in self.names.items() if parameter in held}
        self.untrained = {parameter: name for parameter, name in self.names.items() if parameter not in held}
        model.zero_grad(set_to_none=True)  # of whatever was done with the model before
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.average = None if cfg.ema is None else WeightAverage(self.names, cfg.ema, self.group)
        self._rng = self._seeded_rng(0)

    def autocast(self) -> torch.autocast:
        """Matrix products in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    # --------------------------------------------------------------------------- update

    def make(self, batches: Sequence[MicroBatch], progress: float, name: str = "this update") -> UpdateResult:
        """Update the weights by the mean gradient of the micro-batches, when `progress` of the budget is spent.

        Raises NonFinite, with the update's `name`, and changes no weight, where the loss or the gradient is not finite.
        """
        self._check_held(name)
        (labels,) = self.group.sum(sum(batch.weight for batch in batches))
        if not labels:
            raise UserError(f"{name}: all labels are ignored, so there is nothing to learn: leave out such rows")
        lr = learning_rate(self.cfg, progress)
        set_lr(self.optimizers, lr)
        total = self._accumulate(batches, labels)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        norm = self.group.norm(gradients)
        (loss,) = self.group.sum(total.item())
        grad_norm = norm.item()
        self._check_finite(loss, grad_norm, batches, name)
        if math.isfinite(grad_norm):  # else the loss scale was too large, and no optimiser may step
            self._step(gradients, norm)
        self.scaler.update()
        self._zero_gradients()
        return UpdateResult(loss, grad_norm, lr)

    def _step(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        """Clip, and change the weights and their average."""
        if self.cfg.clip is not None:
            clip_gradients([self.group.local(gradient) for gradient in gradients], self.cfg.clip, norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        if self.average is not None:
            self.average.update()

    def _accumulate(self, batches: Sequence[MicroBatch], labels: float) -> Tensor:
        """Add up the gradients of the micro-batches; returns this process's part of the mean loss.

        The mean is over the `labels` of all processes: each micro-batch counts by its share of these, and then by the
        number of processes, for the gradients are averaged over them.
        """
        group, loss_of = self.group, self.own_loss or self.model.loss
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            with group.accumulating(last=number == len(batches) - 1):
                with self.autocast():
                    loss = group.forward(loss_of, *batch.on(self.device)) * (batch.weight / labels)
                self.scaler.scale(loss * group.size).backward()
            total += loss.detach()
        return total

    def _check_held(self, name: str) -> None:
        """Raise where a parameter requires a gradient and no optimiser would ever change it."""
        ignored = [one for parameter, one in self.untrained.items() if parameter.requires_grad]
        if ignored:
            more = f" and {len(ignored) - 1} more" if ignored[1:] else ""
            raise UserError(
                f"{name}: no optimiser holds {ignored[0]}{more}, which requires a gradient: "
                "freeze it, or unfreeze it before the training begins"
            )

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.group.drops_gradients)

    # --------------------------------------------------------------------- finite numbers

    def _check_finite(self, loss: float, norm: float, batches: Sequence[MicroBatch], name: str) -> None:
        scaled = self.scaler.is_enabled()  # then an update whose gradient overflows is skipped, and the scale goes down
        if not math.isfinite(loss):
            what, where = f"the loss is {loss}", self._first_bad_layer(batches)
        elif not math.isfinite(norm) and not scaled:
            what, where = f"the gradient's norm is {norm}", first_bad_gradient(self.trained, self.group)
        else:
            return
        self._zero_gradients()  # else they would be part of the next update, if the caller continues
        raise NonFinite(f"{name}: {what}, first in {where}; the update was not made", what, where)

    def _first_bad_layer(self, batches: Sequence[MicroBatch]) -> str:
        if self.own_loss is not None:
            return "a loss of one's own"
        moved = (batch.on(self.device) for batch in batches)
        with self.autocast():
            return first_bad_layer(self.model, ((ids, mask) for ids, _, mask in moved), self.group)

    def nonfinite_parameters(self) -> list[str]:
        """Collective: the names of parameters that are not finite."""
        return nonfinite({name: parameter.detach() for parameter, name in self.names.items()}, self.group)

    # ------------------------------------------------------------------- save and restore

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint stores as tensors: those of the model, and of each optimiser. Not copies."""
        parts = {"model": dict(self.model.state_dict())}
        for number, optimizer in enumerate(self.optimizers):
            parts[f"optimizer{number}"] = optimizer_tensors(optimizer, self._names_in(optimizer))[0]
        if self.average is not None:
            parts[AVERAGE] = self.average.tensors
        return parts

    def state(self) -> dict[str, Any]:
        """Collective: what a checkpoint stores as JSON: scalars of the optimisers, loss scale, random generators."""
        rng, *others = self.group.exchange(rng_state())
        average = {} if self.average is None else {AVERAGE: self.average.steps}
        return {
            **average,
            "optimizers": [optimizer_tensors(one, self._names_in(one))[1] for one in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "rng": rng,
            "rng_of_others": others,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Collective: take over what a checkpoint holds; the next update is the one that would have followed it."""
        stored, state = _stored_optimizers(checkpoint), checkpoint.state
        if len(stored) != len(self.optimizers):
            raise UserError(f"{checkpoint.path} was made with another optimiser than {self.cfg.optimizer!r}")
        try:
            self.model.load_state_dict(self.group.loaded(checkpoint, "model", self.model.state_dict()))
        except RuntimeError as error:
            first = str(error).splitlines()[1].strip()
            raise UserError(f"{checkpoint.path} holds another model than the configuration: {first}") from None
        for optimizer, (stem, described) in zip(self.optimizers, stored, strict=True):
            names, known = self._names_in(optimizer), described["parameters"]
            targets = {f"{n}/{key}": p for p, n in names.items() for key in known.get(n, {}).get("tensors", ())}
            load_optimizer(optimizer, names, self.group.loaded(checkpoint, stem, targets), described)
        if self.average is not None:
            self.average.restore(checkpoint)
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        of_ranks = [state["rng"], *state.get("rng_of_others", ())]
        rank = self.group.rank
        self._rng = of_ranks[rank] if rank < len(of_ranks) else self._seeded_rng(checkpoint.step)
        self.reset_rng()

    def reset_rng(self) -> None:
        """Set the random generators to where they stood when this was made or restored."""
        set_rng_state(self._rng)

    def _seeded_rng(self, step: int) -> dict[str, Any]:
        """Rank 0 keeps its random generators; the other ranks seed theirs anew, because their dropout must differ."""
        if self.group.rank:
            torch.manual_seed(int(mix(self.cfg.seed, self.group.rank, step) % np.uint64(2**32)))
        return rng_state()

    def _names_in(self, optimizer: Optimizer) -> dict[Parameter, str]:
        return {p: self.names[p] for group in optimizer.param_groups for p in group["params"]}


def _stored_optimizers(checkpoint: Checkpoint) -> list[tuple[str, dict[str, Any]]]:
    """The file and the description of each optimiser. Fine-tunings of version 0.1.0 had one, unnumbered."""
    if "optimizer" in checkpoint.state:
        return [("optimizer", checkpoint.state["optimizer"])]
    return [(f"optimizer{number}", one) for number, one in enumerate(checkpoint.state["optimizers"])]
