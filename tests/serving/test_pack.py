"""`mctl pack`: what it writes serves without Python, torch and libraries of the system, and nothing is lost or left."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.elffile import ELFFile

from mctl.bundle_format import archive as archives
from mctl.bundle_format.dependencies import Dependencies, read_dependencies
from mctl.bundle_format.errors import HostError, PackError, UsageError
from mctl.runner.packing import check as pack_check
from mctl.runner.packing import image
from mctl.runner.packing import libraries as pack_libraries
from mctl.runner.packing import output as pack_output
from mctl.runner.packing.pack import PackOptions
from mctl.runner.packing.pack import pack as pack_bundle

from ..conftest import mctl, succeed
from .conftest import Mlp
from .server import Answer, infer_json, outputs_of

C_LIBRARY = ["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"]


def changed(bundle: Path, path: Path, extra: dict[str, bytes] | None = None, **changes: object) -> Path:
    with archives.open_bundle(bundle) as archive:
        archives.rewrite(archive, path, msgspec.structs.replace(archive.manifest, **changes), extra or {})
    return path


@pytest.fixture(scope="module")
def standalone(mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(mlp_bundle, tmp_path_factory.mktemp("bundle") / "mlp.pt2", standalone=True)


@pytest.fixture(scope="module")
def packed(standalone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("packed") / "a dist"
    told = succeed("pack", standalone, "-o", folder, "--dockerfile").stdout
    assert "golden cases as stored" in told
    return folder


def pack_quickly(bundle: Path, output: Path) -> None:
    """Untried, in this process."""
    pack_bundle(bundle, output, PackOptions(check=False), print)


# --- a root folder that holds the C library, and nothing else ---------------------------------------------------------


def make_root(root: Path, program: Path) -> Path:
    """The loader that `program` names and the C library, where this machine has them."""
    with program.open("rb") as file:
        interpreter = next(s for s in ELFFile(file).iter_segments() if s["p_type"] == "PT_INTERP").get_interp_name()
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    paths = [re.search(rf"^\s*{re.escape(name)} .*64.* => (\S+)", told, re.MULTILINE) for name in C_LIBRARY]
    for path in [interpreter, *(str(found[1]) for found in paths if found)]:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    (root / "proc").mkdir()
    return root


@contextmanager
def served_in(root: Path, words: list[str], user: str) -> Iterator[str]:
    """A server in `root` as its whole world; its URL. It has to end with 0. Without root's rights, as the one user
    that a user namespace has."""
    spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if os.getuid() == 0 else ["--map-root-user"])]
    become = [f"--userspec={user}"] if os.getuid() == 0 else []
    script = 'mount -t proc proc "$0/proc" && exec "$@"'
    command = ["unshare", *spaces, "sh", "-c", script, root, "chroot", *become, root, *words]
    process = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert process.stderr is not None
    said, url = [], ""
    for line in process.stderr:
        said.append(line)
        if line.startswith("listening on "):
            url = line.split()[-1]
        if line.startswith("ready: "):
            break
    else:
        process.wait()
        raise AssertionError(f"this machine allows no root of its own, or the server failed: {said}")
    yield url.replace("0.0.0.0", "127.0.0.1")
    (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(inside), signal.SIGTERM)
    assert process.wait(40) == 0, process.stderr.read()


@pytest.mark.parametrize("way", ["standalone", "libtorch"])
def test_in_a_bare_root(way: str, packed: Path, mlp_bundle: Path, mlp: Mlp, tmp_path: Path) -> None:
    """What the Dockerfile copies, started as it says by its user, gives eager's numbers: no Python, torch, shell."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o755)
    folder = tmp_path / "dist"
    if way == "libtorch":
        succeed("pack", mlp_bundle, "-o", folder, "--dockerfile", "--with-libtorch", "--no-check")
    else:
        shutil.copytree(packed, folder)
    steps = dict(line.split(" ", 1) for line in (folder / "Dockerfile").read_text().splitlines() if line[:1].isupper())
    source, place = steps["COPY"].split()
    assert source == "."
    make_root(root, folder / "mctl-runner")
    (folder).rename(root / place.lstrip("/"))
    files = {path.name for path in root.rglob("*") if path.is_file()}
    assert not any("python" in name for name in files) and ("libtorch_cpu.so" in files) == (way == "libtorch")
    for ancestor in [tmp_path, *tmp_path.parents][:3]:
        ancestor.chmod(ancestor.stat().st_mode | 0o055)
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    with served_in(root, [*json.loads(steps["ENTRYPOINT"]), "--port", "0"], steps["USER"]) as url:
        sent = urllib.request.Request(f"{url}/v2/models/mlp/infer", json.dumps(infer_json(x=x)).encode())
        with urllib.request.urlopen(sent, timeout=60) as answer:
            got = outputs_of(Answer(answer.status, {}, answer.read()))
    np.testing.assert_allclose(got["output"], mlp(x), rtol=1e-4, atol=1e-5)


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_the_script(packed: Path, tmp_path: Path) -> None:
    """By a link, from elsewhere: it finds its folder, whose name has a blank, and hands the options on."""
    link = tmp_path / "my server"
    link.symlink_to(packed / "serve.sh")
    (tmp_path / "libgomp.so.1").write_text("no library")
    environment = {"PATH": os.defpath, "LD_LIBRARY_PATH": str(tmp_path)}
    for shell in ([], ["sh"], ["bash", "--posix"]):
        done = subprocess.run([*shell, link, "--bogus", "1"], cwd="/", capture_output=True, text=True, env=environment)
        assert "no such option: `--bogus`" in done.stderr
    done = subprocess.run([link, "--port", "7 7"], cwd="/", capture_output=True, text=True, env=environment)
    assert "`--port` is `7 7`" in done.stderr
    with subprocess.Popen([link, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = []
        while not (said and said[-1].startswith("ready: ")):
            said.append(process.stderr.readline())
            assert said[-1], said
        process.terminate()
    assert process.returncode == 0


def test_files_and_modes(packed: Path) -> None:
    programs = {"mctl-runner", "serve.sh"}
    for path in packed.rglob("*"):
        wanted = 0o755 if path.is_dir() or path.name in programs else 0o644
        assert path.stat().st_mode & 0o777 == wanted, path
    assert packed.stat().st_mode & 0o777 == 0o755
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=packed, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    unlisted = {p.relative_to(packed).as_posix() for p in packed.rglob("*") if p.is_file()} - {"SHA256SUMS"}
    assert unlisted == {line.split("  ")[1] for line in (packed / "SHA256SUMS").read_text().splitlines()}


def test_the_bill_of_materials(packed: Path, standalone: Path) -> None:
    """Valid by CycloneDX's own schema; every file of code and the model with its digest, version and licence."""
    text = (packed / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(text) is None
    bill = json.loads(text)
    parts = {part["name"]: part for part in bill["components"]}
    code = {path.name for path in packed.iterdir() if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"}
    assert code | {"model.pt2"} <= parts.keys()
    for name in code | {"model.pt2"}:
        assert parts[name]["version"]
        digest = hashlib.sha256((packed / name).read_bytes()).hexdigest()
        assert parts[name]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert {name: parts[name]["licenses"][0]["expression"] for name in code} == {
        "mctl-runner": "MIT",
        "libmctl_shim.so": "MIT",
        **dict.fromkeys(code - {"mctl-runner", "libmctl_shim.so"}, "GPL-3.0-or-later WITH GCC-exception-3.1"),
    }
    model = parts["model.pt2"]
    assert model["type"] == "machine-learning-model" and model["bom-ref"] == "model.pt2"
    assert (packed / "model.pt2").read_bytes() == standalone.read_bytes()
    needs = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert "libmctl_shim.so" in needs["model.pt2"] and "libgomp.so.1" in needs["libmctl_shim.so"]


def test_licences(packed: Path) -> None:
    """A text or an address for each work, also for those that are compiled in."""
    listed = (packed / "licenses" / "LIST").read_text().splitlines()
    works = {line.split(": ")[0].rpartition(" ")[0]: line.split(": ", 2)[1:] for line in listed}
    assert {"mctl", "Boost", "PyTorch headers", "GCC run-time libraries"} <= works.keys()
    for expression, where in works.values():
        assert expression
        assert where.startswith("https://") or any((packed / "licenses" / where).iterdir())
    assert "MIT License" in (packed / "licenses" / "mctl" / "LICENSE").read_text()


def test_the_oldest_glibc_is_told(standalone: Path, tmp_path: Path) -> None:
    """By readelf: the newest version that a packed file, or the code in the bundle, asks of the C library."""
    told = json.loads(succeed("pack", standalone, "-o", tmp_path / "dist", "--no-check", "--json").stdout)
    with archives.open_bundle(standalone) as archive:
        for variant in archive.manifest.variants:
            (tmp_path / f"{variant.name}.so").write_bytes(archive.view(variant.library))
    code = [tmp_path / "dist" / "mctl-runner", *tmp_path.rglob("*.so*")]
    found = subprocess.run(["readelf", "-VW", *code], capture_output=True, text=True, check=True).stdout
    newest = max(tuple(map(int, number.split("."))) for number in re.findall(r"Name: GLIBC_([\d.]+)", found))
    assert told["glibc"] == ".".join(map(str, newest))
    assert told["libraries"] == ["libgcc_s.so.1", "libgomp.so.1", "libmctl_shim.so", "libstdc++.so.6"]
    assert told["trial"] is None and sum(told["sizes"].values()) == told["bytes"]
    assert told["bytes"] == sum(path.stat().st_size for path in (tmp_path / "dist").rglob("*") if path.is_file())


# --- refusals, and what stays -----------------------------------------------------------------------------------------


def test_a_bundle_that_needs_libtorch(mlp_bundle: Path, tmp_path: Path) -> None:
    with archives.open_bundle(mlp_bundle) as archive:
        (variant,) = archive.manifest.variants
    more = msgspec.structs.replace(
        variant, imports=(*variant.imports, "aoti_torch_cpu__fft_r2c", "aoti_torch_cpu_convolution")
    )
    done = mctl("pack", changed(mlp_bundle, tmp_path / "b.pt2", variants=(more,)), "-o", tmp_path / "dist")
    assert done.returncode == 1
    assert "it needs libtorch for `_fft_r2c`\n" in done.stderr and "--with-libtorch" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["b.pt2"]


def test_a_server_that_gives_wrong_numbers_is_not_packed(standalone: Path, tmp_path: Path) -> None:
    with archives.open_bundle(standalone) as archive:
        case = archive.manifest.golden[0]
        data = bytearray(archive.view(case.member))
    data[-4:] = np.float32(1e6).tobytes()
    data[-128:-124] = np.float32(1e6).tobytes()
    wrong = changed(standalone, tmp_path / "wrong.pt2", {case.member: bytes(data)})
    done = mctl("pack", wrong, "-o", tmp_path / "dist")
    assert done.returncode == 1 and "the packed server does not start" in done.stderr and case.name in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.pt2"]


def test_a_folder_of_others_stays(standalone: Path, tmp_path: Path) -> None:
    """Its own is replaced; a file that was added or changed, or a folder that it did not write, is not."""
    dist = tmp_path / "dist"
    pack = ("pack", standalone, "-o", dist, "--no-check")
    pack_quickly(standalone, dist)
    inode = dist.stat().st_ino
    pack_quickly(standalone, dist)
    assert dist.stat().st_ino != inode
    for name, text in (("serve.sh", "mine"), ("notes.txt", "mine")):
        (dist / name).write_text(text)
        done = mctl(*pack)
        assert done.returncode == 2 and f"`{name}` in it" in done.stderr and "--force" in done.stderr
        assert (dist / name).read_text() == text
    succeed(*pack, "--force")
    assert not (dist / "notes.txt").exists() and "exec" in (dist / "serve.sh").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]


def test_folders_that_are_never_replaced(standalone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    bundle = Path(shutil.copy(standalone, tmp_path / "home" / "work"))
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "home", tmp_path / "home" / "work"):
        with pytest.raises(UsageError, match="cannot replace the folder"):
            pack_output.check_place(place, bundle, force=True)
    with pytest.raises(UsageError, match="there is no folder"):
        pack_output.check_place(tmp_path / "no" / "where", bundle, force=True)


def test_what_was_there_comes_back(tmp_path: Path) -> None:
    old, new = tmp_path / "dist", tmp_path / "new.tmp"
    old.mkdir()
    (old / "a").touch()
    with pytest.raises(FileNotFoundError):
        pack_output.place_folder(new, old)
    assert [path.name for path in tmp_path.rglob("*")] == ["dist", "a"]


# --- tar files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "unpack"),
    [
        ("tar.gz", gzip.decompress),
        ("tar.zst", lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)),
    ],
)
def test_tar_files(
    ending: str,
    unpack: Callable[[bytes], bytes],
    standalone: Path,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bytes whenever it is made; the folder's content, sorted, of nobody, at the time that was asked for."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    path = tmp_path / f"m.{ending}"
    pack_quickly(standalone, path)
    first = path.read_bytes()
    time.sleep(1.1)  # a second is what tar and gzip can tell
    pack_quickly(standalone, path)
    assert path.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [f"m.{ending}"]
    with tarfile.open(fileobj=io.BytesIO(unpack(first))) as tar:
        entries = tar.getmembers()
        tar.extractall(tmp_path, filter="tar")
    names = [entry.name for entry in entries]
    assert names[0] == "m" and names == sorted(names)
    assert {(e.mtime, e.uid, e.gid, e.uname, e.gname) for e in entries} == {(1700000000, 0, 0, "", "")}
    for path in (path for path in packed.rglob("*") if path.is_file()):
        if path.name not in ("Dockerfile", "SHA256SUMS", "sbom.cdx.json"):
            twin = tmp_path / "m" / path.relative_to(packed)
            assert twin.read_bytes() == path.read_bytes() and twin.stat().st_mode == path.stat().st_mode


def test_endings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        pack_output.form_of(tmp_path / "m.tgz")
    assert ".tar.gz" in (refused.value.hint or "")
    monkeypatch.setattr(pack_output.sys, "version_info", (3, 13))
    monkeypatch.setitem(pack_output.sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="needs the package `zstandard`") as refused:
        pack_output.form_of(tmp_path / "m.tar.zst")
    assert "pip install 'mctl[pack]'" in (refused.value.hint or "")


# --- its checks -------------------------------------------------------------------------------------------------------


def test_libraries_that_do_not_fit(packed: Path, tmp_path: Path) -> None:
    needs = {"x": Dependencies(("liba.so",), versions=(("liba.so", ("A_1", "A_2")),))}
    pack_libraries.check(needs, {"liba.so": Dependencies(defines=("A_1", "A_2"))})
    with pytest.raises(PackError, match=r"`x` needs A_2 of `liba.so`"):
        pack_libraries.check(needs, {"liba.so": Dependencies(defines=("A_1",))})
    with pytest.raises(PackError, match=r"`x` needs `liba.so`, which is not packed"):
        pack_libraries.check(needs, {})
    with pytest.raises(HostError, match=r"found no `liba.so`, which the bundle's code needs"):
        pack_libraries.gather([], needs.values())
    shutil.copy(packed / "libmctl_shim.so", tmp_path)
    with pytest.raises(PackError, match="the loader takes `libgomp"):
        pack_libraries.check_by_loader(tmp_path, ["libmctl_shim.so"])
    pack_libraries.check_by_loader(packed, ["libmctl_shim.so", "mctl-runner"])
    assert read_dependencies(packed / "mctl-runner").libraries  # the C library's, by name


def test_a_library_from_elsewhere(packed: Path, tmp_path: Path) -> None:
    """One that the system has, and the folder has not: the server works, but would not everywhere."""
    folder = Path(shutil.copytree(packed, tmp_path / "dist"))
    with archives.open_bundle(folder / "model.pt2") as archive:
        pack_check.try_folder(folder, "serve.sh", archive)
        (folder / "libgomp.so.1").unlink()
        with pytest.raises(PackError, match=r"loads `.*/libgomp\.so\S*`, which is not packed"):
            pack_check.try_folder(folder, "serve.sh", archive)


@pytest.mark.parametrize(("needed", "debian"), [("2.34", "12"), ("2.36", "12"), ("2.37", "13"), ("2.41", "13")])
def test_base_images(needed: str, debian: str) -> None:
    """Debian 12 has glibc 2.36, Debian 13 has 2.41."""
    assert f"FROM gcr.io/distroless/base-nossl-debian{debian}:nonroot\n" in image.dockerfile("Net", needed)
    with pytest.raises(PackError, match=r"glibc 2.99"):
        image.dockerfile("net", "2.99")
