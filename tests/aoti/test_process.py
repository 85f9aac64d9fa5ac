"""The child's ends, with small scripts in its place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mctl.aoti import process
from mctl.aoti.protocol import Done, Recipe, Request
from mctl.bundle_format.errors import CompileError, UsageError

DONE = '{"type":"Done","constants":{},"peak_bytes":7,"torch":"2","torch_git":""}'


def run(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, timeout: float | None = 30
) -> tuple[Done, dict[str, float], list[str]]:
    """`script` may use `say(text)`, which writes one line of the protocol."""
    file = folder / "script.py"
    head = (
        "import os, sys, time, signal, subprocess\ndef say(text): os.write(int(sys.argv[1]), text.encode() + b'\\n')\n"
    )
    file.write_text(head + script)
    monkeypatch.setattr(process, "CHILD", (sys.executable, str(file)))
    request = Request("p", str(folder), (str(folder),), "g++", None, (), Recipe("v"))
    phases: list[str] = []
    done, seconds = process.run_child(request, timeout, phases.append)
    return done, seconds, phases


def test_phases_and_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""say('{{"type":"Phase","name":"one"}}')\nsay('{{"type":"Phase","name":"two"}}')\nsay('{DONE}')"""
    done, seconds, phases = run(tmp_path, script, monkeypatch)
    assert done.peak_bytes == 7
    assert phases == list(seconds) == ["one", "two"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed: most likely the machine ran out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the compiling process crashed with SIGSEGV"),
        ("print('out of cheese'); sys.exit(9)", "the compiling process ended with code 9: out of cheese"),
        ("sys.exit(0)", "the compiling process ended with code 0"),
        ("time.sleep(60)", "compiling took more than 0.5 seconds"),
    ],
)
def test_an_end_without_a_result(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError) as caught:
        run(tmp_path, script, monkeypatch, 0.5 if "sleep" in script else 30)
    assert message in caught.value.message
    assert caught.value.hint


def test_the_child_s_error_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """say('{"type":"Failed","kind":"UsageError","message":"no such option","hint":"try"}')"""
    with pytest.raises(UsageError) as caught:
        run(tmp_path, script, monkeypatch)
    assert (caught.value.message, caught.value.hint) == ("no such option", "try")


def test_a_bug_of_the_child_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Traceback of the child"):
        run(tmp_path, """say('{"type":"Failed","kind":"bug","message":"Traceback of the child"}')""", monkeypatch)


def _alive(pid: int) -> bool:
    """Not dead, and no zombie that only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_grandchild_outlives_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    script = f"""p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid)); say('{DONE}')"""
    run(tmp_path, script, monkeypatch)
    assert not _alive(int(pid.read_text()))


def test_the_child_gets_no_home_and_no_settings_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv("HOME", raising=False)
    out = tmp_path / "environment"
    run(tmp_path, f"open({str(out)!r}, 'w').write(repr(dict(os.environ)))\nsay('{DONE}')", monkeypatch)
    seen = eval(out.read_text())
    assert not {"TORCHINDUCTOR_FREEZING", "ATEN_CPU_CAPABILITY"} & set(seen)
    assert {seen["HOME"], seen["TMPDIR"], seen["TORCHINDUCTOR_CACHE_DIR"]} <= {
        str(tmp_path),
        str(tmp_path / "tmp"),
        str(tmp_path / "cache"),
    }


def test_when_the_parent_is_killed_the_child_cleans_up(tmp_path: Path) -> None:
    """The real child, which waits in torch's import while its parent dies."""
    work = tmp_path / "work"
    (work / "tmp").mkdir(parents=True)
    parent = f"""
import sys
from pathlib import Path
from mctl.aoti.process import run_child
from mctl.aoti.protocol import Recipe, Request
request = Request("nothing", {str(work)!r}, ({str(work)!r},), "g++", None, (), Recipe("v"))
run_child(request, None, lambda phase: print(phase, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process_:
        assert process_.stdout is not None
        assert process_.stdout.readline() == "start torch\n"
        (child,) = _children(process_.pid)
        process_.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while (_alive(child) or work.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(child)
    assert not work.exists()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_interrupted_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    script = f"""
open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, script, monkeypatch)
    assert not _alive(int(pid.read_text()))
