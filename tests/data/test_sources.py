import gzip
import json
import os
import sys
import types
from pathlib import Path

import pytest
import zstandard

from skipless.data.sources import SOURCES, PythonStdlib, open_source
from skipless.errors import MissingExtra, UserError


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_standard_library_has_python_files_and_no_installed_packages():
    source = PythonStdlib("")
    files = list(source._files())
    assert len(files) > 500
    assert all(path.suffix == ".py" for path in files)
    folders = {folder for path in files for folder in path.relative_to(source.root).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__"}
    assert files == sorted(files)
    assert next(iter(source)) == files[0].read_text(encoding="utf-8")
    assert source.fingerprint() == open_source("python-stdlib").fingerprint()


def test_globs(tmp_path):
    for name in ("b.py", "a/z.py", "a/b/c.py", "a/b/note.txt", ".hidden/x.py"):
        put(tmp_path / name, name)

    def read(glob):
        return list(open_source(f"files:{tmp_path}/{glob}"))

    assert read("*.py") == ["b.py"]
    assert read("**/*.py") == ["b.py", "a/z.py", "a/b/c.py"]
    assert sorted(read("**")) == ["a/b/c.py", "a/b/note.txt", "a/z.py", "b.py"]
    assert read("a/?/[a-m]*.py") == ["a/b/c.py"]
    assert read("a/z.py") == ["a/z.py"]


def test_globs_are_relative_to_the_working_folder_and_survive_circular_links(tmp_path, monkeypatch):
    put(tmp_path / "a" / "x.py", "x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert list(open_source("files:**/*.py")) == ["x"]


def test_a_file_with_a_wildcard_in_its_name_can_be_named(tmp_path):
    path = put(tmp_path / "a[1].txt", "one")
    assert list(open_source(f"files:{path}")) == ["one"]


def test_undecodable_bytes_are_replaced(tmp_path):
    put(tmp_path / "x.txt", b"a\xffb\r\n")
    assert list(open_source(f"files:{tmp_path}/x.txt")) == ["a\ufffdb\r\n"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines(tmp_path, suffix):
    content = b'{"text": "one", "code": "x"}\n\n{"text": "zwei \\u00e9", "code": "y"}'
    frames = zstandard.compress(content[:20]) + zstandard.compress(content[20:])
    packed = {"": content, ".gz": gzip.compress(content), ".zst": frames}[suffix]
    path = put(tmp_path / f"data.jsonl{suffix}", packed)
    assert list(open_source(f"jsonl:{path}")) == ["one", "zwei é"]
    assert list(open_source(f"jsonl:{tmp_path}/*#code")) == ["x", "y"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_a_truncated_archive_is_an_error(tmp_path, suffix, keep):
    content = b"".join(json.dumps({"text": os.urandom(20).hex()}).encode() + b"\n" for _ in range(500))
    packed = gzip.compress(content) if suffix == ".gz" else zstandard.compress(content)
    path = put(tmp_path / f"data.jsonl{suffix}", packed[: int(len(packed) * keep)])
    with pytest.raises(UserError, match=r"data\.jsonl"):
        list(open_source(f"jsonl:{path}"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_no_archive_is_an_error(tmp_path, suffix):
    path = put(tmp_path / f"data.jsonl{suffix}", b'{"text": "plain"}\n')
    with pytest.raises(UserError, match=r"data.jsonl.* cannot be read"):
        list(open_source(f"jsonl:{path}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 2: not valid JSON"),
        (b"\xff\xfe", "line 2: not valid JSON"),
        (b"[" * 100_000, "line 2: not valid JSON"),
        (b"[1]", "line 2: expected a JSON object, got list"),
        (b'{"txet": "a", "id": 1}', "line 2: no field 'text'; fields: txet, id; did you mean 'txet'"),
        (b'{"text": null}', "line 2: field 'text' holds NoneType, expected a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = put(tmp_path / "data.jsonl", b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"data\.jsonl") as caught:
        list(open_source(f"jsonl:{path}"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("file:x", "unknown source 'file'; known: python-stdlib, files, jsonl, hf, corpus; did you mean 'files'"),
        ("files:", "source 'files' needs an argument: files:GLOB"),
        ("jsonl:#text", "source 'jsonl' needs an argument"),
        ("python-stdlib:x", "takes no argument"),
    ],
)
def test_a_bad_name_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        open_source(spec)


def test_no_match_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"no file matches .*: folder '.*/nowhere' does not exist"):
        open_source(f"files:{tmp_path}/nowhere/*.py").fingerprint()
    with pytest.raises(UserError, match=r"it is a folder; did you mean"):
        list(open_source(f"files:{tmp_path}"))


def test_a_fingerprint_follows_the_files(tmp_path):
    path = put(tmp_path / "x.txt", "one")
    source = open_source(f"files:{tmp_path}/*.txt")
    first = source.fingerprint()
    assert source.fingerprint() == first
    os.utime(path, ns=(1, 1))
    touched = source.fingerprint()
    put(tmp_path / "y.txt", "two")
    assert len({first, touched, source.fingerprint()}) == 3
    lines = put(tmp_path / "z.jsonl", "{}")
    assert open_source(f"jsonl:{lines}#a").fingerprint() != open_source(f"jsonl:{lines}#b").fingerprint()


def test_hub_without_datasets_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"datasets.*skipless\[hub\]"):
        list(open_source("hf:some/set"))


def test_hub_streams_the_named_part(monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        if args[0] == "missing":
            raise FileNotFoundError("no such data set\nand much more")
        return iter([{"content": "one"}, {"content": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(open_source("hf:me/set:small@valid#content")) == ["one", "two"]
    assert calls == [(("me/set", "small"), {"split": "valid", "streaming": True})]
    with pytest.raises(UserError, match=r"record 1: no field 'text'; fields: content"):
        list(open_source("hf:me/set"))
    with pytest.raises(UserError, match=r"cannot be opened: no such data set$"):
        list(open_source("hf:missing"))
    assert open_source("hf:me/set@a").fingerprint() != open_source("hf:me/set@b").fingerprint()


def test_every_source_is_in_the_registry():
    assert list(SOURCES) == ["python-stdlib", "files", "jsonl", "hf", "corpus"]
