"""mctl compile as a process: what it makes, for which machine, and how it ends when something goes wrong."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.host import cpu_features
from mctl.runner import load

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder whose name torch would have to quote."""
    folder = tmp_path / "wörk folder"
    folder.mkdir()
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def processes_in(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder, or work in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = str((process / "cwd").readlink())
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in place or (str(folder) in command and "pytest" not in command):
            found.append(command)
    return found


# --- what it makes -----------------------------------------------------------------------------------------------


def test_the_manifest_of_a_bundle(mlp_bundle: Path) -> None:
    with open_bundle(mlp_bundle) as bundle:
        manifest = bundle.manifest
        (variant,) = manifest.variants
        assert manifest.buckets == {"batch": (1, 2, 4, 8, 16, 32, 64)}
        assert variant.covers == {"batch": (1, 64)}
        assert manifest.parity == "pass"
        assert manifest.target is not None and set(manifest.target.features) <= cpu_features()
        assert {name for name in variant.imports if not name.startswith("aoti_torch_")} <= {"Sleef_expf16_u10"}
        assert "aoti_torch_delete_tensor_object" in variant.imports
        # three linear layers: 128x256, 256x256 and 256x10, filled up to 32 outputs, with their biases
        parameters = 128 * 256 + 256 + 256 * 256 + 256 + 256 * 32 + 10
        assert 4 * parameters <= bundle.members["mctl/weights.safetensors"].size < 4 * parameters + 4096


def test_the_library_names_no_libtorch(mlp_bundle: Path, tmp_path: Path) -> None:
    assert "libtorch" not in _readelf("-d", mlp_bundle, tmp_path)


def test_the_library_wants_no_executable_stack(mlp_bundle: Path, tmp_path: Path) -> None:
    [stack] = [line for line in _readelf("-l", mlp_bundle, tmp_path).splitlines() if "GNU_STACK" in line]
    assert stack.split()[6] == "RW"


def test_the_library_names_no_folder_of_this_machine(mlp_bundle: Path) -> None:
    with open_bundle(mlp_bundle) as bundle:
        code = bundle.read(bundle.manifest.variants[0].library)
    assert str(Path(sys.prefix)).encode() not in code
    assert b"mctl-compile-" not in code


def _library(bundle: Path, folder: Path) -> Path:
    with open_bundle(bundle) as archive:
        path = folder / "model.so"
        path.write_bytes(archive.read(archive.manifest.variants[0].library))
    return path


def _readelf(option: str, bundle: Path, folder: Path) -> str:
    command = ["readelf", "-W", option, str(_library(bundle, folder))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "forbidden", "used"),
    [("x86-64-v2", r"%[yz]mm|\sv[a-z]+ps\b", r"%xmm"), ("x86-64-v3", r"%zmm|%k[1-7]\b", r"%ymm")],
)
def test_no_instruction_above_the_target(
    target: str, forbidden: str, used: str, mlp_program: Path, mlp_bundle: Path, tmp_path: Path, mctl_ok: Run
) -> None:
    bundle = tmp_path / "bundle.pt2"
    named = ("--name", "other", "--model-version", "7")
    mctl_ok("compile", mlp_program, "-o", bundle, "--target", target, "--no-parity", *named)
    with open_bundle(bundle) as archive:
        manifest = archive.manifest
        assert manifest.target is not None and manifest.target.isa == target
        assert (manifest.name, manifest.version) == ("other", "7")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _library(bundle, tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(used, code)
    assert not re.search(forbidden, code)
    for rows in (1, 5, 64):
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(load(bundle)(x=x), load(mlp_bundle)(x=x), rtol=1e-4, atol=1e-5)


# --- odd surroundings --------------------------------------------------------------------------------------------


def test_blanks_umlauts_no_home_and_another_folder(
    mlp_program: Path, mlp_bundle: Path, work: Path, run_mctl: Run
) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    bundle = work.parent / "a bü ndle.pt2"
    done = run_mctl(
        "compile", mlp_program, "-o", bundle, "--work-dir", work, "--bucket", "batch=4,64", "--no-parity", env=kept
    )
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == []
    with open_bundle(bundle) as archive:
        assert archive.manifest.buckets == {"batch": (4, 64)}
        assert archive.manifest.parity == "skipped"
    assert re.search(r"parity +skipped", run_mctl("inspect", bundle).stdout)
    assert members(bundle) == members(mlp_bundle)  # the same bytes, made in another place at another time


def members(bundle: Path) -> dict[str, str]:
    """Path and SHA-256 of what a compile makes."""
    with open_bundle(bundle) as archive:
        return {path: member.sha256 for path, member in archive.manifest.members.items() if "extra/" not in path}


# --- how it ends -------------------------------------------------------------------------------------------------


def failed(done: subprocess.CompletedProcess[str], work: Path, code: int = 1) -> str:
    """The error's text; nothing is left in the work folder and beside it, and no process."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert list(work.iterdir()) == []
    assert not [path for path in work.parent.iterdir() if path.suffix == ".pt2" or path.name.startswith(".")]
    assert processes_in(work) == []
    return done.stderr


PLAIN = ("--kernels", "torch")  # mctl's own would be compiled first


def compile_in(
    run: Run, program: Path, work: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    output = work.parent / "bundle.pt2"
    return run("compile", program, "-o", output, "--work-dir", work, *options, env=os.environ | variables)


@pytest.mark.parametrize(("number", "word"), [("SEGV", "SIGSEGV"), ("KILL", "was killed")])
def test_a_compiler_process_that_dies(number: str, word: str, mlp_program: Path, work: Path, run_mctl: Run) -> None:
    """The C++ compiler kills the process that called it, as a crash or the kernel's out-of-memory killer would."""
    killer = script(work.parent / "killer", f'case "$*" in *.cpp*) kill -{number} $PPID; sleep 5;; esac; exec g++ "$@"')
    text = failed(compile_in(run_mctl, mlp_program, work, *PLAIN, CXX=str(killer)), work)
    assert word in text
    assert ("memory" in text) == (number == "KILL")


def test_a_compiler_that_refuses(mlp_program: Path, work: Path, run_mctl: Run) -> None:
    picky = script(work.parent / "picky", 'case "$*" in *.cpp*) echo "no such thing" >&2; exit 1;; esac; exec g++ "$@"')
    assert "no such thing" in failed(compile_in(run_mctl, mlp_program, work, *PLAIN, CXX=str(picky)), work)


def test_too_slow(mlp_program: Path, work: Path, run_mctl: Run) -> None:
    slow = script(work.parent / "slow", 'case "$*" in *.cpp*) sleep 100;; esac; exec g++ "$@"')
    text = failed(compile_in(run_mctl, mlp_program, work, *PLAIN, "--timeout", "12", CXX=str(slow)), work)
    assert "12" in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(mlp_program: Path, work: Path, number: int, code: int) -> None:
    slow = script(
        work.parent / "slow", f'case "$*" in *.cpp*) touch "{work.parent}/begun"; sleep 100;; esac; exec g++ "$@"'
    )
    command = [sys.executable, "-m", "mctl.cli.main", "compile", mlp_program, "-o", work.parent / "bundle.pt2"]
    process = subprocess.Popen(
        [*map(str, command), *PLAIN, "--work-dir", str(work)],
        env=os.environ | {"CXX": str(slow)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(1200):
        if (work.parent / "begun").exists():
            break
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    failed(subprocess.CompletedProcess(command, process.returncode, out, err), work, code)


def test_no_compiler_is_said_at_once(mlp_program: Path, work: Path, run_mctl: Run) -> None:
    text = failed(compile_in(run_mctl, mlp_program, work, CXX="no-such-compiler"), work)
    assert "no-such-compiler" in text and "hint:" in text
    text = failed(compile_in(run_mctl, mlp_program, work, CXX="", PATH=str(work.parent)), work)
    assert "apt-get install g++" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "x86-64-v9"], ["x86-64-v9", "x86-64-v3"]),
        (["--bucket", "rows=1,2"], ["rows", "batch"]),
        (["--bucket", "batch=1,99"], ["99", "1..64"]),
        (["--bucket", "batch"], ["batch"]),
        (["--inductor", "max_autotun=1"], ["max_autotun", "max_autotune"]),
        (["--inductor", "max_autotune=maybe"], ["max_autotune", "maybe"]),
        (["--inductor", "cpp.simdlen=256"], ["cpp.simdlen", "--target"]),
        (["--name", "a/b"], ["a/b"]),
        (["--timeout", "0"], ["--timeout 0", "no time"]),
        (["--precision", "auto"], ["--precision auto", "--tune fast"]),
        (["--precision", "bf16", "--kernels", "torch"], ["--precision bf16", "--kernels torch"]),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], words: list[str], mlp_program: Path, work: Path, run_mctl: Run
) -> None:
    text = failed(compile_in(run_mctl, mlp_program, work, *options), work, 2)
    assert all(word in text for word in words), text


def test_a_bundle_is_not_compiled_again(mlp_bundle: Path, work: Path, run_mctl: Run) -> None:
    text = failed(compile_in(run_mctl, mlp_bundle, work), work)
    assert "is a bundle" in text and "mctl serve" in text
