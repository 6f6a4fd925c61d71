"""What processes say to each other besides weights and gradients: numbers and JSON.

Nothing is pickled (PyTorch's own object collectives would). Methods whose docstrings begin with "Collective" must be
called by every process at the same point.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Channel:
    """What processes say to each other: numbers and JSON. Without a process group this one talks to itself."""

    def __init__(self, rank: int = 0, size: int = 1, over: "ProcessGroup | None" = None) -> None:
        self.rank, self.size, self._over = rank, size, over
        self.received = 0
        """The signal that this process was sent, if any."""
        self._known = 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the process that writes what only one can."""
        return self.rank == 0

    @property
    def signal(self) -> int:
        """The signal that any process was sent, as of the last `gather`: the same for all, 0 if there was none."""
        return self.received if self.size == 1 else self._known

    def ask_to_stop(self, number: int) -> None:
        """Have the training save and stop as if this process had been sent a signal, if it was sent none."""
        self.received = self.received or number

    def gather(self, values: Sequence[float] = ()) -> list[list[float]]:
        """Collective: everyone's values by rank. A signal that somebody received travels along."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor([self.received, *values], dtype=torch.float64)
        rows = [row.tolist() for row in self._all_gather(own)]
        self._known = int(max(row[0] for row in rows))
        return [row[1:] for row in rows]

    def sum(self, *values: float) -> list[float]:
        """Collective: the sums over all processes, added in the order of the ranks, so the same everywhere."""
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def exchange(self, value: Any) -> list[Any]:
        """Collective: everyone's value by rank, as JSON."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([text.numel()]))]
        padded = nn.functional.pad(text, (0, max(sizes) - text.numel()))
        texts = zip(self._all_gather(padded), sizes, strict=True)
        return [json.loads(bytes(other[:size].tolist())) for other, size in texts]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self._over)
        return found

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Collective context manager: a UserError of any rank is raised on all, with its text and exit status."""
        if self.size == 1:
            yield
            return
        problem: UserError | None = None
        try:
            yield
        except UserError as error:
            problem = error
        said = self.exchange(None if problem is None else {"text": str(problem), "status": problem.status})
        rank, first = next(((rank, one) for rank, one in enumerate(said) if one), (0, None))
        if first is not None:
            error = UserError(first["text"] if rank == 0 else f"rank {rank}: {first['text']}")
            error.status = first["status"]
            raise error from problem
