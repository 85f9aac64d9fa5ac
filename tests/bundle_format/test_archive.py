"""Archives written and read: by ourselves, by Python's zipfile and by torch."""

import hashlib
import os
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export.pt2_archive._package import PT2ArchiveWriter, load_pt2

from mctl.bundle_format import archive, zip_directory
from mctl.bundle_format.archive import Archive, open_bundle, open_program
from mctl.bundle_format.errors import BundleError, UsageError, WrongKindError

from .samples import program_manifest, write_program

STANDARD = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}


def test_written_and_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    path = tmp_path / "program.pt2"
    pieces = [b"ab", memoryview(b"cd"), b""]
    manifest = write_program(path, [("file", source), ("pieces", pieces), ("empty", b""), ("extra/ü", b"text")])
    wanted = STANDARD | {"file": source.read_bytes(), "pieces": b"abcd", "empty": b"", "extra/ü": b"text"}
    with open_program(path) as opened:
        assert opened.top == "small"
        assert opened.manifest == manifest
        assert {name: opened.read(name) for name in opened.members if not name.endswith("manifest.json")} == wanted
        assert all(entry.offset % 64 == 0 for entry in opened.members.values())
        opened.verify()
        assert opened.digest == hashlib.sha256(opened.read("extra/mctl/manifest.json")).hexdigest()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
    assert {name: member.sha256 for name, member in manifest.members.items()} == digests
    with zipfile.ZipFile(path) as stock:
        assert stock.testzip() is None
        assert {i.filename: stock.read(i) for i in stock.infolist() if "manifest" not in i.filename} == {
            f"small/{name}": data for name, data in wanted.items()
        }
        assert {(i.compress_type, i.date_time) for i in stock.infolist()} == {(0, (1980, 1, 1, 0, 0, 0))}


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    members: list[tuple[str, archive.Data]] = [("b", b"2"), ("a", b"1" * 1000)]
    write_program(tmp_path / "one.pt2", members)
    write_program(tmp_path / "two.pt2", members)
    assert (tmp_path / "one.pt2").read_bytes() == (tmp_path / "two.pt2").read_bytes()


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    write_program(path, [("mctl/weights.safetensors", b"w" * 1000), ("extra/note.txt", b"hello")])
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("mctl/weights.safetensors") == b"w" * 1000
    assert load_pt2(path).extra_files["note.txt"] == "hello"
    assert torch.export.pt2_archive.is_pt2_package(str(path))


def test_we_read_what_torch_writes(tmp_path: Path) -> None:
    path = tmp_path / "stock.pt2"
    with PT2ArchiveWriter(str(path)) as writer:
        writer.write_bytes("data/x", b"x" * 300)
        writer.write_string("extra/empty", "")
    with Archive.open(path) as opened:
        assert opened.read("data/x") == b"x" * 300
        assert opened.read("extra/empty") == b""
        assert opened.read("archive_format") == b"pt2"
        ours = {name: bytes(opened.view(name)) for name in STANDARD}
    assert ours == STANDARD  # what we add to an archive is what this torch adds


def test_an_exported_program_survives(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2).eval()
    torch.export.save(torch.export.export(model, (torch.ones(3, 4),)), tmp_path / "stock.pt2")
    with Archive.open(tmp_path / "stock.pt2") as stock:
        write_program(tmp_path / "program.pt2", [(name, stock.view(name)) for name in stock.members], stock.top)
    again = torch.export.load(tmp_path / "program.pt2").module()
    x = torch.randn(3, 4)
    assert torch.equal(again(x), model(x))


def test_members_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file: a member of 5 GiB, then a small one; only their headers are written."""
    path = tmp_path / "large.pt2"
    size, first = 5 << 30, b"m/large"
    with path.open("wb") as file:
        file.write(zip_directory.local_header(first, size, 0, 0))
        start = file.tell()
        second = start + size
        file.seek(second)
        file.write(zip_directory.local_header(b"m/small", 5, zlib.crc32(b"hello"), second) + b"hello")
        listed = [(first, 0, size, 0), (b"m/small", second, 5, zlib.crc32(b"hello"))]
        file.write(zip_directory.central_directory(listed, file.tell()))
    assert start % 64 == 0
    with Archive.open(path) as opened:
        assert opened.members["large"].size == size
        assert opened.read("small") == b"hello"
        with pytest.raises(BundleError, match="allowed 1000"):
            opened.read("large", 1000)
    with zipfile.ZipFile(path) as stock:
        assert stock.getinfo("m/large").file_size == size
        assert stock.read("m/small") == b"hello"


def test_more_members_than_16_bits() -> None:
    count = 0xFFFF
    directory = zip_directory.central_directory([(b"m/%d" % n, 0, 0, 0) for n in range(count)], 0)
    assert struct.unpack_from("<Q", directory, len(directory) - 22 - 20 - 56 + 32) == (count,)


def test_limits_come_before_the_members_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program.pt2"
    write_program(path)
    for name, limit in (("MAX_MEMBERS", 4), ("MAX_DIRECTORY", 100)):
        with monkeypatch.context() as patched:
            patched.setattr(zip_directory, name, limit)
            patched.setattr(zip_directory, "_read_central", None)
            with pytest.raises(BundleError, match="it has 5 members, allowed"):
                Archive.open(path)


def test_rewrite_keeps_and_replaces(tmp_path: Path) -> None:
    write_program(tmp_path / "a.pt2", [("one", b"1"), ("two", b"2")])
    with Archive.open(tmp_path / "a.pt2") as source:
        archive.rewrite(source, tmp_path / "b.pt2", source.manifest, {"two": b"second", "three": b"3"})
        # in its own place, too: the file that is mapped stays as it is
        archive.rewrite(source, tmp_path / "a.pt2", source.manifest, {"two": b"in place"})
        assert source.read("two") == b"2"
    with Archive.open(tmp_path / "b.pt2") as result:
        assert [result.read(name) for name in ("one", "two", "three")] == [b"1", b"second", b"3"]
        result.verify()
    with Archive.open(tmp_path / "a.pt2") as result:
        assert result.read("two") == b"in place"


def test_what_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    for members in ([("../x", b"")], [("/x", b"")], [("", b"")], [("a", b""), ("a", b"")], [("a/", b"")]):
        with pytest.raises(BundleError, match="cannot write the member"):
            write_program(path, members)
    with pytest.raises(BundleError, match="cannot write the member"):
        write_program(path, [], top="a/b")
    with pytest.raises(BundleError, match="tolerance"):
        manifest = program_manifest()
        broken = {"z": {"rtol": 0, "atol": 0}}
        import msgspec

        document = msgspec.to_builtins(manifest) | {"tolerances": broken}
        archive.write(path, "small", [], msgspec.convert(document, type(manifest)))
    assert list(tmp_path.iterdir()) == []


def test_a_program_is_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "my program.pt2"
    write_program(path)
    with pytest.raises(WrongKindError) as caught:
        open_bundle(path)
    assert caught.value.message == f"`{path}` is a program that is not compiled, not a bundle"
    assert caught.value.hint == f"compile it first: `mctl compile '{path}'`"


def test_verify_of_single_members(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    write_program(path, [("good", b"1" * 100), ("bad", b"2" * 100)])
    data = path.read_bytes()
    assert data.count(b"2" * 100) == 1
    path.write_bytes(data.replace(b"2" * 100, b"2" * 99 + b"3"))
    with Archive.open(path) as opened:
        opened.verify("good")
        for paths in (["bad"], ["good", "bad"], []):
            with pytest.raises(BundleError, match="`bad` does not have the SHA-256"):
                opened.verify(*paths)
        with pytest.raises(BundleError, match="no member `none`"):
            opened.verify("none")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        Archive.open(tmp_path / "none.pt2")
    with pytest.raises(UsageError, match="there is no file"):
        Archive.open(tmp_path / "none" / "none.pt2")
    with pytest.raises(UsageError):
        Archive.open("a\0b")
    with pytest.raises(UsageError):
        Archive.open(tmp_path / ("x" * 300))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path("/dev/zero")):
        with pytest.raises(WrongKindError):
            Archive.open(path)


def test_a_view_outlives_the_archive(tmp_path: Path) -> None:
    write_program(tmp_path / "program.pt2", [("x", b"hello")])
    with Archive.open(tmp_path / "program.pt2") as opened:
        view = opened.view("x")
    assert bytes(view) == b"hello"


PATHS = st.text(st.characters(codec="utf-8", exclude_characters="/\\\x7f", exclude_categories=["Cc"]), min_size=1)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(PATHS.filter(lambda p: p not in (".", "..")).map(lambda p: f"x/{p[:100]}"), st.binary(), max_size=8)
)
def test_any_members_come_back(members: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        write_program(path, members.items())
        with Archive.open(path) as opened:
            opened.verify()
            assert {name: opened.read(name) for name in members} == members
        with zipfile.ZipFile(path) as stock:
            assert {name: stock.read(f"small/{name}") for name in members} == members
