"""An ONNX export in the place of a model: asked as a `CausalLM` is asked, computed by ONNX Runtime."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.config.model import ModelConfig
from skipless.errors import MissingExtra, UserError, first_line
from skipless.nn.model import IGNORED
from skipless.runtime.decoder import Cache, Decoder

SAME_CACHES = {"kv": ("kv", "kx"), "kx": ("kv", "kx"), "x": ("x",)}
"""What an export may be asked for, by what it remembers."""


class OnnxCausalLM:
    """A causal model that is a graph. It is on the CPU, in eval mode, and has no parameters."""

    training = False
    tokenizer: Any = None

    def __init__(self, folder: Path | str, config: ModelConfig, threads: int | None = None) -> None:
        if find_spec("onnxruntime") is None:
            raise MissingExtra("onnxruntime", "onnx", "running an ONNX export")
        self.config, self.folder = config, folder
        try:
            self.decoder = Decoder(folder, threads)
        except MemoryError:
            raise
        except Exception as error:  # ONNX Runtime has no one type for what is wrong with a file
            raise UserError(f"the graph in {str(folder)!r} cannot be loaded: {first_line(error)}") from None
        about = self.decoder.info["onnx"]
        self.mode = str(about.get("cache")) if isinstance(about, dict) else ""
        """What it remembers, as `new_cache` calls it."""
        if self.mode not in SAME_CACHES:
            raise UserError(
                f"'config.json' of {str(folder)!r} does not say what the graph remembers, but {self.mode!r}"
            )

    def new_cache(self, batch_size: int = 1, max_len: int | None = None, mode: str = "auto") -> Cache:
        """Memory for decoding; what is remembered was chosen with the export."""
        if mode != "auto" and mode not in SAME_CACHES[self.mode]:
            raise UserError(f"this export was made for cache mode {self.mode!r}, not {mode!r}")
        limit = self.config.max_seq_len
        if max_len is not None and not 1 <= max_len <= limit:
            raise UserError(f"max_len must lie in 1…{limit} (max_seq_len), got {max_len}")
        cache = self.decoder.new_cache(batch_size, max_len)
        cache.device = torch.device("cpu")
        return cache

    def next_logits(self, ids: Tensor, cache: Cache, attention_mask: Tensor | None = None) -> Tensor:
        """The logits of what follows new tokens, which the cache remembers: (B, t) → (B, V)."""
        ordered, lengths, _ = _real_first(ids, attention_mask)
        return torch.from_numpy(self._step(ordered, cache, lengths)[:, 0])

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits: (B, T) → (B, T, V). With a cache, the ids are new tokens that follow what it remembers."""
        if ids.shape[1] > self.config.max_seq_len:
            raise UserError(f"a sequence of {ids.shape[1]} tokens is longer than max_seq_len {self.config.max_seq_len}")
        ordered, lengths, order = _real_first(ids, attention_mask)
        cache = self.new_cache(ids.shape[0], max_len=ids.shape[1]) if cache is None else cache
        everywhere = np.broadcast_to(np.arange(ids.shape[1]), tuple(ids.shape))
        logits = torch.from_numpy(self._step(ordered, cache, lengths, everywhere))
        if order is None:
            return logits
        return logits.gather(1, order.argsort(dim=-1)[..., None].expand_as(logits))

    forward = __call__

    def _step(
        self, ids: Tensor, cache: Cache, lengths: np.ndarray | None, logits_at: np.ndarray | None = None
    ) -> np.ndarray:
        try:
            return self.decoder.step(ids.numpy(), cache, lengths, logits_at)
        except ValueError as error:
            raise UserError(str(error)) from None
        except MemoryError:
            raise
        except Exception as error:  # a graph that could be loaded, and is not what its inputs and outputs say
            raise UserError(f"the graph in {str(self.folder)!r} cannot be run: {first_line(error)}") from None

    def loss(self, ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy; `labels[t]` is the target at position t, −100 is ignored."""
        total, count = torch.zeros(()), 0
        for row in range(ids.shape[0]):  # the logits of one sequence in memory at a time
            mask = None if attention_mask is None else attention_mask[row : row + 1]
            logits = self(ids[row : row + 1], mask)[0]
            total += F.cross_entropy(logits, labels[row].long(), ignore_index=IGNORED, reduction="sum")
            count += int((labels[row] != IGNORED).sum())
        return total / count

    # ----------------------------------------------------------------------------- what modules are asked

    def eval(self) -> Self:
        """It always is."""
        return self

    def train(self, mode: bool = True) -> Self:
        """A graph is not trained."""
        if mode:
            raise UserError("an ONNX export cannot be trained")
        return self

    def to(self, device: torch.device | str) -> Self:
        """On the CPU."""
        if torch.device(device).type != "cpu":
            raise UserError(f"an ONNX export runs on the CPU here, not on {str(device)!r}")
        return self

    def fold(self) -> Self:
        """It is."""
        return self

    def parameters(self) -> Iterator[Tensor]:
        """One tensor, which tells the device."""
        yield torch.empty(0)


def _real_first(ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, np.ndarray | None, Tensor | None]:
    """Rows with their real tokens in front, how many each has, and where each token came from."""
    if attention_mask is None:
        return ids, None, None
    real = attention_mask.bool()
    order = real.long().argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), real.sum(-1).numpy(), order
