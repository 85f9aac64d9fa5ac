"""Finding, building and starting mctl-runner."""

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mctl.bundle_format import archive as archives
from mctl.bundle_format.errors import HostError, MctlError, UsageError, WrongKindError
from mctl.cli.serve import serve
from mctl.runner import native

Bundle = Path


def refusal(call: Callable[[], object], kind: type[MctlError] = HostError) -> MctlError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def silent(text: str) -> None:
    """Takes what would be said."""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A binary as a wheel would have it."""
    path = tmp_path / "mctl-runner"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    monkeypatch.setattr(native, "INSTALLED", path)
    return path


def test_the_words_for_the_runner(mlp_bundle: Bundle, runner: Path) -> None:
    options = {"host": "::1", "port": 0, "max_batch_size": None, "no_verify": True, "null": False, "idle_timeout": 9}
    start = native.prepare([mlp_bundle], None, options, silent)
    libtorch = native.find_libtorch()
    assert (libtorch / "libtorch_cpu.so").is_file()
    assert start.verdict and start.verdict.ok
    assert start.command == (
        str(runner),
        "serve",
        str(mlp_bundle),
        f"--libtorch={libtorch}",
        "--host=::1",
        "--port=0",
        "--no-verify",
        "--idle-timeout=9",
    )
    assert start.environment == {}


def test_a_handler_runs_in_this_python(mlp_bundle: Bundle, runner: Path) -> None:
    options = {"handler": ["a=a.py", "b=b.py"], "handlers": 2, "handler_python": None}
    command = native.prepare([mlp_bundle], None, options, silent).command
    words = ("--handler=a=a.py", "--handler=b=b.py", "--handlers=2", f"--handler-python={sys.executable}")
    assert command[-4:] == words
    named = native.prepare([mlp_bundle], None, {"handler": ["a.py"], "handler_python": "python9"}, silent).command
    assert named[-2:] == ("--handler=a.py", "--handler-python=python9")
    without = native.prepare([mlp_bundle], None, {}, silent).command
    assert not any(word.startswith("--handler") for word in without)


def test_several_bundles_of_which_one_needs_no_libtorch(
    mlp_bundle: Bundle, runner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libtorch = native.find_libtorch()
    needs = iter([libtorch, None])
    monkeypatch.setattr(native, "libtorch_for", lambda manifest, named: next(needs))
    monkeypatch.setattr(native.host, "host_verdict", lambda manifest, folder: native.Verdict("optimal", "as compiled"))
    start = native.prepare([mlp_bundle, mlp_bundle], None, {}, silent)
    assert start.command == (str(runner), "serve", str(mlp_bundle), str(mlp_bundle))
    assert start.environment == {"MCTL_LIBTORCH": str(libtorch)}  # `--libtorch` would be the standalone one's too


def test_a_folder_of_models_is_not_looked_into(tmp_path: Path, runner: Path) -> None:
    start = native.prepare([tmp_path], None, {"state": Path("s.json")}, silent)
    assert start.verdict is None and start.command == (str(runner), "serve", str(tmp_path), "--state=s.json")
    assert start.environment == {"MCTL_LIBTORCH": str(native.find_libtorch())}  # for those bundles that need it


def test_libtorch_is_found_without_importing_torch() -> None:
    code = "from mctl.runner import native; native.find_libtorch(); import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_libtorch_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtorch_cpu.so").touch()
    assert native.find_libtorch(tmp_path) == tmp_path
    assert native.find_libtorch(tmp_path / "libtorch_cpu.so") == tmp_path
    monkeypatch.setenv("MCTL_LIBTORCH", str(tmp_path))
    assert native.find_libtorch() == tmp_path
    nowhere = tmp_path / "nowhere"
    assert refusal(lambda: native.find_libtorch(nowhere), UsageError).message.startswith("there is no libtorch_cpu.so")
    monkeypatch.setenv("MCTL_LIBTORCH", str(nowhere))
    assert "--libtorch" in (refusal(native.find_libtorch).hint or "")


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "riscv64")])
def test_serving_needs_linux(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    error = refusal(lambda: native.prepare([Path("bundle.pt2")], None, {}, silent))
    assert error.message.startswith("serving needs Linux on x86-64 or aarch64, this is ")
    assert error.hint == "`mctl run` works here"


def test_what_cannot_be_served(mlp_program: Path, mlp_bundle: Bundle, tmp_path: Path, runner: Path) -> None:
    assert "is a program" in refusal(lambda: native.prepare([mlp_program], None, {}, silent), WrongKindError).message
    with archives.open_bundle(mlp_bundle) as source:
        assert source.manifest.target is not None
        target = msgspec.structs.replace(source.manifest.target, features=("avx1024",))
        path = tmp_path / "later.pt2"
        archives.rewrite(source, path, msgspec.structs.replace(source.manifest, target=target), {})
    assert "`avx1024`" in refusal(lambda: native.prepare([path], None, {}, silent)).message


def test_serve_has_the_runners_options() -> None:
    """Each option of the binary is one of `mctl serve`, by the same name, and nothing else is handed on."""
    table = (native.SOURCES / "options.cc").read_text()
    runners = set(re.findall(r'\{"--([a-z-]+)", "', table))
    own = {name.replace("_", "-") for name in inspect.signature(serve).parameters} - {"context", "bundles", "json"}
    assert own == runners


BECOME = """
import sys
from mctl.cli.serve import serve
from mctl.runner import native
print("before")
native.become(native.Start(None, tuple(sys.argv[1:])))
"""
SHOW = "echo $$; trap 'exit 7' TERM; grep SigIgn /proc/self/status; echo ready; while :; do sleep 0.01; done"


def test_the_process_becomes_the_runner() -> None:
    """The same process id, no ignored signals handed on, signals and the exit code its own."""
    command = [sys.executable, "-c", BECOME, "/bin/sh", "-c", SHOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, restore_signals=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 7
    assert lines[0] == "before" and lines[1] == str(process.pid) and lines[3] == "ready"
    ignored = int(lines[2].split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1)) and not ignored & (1 << (signal.SIGXFSZ - 1))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one source, and build tools that only write down that they ran."""
    sources, tools = tmp_path / "runner" / "cpp", tmp_path / "tools"
    (sources / "doors").mkdir(parents=True)
    tools.mkdir()
    (sources / "doors" / "http.cc").touch()
    (tmp_path / "pyproject.toml").touch()
    built = tmp_path / "build" / "native" / "mctl-runner"
    shim = built.with_name("libmctl_shim.so")
    script = f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$1" in --build) sleep 0.2; touch {built} {shim};; esac\n'
    for tool in ("cmake", "ninja", "c++"):
        (tools / tool).write_text(script)
        (tools / tool).chmod(0o755)
    monkeypatch.setattr(native, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: str(tools))
    monkeypatch.setenv("PATH", f"{tools}:/bin:/usr/bin")
    return tmp_path


def calls(checkout: Path) -> list[str]:
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_a_checkout_builds_once_and_again_for_new_sources(checkout: Path) -> None:
    said: list[str] = []
    built = native.find_runner(said.append)
    assert built == checkout / "build" / "native" / "mctl-runner"
    assert calls(checkout) == [
        f"--preset native -DPYTHON={sys.executable}",
        "--build --preset native --target mctl-runner",
    ]
    assert len(said) == 1
    native.find_runner(said.append)
    assert len(calls(checkout)) == 2
    later = built.stat().st_mtime + 5
    os.utime(checkout / "runner" / "cpp" / "doors" / "http.cc", (later, later))
    native.find_runner(said.append)
    assert len(calls(checkout)) == 4


def test_two_at_once_build_once(checkout: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(native.find_runner())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    assert len(calls(checkout)) == 2


def test_no_compiler_and_a_failing_build(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = checkout / "tools"
    (tools / "cmake").write_text("#!/bin/sh\necho it broke\nexit 1\n")
    error = refusal(native.find_runner)
    assert error.message.startswith("cannot build `mctl-runner`: `cmake --preset native ")
    assert (checkout / "build" / "native" / "build.log").read_text() == "it broke\n"
    (tools / "c++").unlink()
    monkeypatch.setenv("PATH", str(tools))
    error = refusal(native.find_runner)
    assert error.message == "cannot build `mctl-runner`: there is no `c++`"
    assert error.hint == "`apt install g++`, or install a wheel"


def test_an_installation_without_the_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    assert refusal(native.find_runner).message == "this installation of mctl has no `mctl-runner`"
