"""`mctl inspect` and `mctl verify` as whole processes: stdout, stderr, exit code, and what they cost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mctl.bundle_format import zip_directory

from ..conftest import mctl
from ..hostile.rawzip import Part, pack
from ..hostile.sound import MANIFEST, WEIGHTS, changed, described, find, manifest, sound

TEXT = """\
bundle.pt2: a bundle (4.2 kB)

model         hostile, version 1
digest        DIGEST
made          2026-01-02T03:04:05+00:00 by mctl 0.1.0, torch 2.13.0
source        model.py:model
runs on       linux x86_64, x86-64-v2
parity        never checked
this host     VERDICT
dim           batch 1..8, batched
input         x float32[batch,4]
output        y float32[batch,2]
variant       dynamic, 204 B, all sizes, 2 constants, calls no operator of libtorch
golden cases  one
sizes         code 204 B, weights 328 B, golden 328 B, other 15 B
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(pack(sound()))
    return path


def test_inspect(bundle: Path) -> None:
    done = mctl("inspect", bundle.name, cwd=bundle.parent)
    text = re.sub(r"[0-9a-f]{64}", "DIGEST", done.stdout)
    text = re.sub(r"(?m)^(this host     )(optimal|runs|recompile|unsupported): .*(\n {14}.*)?", r"\1VERDICT", text)
    assert (done.returncode, text, done.stderr) == (0, TEXT, "")


def test_what_needs_libtorch_and_from_where(tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    imports = ["aoti_torch_cpu__fft_r2c", "aoti_torch_cpu_logcumsumexp", "aoti_torch_empty_strided"]
    callers = {"_fft_r2c": ["stem.0", "blocks.0", "blocks.1", "blocks.2", "head"]}
    path.write_bytes(described(lambda document: document["variants"][0].update(imports=imports, callers=callers)))
    said = mctl("inspect", path).stdout
    where = "`_fft_r2c` (stem.0, blocks.0, blocks.1, blocks.2, …), `logcumsumexp`\n"
    assert f"2 constants, calls torch for {where}" in said
    [variant] = json.loads(mctl("inspect", path, "--json").stdout)["variants"]
    assert variant["callers"] == callers


def test_inspect_json(bundle: Path) -> None:
    done = mctl("inspect", bundle, "--json")
    found = json.loads(done.stdout)
    document = manifest([part for part in sound() if part.name != MANIFEST])
    assert (found["schema"], found["ok"], found["kind"]) == ("mctl.inspect/1", True, "bundle")
    assert found["bytes"] == bundle.stat().st_size
    for key in ("name", "version", "created", "source", "contract", "target", "golden"):
        assert found[key] == document[key]
    assert found["host"]["verdict"] in ("optimal", "runs", "recompile", "unsupported")
    assert found["variants"][0]["bytes"] == 204


def test_inspect_needs_no_torch(bundle: Path) -> None:
    """Neither does verify: they run where torch and numpy are missing."""
    code = "import sys; sys.modules.update(torch=None, numpy=None); from mctl.cli.main import main; main()"
    for verb in ("inspect", "verify"):
        done = subprocess.run([sys.executable, "-c", code, verb, bundle], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_inspect_of_a_large_bundle_is_cheap(tmp_path: Path) -> None:
    """Weights of 3 GiB, in a sparse file."""
    path = tmp_path / "large.pt2"
    size, parts = 3 << 30, sound()
    document = manifest([part for part in parts if part.name != MANIFEST])
    document["members"]["mctl/weights.safetensors"] = {"size": size, "sha256": "0" * 64}
    find(parts, MANIFEST).data = json.dumps(document).encode()
    listed = []
    with path.open("wb") as file:
        for part in parts:
            at, length = file.tell(), size if part.name == WEIGHTS else len(part.data)
            file.write(zip_directory.local_header(part.name, length, 0, at))
            if part.name == WEIGHTS:
                file.seek(length, os.SEEK_CUR)
            else:
                file.write(part.data)
            listed.append((part.name, at, length, 0))
        file.write(zip_directory.central_directory(listed, file.tell()))
    # asked of the process itself: what wait4() tells includes the memory of the process that it was forked from
    code = """
import atexit, os, sys
from mctl.cli.main import main
atexit.register(lambda: print(sum(os.times()[:2]), open("/proc/self/status").read(), file=sys.stderr))
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "inspect", path], capture_output=True, text=True)
    assert done.returncode == 0
    seconds, status = done.stderr.split(maxsplit=1)
    assert float(seconds) < 1.5  # about 0.2 on a quiet machine
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert int(peak[1]) < 150_000


def test_what_a_file_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(described(lambda document: document.update(notes=["\x1b[2J\r\nmodel  fake\u202e"])))
    done = mctl("inspect", path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "\nmodel  fake" not in done.stdout
    path.write_bytes(pack([*sound(), Part(b"m/\x1b[2Jevil", b"")]))
    for verb in ("inspect", "verify"):
        done = mctl(verb, path)
        assert done.returncode == 1
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("model.py", b"model = None\n", "python"),
        ("empty.pt2", b"", "empty"),
        ("cut.pt2", pack(sound())[:-30], "cut"),
        ("bytes.bin", b"\xff" * 100, "unknown"),
    ],
    ids=["python", "empty", "cut", "unknown"],
)
def test_inspect_of_something_else(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    done = mctl("inspect", path)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{path}: ")
    assert re.search(r"^error: .*\n\nhint: ", done.stderr)
    done = mctl("inspect", path, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema"], found["ok"], found["kind"]) == (1, "mctl.inspect/1", False, kind)
    assert found["error"]
    assert found["hint"]


def test_a_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        done = mctl(verb, tmp_path / "none.pt2")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: there is no file `{tmp_path / 'none.pt2'}`\n"
        assert json.loads(mctl(verb, tmp_path / "none.pt2", "--json").stdout)["ok"] is False


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/b\xff.pt2"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(pack(sound()))
    for verb in ("inspect", "verify"):
        for options in ([], ["--json"]):
            command = [sys.executable, "-m", "mctl.cli.main", verb, path, *options]
            done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
            assert done.returncode == 0, done.stderr
            assert b"udcff" in done.stdout


def test_verify(bundle: Path) -> None:
    done = mctl("verify", bundle.name, cwd=bundle.parent)
    text = re.sub(r"\(\d+\.\d\d s\)", "(SECONDS)", done.stdout)
    assert re.fullmatch(r"bundle.pt2: 9 members, 2.8 kB, all as written \(SECONDS\)\ndigest [0-9a-f]{64}\n", text)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(mctl("verify", bundle, "--json").stdout)
    assert (found["schema"], found["ok"], found["kind"], found["members"]) == ("mctl.verify/1", True, "bundle", 9)


def test_verify_names_the_member(tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(changed(WEIGHTS, lambda part: setattr(part, "data", part.data[:-1] + b"\1")))
    done = mctl("verify", path)
    assert (done.returncode, done.stdout) == (1, "")
    message = "member `mctl/weights.safetensors` does not have the SHA-256 that the manifest says"
    assert done.stderr == f"error: `{path}` is damaged: {message}\n\nhint: copy or make it again\n"
    found = json.loads(mctl("verify", path, "--json").stdout)
    assert found["ok"] is False
    assert message in found["error"]
