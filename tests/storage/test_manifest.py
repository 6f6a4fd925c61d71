"""One manifest for checkpoints and prepared data, in the two forms that were ever written: no bit changes unnoticed."""

import json
import shutil
from pathlib import Path

import pytest

from skipless.storage import hashing
from skipless.storage.atomic_files import to_json
from skipless.storage.hashing import hash_bytes, hash_file, hash_samples, hash_text, hash_value
from skipless.storage.manifest import Damaged, FileEntry, Manifest

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1_0"


def written(folder, **about):
    """A folder with two files and the manifest that this version writes."""
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(range(200)))
    (folder / "b.json").write_text("{}\n")
    entries = {name: FileEntry.of(folder / name) for name in ("a.bin", "b.json")}
    Manifest({"format": 7, "loss": 1e-05, **about}, entries).write(folder)
    return folder


def written_now(tmp_path):
    return written(tmp_path / "now")


def written_as_prepared_data_by_0_1_0(tmp_path):
    return shutil.copytree(OLD / "corpus", tmp_path / "corpus")


def written_as_a_checkpoint_by_0_1_0(tmp_path):
    return shutil.copytree(OLD / "run" / "checkpoints" / "step-00000008", tmp_path / "step-00000008")


FORMS = [written_now, written_as_prepared_data_by_0_1_0, written_as_a_checkpoint_by_0_1_0]


def check(folder):
    Manifest.read(folder).verify(folder)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(tmp_path, form):
    folder = form(tmp_path)
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    text = json.loads((folder / "manifest.json").read_text())
    assert manifest.content() == {key: value for key, value in text.items() if key not in ("sha256", "checksum")}


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path, form, bits):
    """One bit of each byte, another one from byte to byte; among the slow tests, all of them."""
    folder = form(tmp_path)
    path = folder / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in ((place + more) % 8 for more in range(bits)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(Damaged, match=r"manifest\.json"):
                Manifest.read(folder)
    path.write_bytes(data)
    check(folder)


@pytest.mark.parametrize("form", FORMS)
def test_every_file_is_checked(tmp_path, form):
    folder = form(tmp_path)
    for name, entry in Manifest.read(folder).files.items():
        path = folder / name
        data = path.read_bytes()
        for place in {0, len(data) // 3, len(data) - 1}:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(Damaged, match=f"{name} has changed"):
                check(folder)
        path.write_bytes(data + b"\0")
        with pytest.raises(Damaged, match=f"{name} has {entry.size + 1} bytes, and its manifest says {entry.size}"):
            check(folder)
        path.unlink()
        with pytest.raises(Damaged, match=f"{name} cannot be read: No such file"):
            check(folder)
        path.write_bytes(data)
    check(folder)


@pytest.mark.parametrize("key", ["sha256", "checksum"])
def test_another_number_with_its_own_form_of_the_same_value_is_noticed(tmp_path, key):
    """The hash is over values, and 1e-05 is also 1E-05."""
    folder = written_now(tmp_path)
    content = Manifest.read(folder).content()
    digest = hash_text(to_json(content)) if key == "sha256" else hash_value(content)
    text = to_json({**content, key: digest})
    (folder / "manifest.json").write_text(text)
    check(folder)
    (folder / "manifest.json").write_text(text.replace("1e-05", "1E-05"))
    with pytest.raises(Damaged, match="is not as it was written"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "does not match its own hash"),
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"a": NaN}', "is not JSON"),
        ('{"a": 1e999}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_what_is_no_manifest_is_told(tmp_path, text, reason):
    (tmp_path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Damaged, match=reason):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("files", [None, [1], {"a": 1}, {"a": {"size": -1, "sha256": ""}}, {"a": {"size": 1}}])
def test_files_that_are_none_are_told(tmp_path, files):
    content = {"files": files} if files is not None else {}
    (tmp_path / "manifest.json").write_text(to_json({**content, "sha256": hash_text(to_json(content))}))
    with pytest.raises(Damaged, match="is not a manifest"):
        Manifest.read(tmp_path)


def test_a_file_can_be_checked_by_its_size_by_samples_or_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SAMPLE", 16)
    path, original = tmp_path / "x.bin", bytes(range(200))
    path.write_bytes(original)
    entry = FileEntry.of(path, sampled_from=100)
    small = FileEntry.of(path, sampled_from=201)
    assert entry.sampled == hash_samples(path)
    assert small.sampled is None

    def damage(place):
        path.write_bytes(original[:place] + bytes([original[place] ^ 1]) + original[place + 1 :])

    for place in (0, 100, 199):
        damage(place)
        for depth in ("samples", "all"):
            with pytest.raises(Damaged, match=r"x\.bin has changed"):
                entry.verify(path, depth)
        entry.verify(path, "sizes")
    damage(50)  # between the samples
    entry.verify(path, "samples")
    for one, depth in ((entry, "all"), (small, "samples")):
        with pytest.raises(Damaged, match=r"x\.bin has changed"):
            one.verify(path, depth)
    path.write_bytes(original[:-1])
    with pytest.raises(Damaged, match="199 bytes"):
        entry.verify(path, "sizes")


def test_what_a_file_does_not_have_is_not_written(tmp_path):
    content = json.loads((written_now(tmp_path) / "manifest.json").read_text())
    assert set(content["files"]["a.bin"]) == {"size", "sha256"}
    assert set(content) == {"format", "loss", "files", "sha256"}


def test_hashes(tmp_path):
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "a").write_bytes(b"abc")
    assert hash_bytes(b"abc") == hash_text("abc") == hash_file(tmp_path / "a") == hash_file(str(tmp_path / "a")) == abc
    assert hash_value({"b": 1, "a": 2}) == hash_value({"a": 2, "b": 1}) == hash_text('{"a": 2, "b": 1}')
