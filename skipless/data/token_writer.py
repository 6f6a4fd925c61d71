"""A file of tokens that documents are appended to."""

from pathlib import Path

import numpy as np


class TokenWriter:
    """Appends documents to a file of tokens.

    As a stream: the tokens of each document and an end-of-text token. In windows, which is how CodeParrot was
    prepared: as many whole windows as the document fills, no end-of-text token, and the rest dropped; the document's
    bytes then count in proportion to the tokens that were kept.
    """

    def __init__(self, path: Path, dtype: str, end_id: int, window: int | None) -> None:
        self.documents = self.tokens = self.dropped = self.n_bytes = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._end_id = end_id
        self._window = window
        self._kept = 0
        self._rest: list[int] = []
        self._file = path.open("wb", buffering=2**20)

    def add(self, ids: list[int], last: bool, n_bytes: int) -> None:
        """Append a piece; `n_bytes` is the size of the whole document, known with its last piece."""
        if self._window is None:
            self._kept += len(ids)
            self._write([*ids, self._end_id] if last else ids)
        else:
            ids = self._rest + ids
            whole = len(ids) // self._window * self._window
            self._kept += whole
            self._write(ids[:whole])
            self._rest = ids[whole:]
        if last:
            self._finish_document(n_bytes)

    def _write(self, ids: list[int]) -> None:
        self._file.write(np.array(ids, dtype=self._dtype).tobytes())
        self.tokens += len(ids)

    def _finish_document(self, n_bytes: int) -> None:
        kept, rest = self._kept, len(self._rest)
        self.documents += 1
        self.dropped += rest
        self.n_bytes += round(n_bytes * kept / (kept + rest)) if rest else n_bytes
        self._kept, self._rest = 0, []

    def counts(self) -> dict[str, int]:
        """What went into the file."""
        return {"documents": self.documents, "tokens": self.tokens, "dropped": self.dropped, "bytes": self.n_bytes}

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()
