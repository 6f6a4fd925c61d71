"""The ranks that write one checkpoint together."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class SaveGroup(Protocol):
    """Ranks that write one checkpoint together: each its own files of tensors, the main process the manifest.

    `exchange` and `raise_on_all_ranks` are collectives: every rank calls them at the same point.
    """

    @property
    def is_main_process(self) -> bool:
        """Whether this rank puts the folder in its place and writes the manifest; exactly one does."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, as JSON."""
        ...

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """A block in which a UserError of any rank is raised on every one."""
        ...


class SingleProcess:
    """A save group of this process alone."""

    is_main_process = True

    def exchange(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """An error is raised as it is."""
        return nullcontext()
