"""Run an ONNX export of a causal model, with a cache: numpy and onnxruntime are all it needs, and tokenizers for text.

    from decoder import Decoder
    model = Decoder("exported")                      # the folder that `skipless export --to onnx` wrote
    for tokens in model.generate([[5, 8, 2], [7]], 20, temperature=0):
        print(tokens)                                # a token for each prompt

The file stands by itself: it can be copied to where neither PyTorch nor this package is. With `tokenizers` installed it
also writes text, `python decoder.py exported "def main("`.

Each layer's cache is a buffer that is input and output at once, so that tokens are appended without copying. Buffers
are longer than needed, and grow when they are full.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PLACES = 256
"""Buffers have a multiple of so many places."""

PREFILL = 512
"""Tokens of one prompt that go through the model at a time."""


class Cache:
    """What is remembered of a batch of sequences."""

    def __init__(self, batch_size: int, states: dict[str, tuple[str, list[Any]]], max_len: int) -> None:
        self.batch_size, self.max_len = batch_size, max_len
        self.lengths = np.zeros(batch_size, np.int32)
        """How many tokens each sequence has."""
        self._states, self.places = states, 0
        self.buffers: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        self.held: dict[str, Any] = {}
        self.device: Any = None
        """For those who ask where the tokens should be."""
        self._binding: Any = None
        self._bound: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is remembered."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    def make_room(self, places: int) -> None:
        """Buffers for at least so many tokens, with what is remembered."""
        if places <= self.places:
            return
        if places > self.max_len:
            raise ValueError(f"the cache holds {self.max_len} tokens: {places} do not fit")
        self.places, old = min(self.max_len, -(-places // PLACES) * PLACES), self.buffers
        sizes = {"batch": self.batch_size, "places": self.places}
        buffers = {}
        for name, (dtype, axes) in self._states.items():
            buffers[name] = np.zeros([sizes.get(axis, axis) for axis in axes], dtype)
            if name in old:
                buffers[name][tuple(slice(0, size) for size in old[name].shape)] = old[name]
        self.hold(buffers)

    def row(self, number: int) -> "Cache":
        """One sequence, in the same memory."""
        one = Cache(1, self._states, self.max_len)
        one.places, one.lengths = self.places, self.lengths[number : number + 1]
        one.hold({name: buffer[number : number + 1] for name, buffer in self.buffers.items()})
        return one

    def hold(self, buffers: dict[str, np.ndarray]) -> None:
        """Remember in these buffers."""
        self.buffers, self._binding = buffers, None
        self.values = {name: as_value(one) for name, one in buffers.items()}

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        self.lengths[:] = 0
        for name, buffer in self.buffers.items():
            if name.startswith("sum."):
                buffer[:] = 0


class Decoder:
    """An export in ONNX Runtime."""

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        folder = Path(folder)
        info = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "onnx" not in info:
            raise ValueError(f"{str(folder)!r} is no ONNX export with a cache: skipless export RUN OUT --to onnx")
        self.info: dict[str, Any] = info
        self.max_len: int = info["max_seq_len"]
        self.vocab_size: int = info["vocab_size"]
        import onnxruntime

        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        for key, value in SETTINGS.items():
            options.add_session_config_entry(key, value)
        path = str(folder / "model.onnx")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        types = {"tensor(float)": "float32", "tensor(int8)": "int8"}
        past = [one for one in self.session.get_inputs() if one.name.startswith("past_") and "." in one.name]
        self._states = {one.name.removeprefix("past_"): (types[one.type], one.shape) for one in past}

    def new_cache(self, batch_size: int = 1, max_len: int | None = None) -> Cache:
        """Memory for so many sequences of at most `max_len` tokens."""
        return Cache(batch_size, self._states, self.max_len if max_len is None else max_len)

    def step(
        self,
        ids: np.ndarray,
        cache: Cache,
        lengths: np.ndarray | None = None,
        logits_at: np.ndarray | None = None,
    ) -> np.ndarray:
        """Logits (B, n, V) of new tokens (B, t) that follow a cache, which remembers them.

        Rows may be padded on the right: `lengths` (B,) says how many of their tokens are real. `logits_at` (B, n) are
        the new tokens whose logits are wanted, by default the last real one of each row.
        """
        ids = np.ascontiguousarray(ids, np.int64)
        batch, new = ids.shape
        if batch != cache.batch_size:
            raise ValueError(f"the cache is for {cache.batch_size} sequences, got {batch}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise ValueError(f"token ids must lie in 0…{self.vocab_size - 1}, got {ids.min()}…{ids.max()}")
        real = np.full(batch, new, np.int32) if lengths is None else np.asarray(lengths, np.int32)
        if new == 0 or not ((real >= 1) & (real <= new)).all():
            raise ValueError(f"each row needs 1…{new} new tokens, got {real.tolist()}")
        wanted = np.ascontiguousarray((real - 1)[:, None] if logits_at is None else logits_at, np.int64)
        cache.make_room(cache.length + new)
        if batch > 1 and new > 1 and cache.length:  # the graph reads on from a past for one sequence at a time
            logits = np.concatenate([self._run_row(cache, row, ids, real, wanted) for row in range(batch)])
        else:
            logits = self._run(cache, ids, real, wanted)
        cache.lengths += real
        return logits

    def _run_row(self, cache: Cache, row: int, ids: np.ndarray, real: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """One row without its padding, whose logits mean nothing."""
        one = slice(row, row + 1)
        return self._run(cache.row(row), ids[one, : real[row]], real[one], np.minimum(wanted[one], real[row] - 1))

    def _run(self, cache: Cache, ids: np.ndarray, real: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """One pass of the graph, its states read and written where they lie."""
        inputs = {"input_ids": ids, "past_lengths": cache.lengths, "new_lengths": real, "logits_at": wanted}
        bound = cache._bound
        if cache._binding is None or any(bound[name].shape != value.shape for name, value in inputs.items()):
            cache._binding = binding = self.session.io_binding()
            cache._bound = bound = {name: value.copy() for name, value in inputs.items()}
            bound["logits"] = np.empty((*wanted.shape, self.vocab_size), np.float32)
            cache.held = held = {name: as_value(value) for name, value in bound.items()}
            for name in inputs:
                binding.bind_ortvalue_input(name, held[name])
            binding.bind_ortvalue_output("logits", held["logits"])
            for name in cache.buffers:
                binding.bind_ortvalue_input(f"past_{name}", cache.values[name])
                binding.bind_ortvalue_output(f"present_{name}", cache.values[name])
        for name, value in inputs.items():
            bound[name][...] = value
        self.session.run_with_iobinding(cache._binding)
        return bound["logits"].copy()

    def read(self, prompts: Sequence[Sequence[int]], cache: Cache) -> np.ndarray:
        """Put prompts of any lengths into an empty cache: logits (B, V) of what follows each."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ids = np.zeros((len(prompts), lengths.max()), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        if len(prompts) > 1:
            return self.step(ids, cache, lengths)[:, 0]
        logits = np.empty((1, 0))
        for start in range(0, ids.shape[1], PREFILL):
            logits = self.step(ids[:, start : start + PREFILL], cache)[:, 0]
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n_new: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[list[int]]:
        """The next token of every prompt, up to `n_new` times or until the context is full."""
        if not prompts or not all(prompts):
            raise ValueError("a prompt is empty: a causal model needs at least one token to continue from")
        cache, random = self.new_cache(len(prompts)), np.random.default_rng(seed)
        logits = self.read([list(prompt)[-self.max_len :] for prompt in prompts], cache)
        for number in range(n_new):
            new = [pick(row, random, temperature, top_k, top_p) for row in logits]
            yield new
            if number == n_new - 1 or cache.length == self.max_len:
                return
            logits = self.step(np.array(new)[:, None], cache)[:, 0]


def as_value(array: np.ndarray) -> Any:
    """An array as ONNX Runtime has one, in the same memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


SETTINGS: dict[str, str] = {}
"""Settings of every session."""


def pick(
    logits: np.ndarray, random: np.random.Generator, temperature: float, top_k: int | None, top_p: float | None
) -> int:
    """One token from (V,) logits; temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits)[:top_k]
    weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / temperature)
    weights /= weights.sum()
    if top_p is not None:  # the fewest that together have this probability
        weights = weights[: int(np.searchsorted(np.cumsum(weights), top_p)) + 1]
        weights /= weights.sum()
    return int(order[random.choice(len(weights), p=weights)])


def main(folder: str, prompt: str, n_new: int = 64) -> None:
    """Write what follows a prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    new = [token for (token,) in Decoder(folder).generate([ids], n_new, temperature=0.8, top_k=50)]
    sys.stdout.write(prompt + tokenizer.decode(new) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
