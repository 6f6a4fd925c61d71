"""What can happen to a file or a folder, for `malformed.py`: drawn from a generator, so that a seed says it all."""

import contextlib
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from skipless.storage.manifest import FileEntry, Manifest

DEEP = 100_000

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -0.0, 1e308, 10**12, 2**63, 10**30, "", "x", "x" * 5000, "\0", "\ud800", "ä"),
    *(
        [],
        {},
        [[]],
        [1],
        {"a": 1},
        [None],
        float("nan"),
        float("inf"),
        "~nouser/x",
        "../../..",
        "files:/",
        "sas:",
        "auto",
    ),
]


def damage(rng: random.Random, path: Path) -> None:
    """Something that can happen to a file."""
    kinds: list[Callable[[random.Random, Path], None]] = [damage_bytes, damage_bytes, replace_file]
    if path.is_dir() and not path.is_symlink():
        replace_file(rng, path)
        return
    if path.suffix in (".json", ".jsonl"):
        kinds += [damage_json] * 4
    elif path.name.endswith(".jsonl.gz"):
        kinds += [damage_gzip] * 4
    elif path.suffix == ".log":
        kinds += [damage_json] * 2
    elif path.suffix == ".yaml":
        kinds += [damage_yaml] * 4
    elif path.suffix in (".tsv", ".csv"):
        kinds += [damage_table] * 6
    elif path.suffix == ".py":
        kinds += [damage_python] * 6
    elif path.suffix == ".onnx":
        kinds += [damage_graph] * 5
    elif path.suffix == ".safetensors":
        kinds += [damage_tensors] * 5
    rng.choice(kinds)(rng, path)


def damage_bytes(rng: random.Random, path: Path) -> None:
    """Truncated, torn, flipped, mixed with bytes that are not text, or something else altogether."""
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    flipped = bytearray(data or b"x")
    flipped[min(at, len(flipped) - 1)] ^= 1 << rng.randrange(8)
    bits = bytes(rng.randrange(256) for _ in range(200))
    path.write_bytes(
        rng.choice(
            [
                b"",
                data[:at],
                bytes(flipped),
                data[:at] + b"\xff\xfe\xc3" + data[at:],
                data[:at] + b"\0" * 20 + data[at:],
                b"\xef\xbb\xbf" + data,
                data + b"\nGr\xfc\xdfe\n",
                data + data,
                bits,
                b"\0" * 100,
                b"\n" * 50,
                b"[" * DEEP,
                b'{"a":' * DEEP,
                b"x" * 1_000_000,
                data.replace(b"\n", b"\r\n"),
                "\n".join(rng.sample(lines := data.decode("latin-1").splitlines(), len(lines))).encode("latin-1"),
            ]
        )
    )


def replace_file(rng: random.Random, path: Path) -> None:
    """Gone, or a folder, a pipe, a device, a link to nowhere, to itself, or to another kind of file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind = rng.randrange(8)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind in (3, 4, 5, 6):
        path.symlink_to(["/dev/zero", path.name, "nowhere", "/dev/null"][kind - 3])
    elif kind == 7:
        path.write_bytes(b"")


def damage_json(rng: random.Random, path: Path) -> None:
    """A value of another type, a key too many or too few, in one of its lines if it has several."""
    text = path.read_text(encoding="utf-8")
    whole = path.suffix == ".json"
    lines = [text] if whole else text.splitlines()
    if not lines:
        path.write_text("{}\n")
        return
    at = rng.randrange(len(lines))
    lines[at] = changed_json(rng, lines[at])
    path.write_text("\n".join(lines) + ("" if whole or rng.random() < 0.2 else "\n"))


def changed_json(rng: random.Random, text: str) -> str:
    """JSON with a part that is not as it was."""
    try:
        content = json.loads(text)
    except ValueError:
        return text[: rng.randrange(len(text) + 1)]
    places = list(_places(content))
    if rng.random() < 0.1 or not places:
        return json.dumps(rng.choice(ODD_VALUES))
    holder, key = rng.choice(places)
    how = rng.randrange(4)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder["unknown"] = rng.choice(ODD_VALUES)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(content)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(pairs):
        yield content, key
        yield from _places(value)


def damage_gzip(rng: random.Random, path: Path) -> None:
    """A line of a compressed file."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = changed_json(rng, lines[at])
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


def damage_yaml(rng: random.Random, path: Path) -> None:
    """Aliases, tags, depth, dates that are not, other types."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    text = path.read_text(encoding="utf-8")
    key = rng.choice([line.partition(":")[0] for line in text.splitlines() if ":" in line] or ["x"])
    odd = json.dumps(rng.choice(ODD_VALUES))
    path.write_text(
        rng.choice(
            [
                bomb,
                "a: &a {b: *a}",
                f"{key}: !!python/object/apply:os.system ['true']",
                f"{key}: 2001-99-99",
                f"{key}: {{" * 2000,
                "- 1\n- 2\n",
                "5",
                f"{text}{key}: {odd}\n",
                f"{key}: {odd}\n",
                f"1: {odd}\n",
                f"{text}unknown: {odd}\n",
                f"? [a]\n: {odd}",
                "--- {}\n--- {}",
                f"{key}: {'9' * 5000}",
            ]
        )
    )


def damage_table(rng: random.Random, path: Path) -> None:
    """Ragged rows, answers that are none, other columns."""
    between = "," if path.suffix == ".csv" else "\t"
    lines = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(lines))
    fields = lines[at].split(between)
    part = rng.randrange(len(fields))
    values = ["", "2", "-1", "nan", "\0", "x" * 100_000, "\u2028", "\ufeff", "one two " * 500, "\x0c", "1.0"]
    values += ["--5", "9" * 5000, '"', '""', '"x" y', "1e999", between, " ", "\ud800", "²"]
    changes = [
        lambda: fields.pop(part),
        lambda: fields.insert(part, rng.choice(values)),
        lambda: fields.__setitem__(part, rng.choice(values)),
        lambda: fields.clear(),
        lambda: lines.clear(),
        lambda: fields.reverse(),
    ]
    rng.choice(changes)()
    if lines:
        lines[at] = between.join(fields)
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogatepass"))


def damage_tensors(rng: random.Random, path: Path) -> None:
    """Weights of other shapes, types and names, not finite, or with a header that lies."""
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    how = rng.randrange(9)
    if how == 0:
        del tensors[name]
    elif how == 1:
        tensors["model.unknown"] = value
    elif how in (2, 3):
        tensors[name] = np.full_like(value, [np.nan, np.inf][how - 2] if value.dtype.kind == "f" else 0)
    elif how == 4:
        tensors[name] = np.concatenate([value.reshape(-1)] * 2)
    elif how == 5:
        tensors[name] = value.astype(np.int64)
    elif how == 6:
        tensors[name] = np.zeros((0, 3), np.float32)
    elif how == 7:
        tensors = {}
    save_file(tensors, path)
    if how == 8:
        header = rng.choice(
            [b"{}", b"[]", b'{"a":' * 1000, b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": [0, 9]}}']
        )
        path.write_bytes(rng.choice([len(header), 2**62, 2**31]).to_bytes(8, "little") + header + b"\0" * 16)


def reseal(checkpoint: Path) -> None:
    """Make a manifest that agrees with whatever the files of a checkpoint hold now."""
    with contextlib.suppress(Exception):
        about = dict(Manifest.read(checkpoint).about)
        names = [path.name for path in checkpoint.iterdir() if path.name != "manifest.json" and path.is_file()]
        Manifest(about, {name: FileEntry.of(checkpoint / name) for name in names}).write(checkpoint)


def odd_tokenizer(rng: random.Random, path: Path) -> None:
    """A tokeniser of another kind."""
    from tokenizers import Tokenizer, models

    vocab = {"[UNK]": 0, "alpha": rng.choice([1, 7, 10**6])}
    kinds = [
        models.WordLevel(vocab, unk_token="[UNK]"),
        models.Unigram([("[UNK]", 0.0), ("a", -1.0)], unk_id=0),
        models.BPE(),
        models.WordPiece(vocab, unk_token="[UNK]"),
    ]
    Tokenizer(rng.choice(kinds)).save(str(path))


def damage_python(rng: random.Random, path: Path) -> None:
    """A plugin that is no Python, that fails or ends the process while it is loaded, or whose part does not fit."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    cut = "\n".join(lines[: rng.randrange(len(lines))])
    forward = "        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8) * self.weight"
    wrong = ["None", "x.sum()", "x[..., :-1]", "x.double()", "x.nan_to_num(nan=1) * float('nan')", "5", "[x]", "x, x"]
    path.write_text(
        rng.choice(
            [
                cut,
                "",
                "raise ValueError('x' * 5000)",
                "raise BaseException",
                "import sys; sys.exit(0)",
                "import sys; sys.exit('x' * 5000)",
                "import nothing_of_this_name",
                "def f():\n    f()\nf()",
                "(" * 3000,
                "\0",
                f"# coding: rot13\n{text}",
                text + text,
                text.replace('"norm", "own"', '"norm", "rms"'),
                text.replace('"norm", "own"', '"norm", 5'),
                text.replace('"norm", "own"', '"nothing", "own"'),
                text.replace('"norm", "own"', '"mixing", "own"'),
                text.replace('"pre-ln-own"', '"pre-ln"'),
                text.replace('"pre-ln-own"', "None"),
                text.replace("gt=0", "gt=2"),
                text.replace("float = Field(1.0", "float = Field('x' * 5000"),
                text.replace("torch.empty(width)", "torch.empty(width + 1)"),
                text.replace("width: int, ", ""),
                text.replace("reset_parameters", "reset"),
                *(text.replace(forward, f"        return {value}") for value in wrong),
                text.replace(forward, "        raise RuntimeError('x' * 5000)"),
            ]
        )
    )


def damage_graph(rng: random.Random, path: Path) -> None:
    """An ONNX file with other weights, types, names or nodes."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path)
    except DecodeError:  # damaged before
        return
    nodes, tensors = graph.graph.node, graph.graph.initializer
    how = rng.randrange(8)
    if how == 0:
        del nodes[rng.randrange(len(nodes))]
    elif how == 1:
        nodes[rng.randrange(len(nodes))].op_type = rng.choice(["Nothing", "Add", "Identity"])
    elif how == 2:
        del tensors[rng.randrange(len(tensors))]
    elif how == 3:
        tensor = rng.choice(list(tensors))
        tensor.raw_data = b"\xff" * len(tensor.raw_data)
    elif how == 4:
        del rng.choice(list(tensors)).dims[:]
    elif how == 5:
        rng.choice(list(graph.graph.input)).name = "other"
    elif how == 6:
        del graph.graph.output[rng.randrange(len(graph.graph.output))]
    else:
        graph.opset_import[0].version = rng.choice([1, 10_000])
    path.write_bytes(graph.SerializeToString())
