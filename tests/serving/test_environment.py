"""Machines that lack something: a clear sentence at the start, or a way round it; never a fault at a request."""

import errno
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from . import faulty
from .faulty import ATTEMPTS, FREE, INFER, Action, right, rows
from .forbid import CLONE, LANDLOCK_CREATE_RULESET, MEMFD_CREATE, SECCOMP, forbid
from .server import Server, infer_binary, outputs_of
from .test_batching import eventually

Refusal = Callable[..., tuple[int, str]]
MIB = 1 << 20


def limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


def answers(server: Server) -> bool:
    x = rows((Action.ANSWER, 7), (Action.ANSWER, -2))
    answer = server.request(INFER, *infer_binary(x=x))
    return answer.status == 200 and (outputs_of(answer)["y"] == right(x)).all()


def told(server: Server, word: str) -> list[str]:
    return [line for line in server.lines if line.startswith(word)]


# --- what the start says ---------------------------------------------------------------------------------------------


def test_too_few_descriptors(faulty_bundle: Path, refusal: Refusal) -> None:
    code, text = refusal(faulty_bundle, prepare=limited(resource.RLIMIT_NOFILE, 64))
    assert code == 1
    assert text == "error: only 64 descriptors may be open, more than 104 are needed: raise the limit (`ulimit -n`)\n"


def test_few_descriptors_mean_few_connections(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, prepare=limited(resource.RLIMIT_NOFILE, 120)) as server:
        assert told(server, "warning") == ["warning: at most 16 connections at a time, by the limit of descriptors"]
        busy = [server.connect() for _ in range(16)]
        for raw in busy:  # in the middle of a request, so that none of them makes room
            assert raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /").read().status == 200
        assert server.request("/v2").error == "too many connections"
        os.kill(server.workers()[0], signal.SIGKILL)  # its successor still finds descriptors
        for raw in busy:
            raw.socket.close()
        eventually(lambda: answers(server))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((resource.RLIMIT_AS, 150 * MIB), "cannot load libtorch: "),
        ((resource.RLIMIT_FSIZE, 0), "no room for the model's largest batch: "),
    ],
)
def test_too_little_memory(faulty_bundle: Path, refusal: Refusal, limits: tuple[int, int], said: str) -> None:
    code, text = refusal(faulty_bundle, prepare=limited(*limits))
    assert code == 1 and text.startswith(f"error: {said}") and text.count("\n") == 1, text


def test_no_memory_for_the_arena(faulty_library: Path, tmp_path: Path, refusal: Refusal) -> None:
    bundle = faulty.bundle(faulty_library, tmp_path / "large.pt2", most=8 << 20)  # two slots of 192 MiB
    code, text = refusal(bundle, prepare=limited(resource.RLIMIT_AS, 200 * MIB))
    assert code == 1 and text.count("\n") == 1, text
    assert text.startswith("error: no room for the model's largest batch: ") and "`--max-batch-size`" in text


def test_no_more_processes(faulty_bundle: Path, refusal: Refusal) -> None:
    code, text = refusal(faulty_bundle, prepare=forbid(CLONE, error=errno.EAGAIN))
    assert code == 1 and text.startswith("error: cannot start a worker: ") and "`ulimit -u`" in text, text


def test_no_place_for_code(faulty_bundle: Path, refusal: Refusal) -> None:
    code, text = refusal(faulty_bundle, prepare=forbid(MEMFD_CREATE, writing=True))
    assert code == 1 and text.count("\n") == 1, text
    assert "memfd: Operation not permitted; `/dev/shm`: Read-only file system" in text and "TMPDIR" in text


# --- what can be done without ----------------------------------------------------------------------------------------


def test_nothing_can_be_written(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, environment={}, prepare=forbid(writing=True)) as server:
        assert answers(server) and server.lines[1].startswith("ready: ")


def test_without_memfd_a_folder_will_do(faulty_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir(mode=0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    server = Server(faulty_bundle, "--debuggable", environment=environment, prepare=forbid(MEMFD_CREATE))
    notes = [
        f"note: memfd is forbidden here, batches go through `{folder}`",
        f"note: code cannot be loaded from memory here, it went through `{folder}`",
    ]
    assert told(server, "note") == notes
    victim = server.workers()[0]
    used = [str(fd.readlink()) for fd in Path(f"/proc/{victim}/fd").iterdir()]
    assert sum(name.startswith(str(folder)) and name.endswith(" (deleted)") for name in used) == 2, used
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: answers(server))
    assert told(server, "note")[:2] == notes and told(server, "note: memfd") == notes[:1]
    server.process.kill()
    server.process.wait()
    assert list(folder.iterdir()) == []


def test_without_seccomp_it_serves_and_says_so(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, prepare=forbid(SECCOMP)) as server:
        assert answers(server)
        (warning,) = told(server, "warning")
        assert warning.startswith("warning: the workers have no sandbox: ")


def test_without_landlock_it_serves_and_a_strict_sandbox_does_not_start(faulty_bundle: Path, refusal: Refusal) -> None:
    old_kernel = forbid(LANDLOCK_CREATE_RULESET, error=errno.ENOSYS)
    with Server(faulty_bundle, prepare=old_kernel) as server:
        assert answers(server) and not told(server, "warning") and not told(server, "note")
    code, text = refusal(faulty_bundle, "--sandbox", "strict", prepare=old_kernel)
    why = "the kernel has no Landlock: Function not implemented"
    assert (code, text) == (1, f"error: `--sandbox strict` is not possible here: {why}\n")


# --- while it serves -------------------------------------------------------------------------------------------------


def test_descriptors_that_run_out_come_back(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, "--debuggable") as server, server.connect() as kept:
        asked = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert kept.send(asked).read().status == 200
        front = server.process.pid
        before = resource.prlimit(front, resource.RLIMIT_NOFILE)
        open_now = len(list(Path(f"/proc/{front}/fd").iterdir()))
        resource.prlimit(front, resource.RLIMIT_NOFILE, (open_now, before[1]))
        waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        os.kill(server.workers()[0], signal.SIGKILL)  # to start another takes descriptors too
        begun = cpu_seconds(front)
        for _ in range(10):
            time.sleep(0.05)
            assert kept.send(asked).read().status == 200
        assert cpu_seconds(front) - begun < 0.25
        resource.prlimit(front, resource.RLIMIT_NOFILE, before)
        for connection in waiting:
            connection.sendall(asked)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()
        eventually(lambda: answers(server))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- what a model may not --------------------------------------------------------------------------------------------


def errors_of(server: Server) -> dict[str, int]:
    """What the model met at each of its attempts; 0: it may."""
    x = rows(*((Action.ATTEMPT, which) for which in range(len(ATTEMPTS)) if ATTEMPTS[which] != "exec"))
    found = outputs_of(server.request(INFER, *infer_binary(x=x)))["y"][:, 0]
    return dict(zip((name for name in ATTEMPTS if name != "exec"), map(int, found), strict=True))


def test_a_model_cannot_leave_its_sandbox(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, "--threads", "2") as server:
        found = errors_of(server)
        assert {name: found[name] for name in ATTEMPTS[:FREE]} == dict.fromkeys(ATTEMPTS[:FREE], 0)
        refused = [name for name in ATTEMPTS[FREE:] if name != "exec"]
        assert {name: found[name] for name in refused} == dict.fromkeys(refused, errno.EPERM)
        executed = server.request(INFER, *infer_binary(x=rows((Action.ATTEMPT, ATTEMPTS.index("exec")))))
        assert outputs_of(executed)["y"].tolist() == [[errno.EPERM]]
        for pid in (server.process.pid, *server.workers()):
            status = Path(f"/proc/{pid}/status").read_text().split()
            assert status[status.index("NoNewPrivs:") + 1] == "1" and status[status.index("Seccomp:") + 1] == "2"
            assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_the_sandbox_can_be_left_out(faulty_bundle: Path) -> None:
    with Server(faulty_bundle, "--no-sandbox") as server:
        found = errors_of(server)
        for name in ("start a thread", "socket", "fork", "signal another", "open for reading and writing"):
            assert found[name] == 0, name
        worker = server.workers()[0]
        assert resource.prlimit(worker, resource.RLIMIT_CORE) == resource.getrlimit(resource.RLIMIT_CORE)
