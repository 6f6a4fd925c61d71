"""Named tensors as safetensors files: written from where they lie and hashed on the way, read by rows."""

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.storage.manifest import FileEntry

TENSORS = ".safetensors"

_CHUNK = 4 << 20  # large enough that hashing and writing spend their time outside Python's lock

# The names of the safetensors format, little-endian.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

NamedTensors = Mapping[str, Tensor]


@contextmanager
def io_errors_said() -> Iterator[None]:
    """A block in which what the system said to a library written in Rust becomes an OSError.

    Those of Hugging Face raise their own kinds for it: safetensors a SafetensorError, tokenizers a bare Exception.
    """
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


Rows = Callable[[str, tuple[int, ...]], slice | None]
"""Which rows are wanted of a tensor, by its name and its shape; None for all of it."""


def read_rows(name: str, files: list[Any], rows: Rows) -> Tensor:
    """The wanted rows of a tensor whose rows lie in one or several files.

    A copy, for what safetensors returns may be the file itself, mapped: it changes, or ends in SIGBUS, with it.
    """
    shapes = [tuple(file.get_slice(name).get_shape()) for file in files]
    length = sum(shape[0] for shape in shapes) if shapes[0] else 0
    wanted = rows(name, (length, *shapes[0][1:]) if shapes[0] else ())
    if wanted is None and len(files) == 1:
        return files[0].get_tensor(name).clone()
    start, stop = (0, length) if wanted is None else (wanted.start, wanted.stop)
    parts, before = [], 0
    for file, (count, *_) in zip(files, shapes, strict=True):
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high or not parts:  # an empty part knows the type
            parts.append(file.get_slice(name)[min(low, count) : max(high, min(low, count))])
        before += count
    return torch.cat(parts)


def write_tensors(path: Path, named: NamedTensors) -> FileEntry:
    """Write a safetensors file, hashing on the way: header length (8 bytes), header (JSON), bytes of the tensors.

    Each tensor is written from where it lies, in chunks, without a copy of the whole and without a second reading for
    the hash. Tensors that share memory are written once for each name. When this returns, the file is on the disk.
    """
    # Wide types first, so that every tensor starts at a multiple of its item size; the header is padded to 8 for that.
    order = sorted(named, key=lambda name: (-named[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = named[name]
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise UserError(f"tensor {name!r} of type {tensor.dtype} cannot be stored as safetensors")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (struct.pack("<Q", len(text)), text, *(named[name] for name in order)):
            data = _bytes_of(part) if isinstance(part, Tensor) else memoryview(part)
            for at in range(0, len(data), _CHUNK):
                digest.update(data[at : at + _CHUNK])
                file.write(data[at : at + _CHUNK])
        file.flush()
        os.fsync(file.fileno())  # by the open file: should the main process give up, the name is gone
    return FileEntry(size=8 + len(text) + end, sha256=digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
