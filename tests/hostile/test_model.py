"""A model that attacks the server and the machine, as soon as it is loaded and when it is ready, meets its sandbox."""

import ctypes
import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ..serving import faulty
from ..serving.server import Server, infer_binary, outputs_of, runner

INFER = "/v2/models/faulty/infer"
NOBODY = 65534
ATTACK_AT_LOAD, ATTACK_NOW, CALL_AT_LOAD, CALL_NOW = range(2, 6)
CALLS = 600  # so many are tried
NOT_TRIED = -1
MOST_ROWS = 1024

# As hostile.cc has them; after them comes reading what lies in the folder that the server was started in.
FREE = ("a thread", "read a file", "map code", "signal itself", "bind itself to a core", "ask about a descriptor")
ATTACKS = (
    *("kill the front", "kill the group", "kill everyone", "tkill", "F_SETOWN", "F_SETOWN_EX", "F_SETSIG", "O_ASYNC"),
    *("FIOASYNC", "lease", "dnotify", "mq_notify", "timer on another"),
    *("affinity of another", "priority of another", "priority of the user", "ioprio of another"),
    *("scheduler of another", "limits of another", "read limits of another", "migrate pages of another"),
    *("read its memory", "read its environment", "read its maps", "write its memory", "process_vm_readv", "ptrace"),
    *("run a program", "UDP", "Unix socket", "make a file", "O_TMPFILE", "open for writing", "unlink", "truncate"),
    *("chmod", "utimensat", "setxattr", "removexattr", "setxattrat", "removexattrat", "file_setattr"),
    *("FS_IOC_SETFLAGS", "flock", "lock", "sync"),
    *("shmget", "semget", "msgget", "mq_open", "flags of stderr", "shut stderr down"),
    *("inotify", "fanotify", "open_tree_attr", "bpf", "io_uring", "userfaultfd"),
    *("outlive the front", "leave the session", "be dumped", "be traced"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`runner` with its shim and `own` with a bundle, where every user can read them."""
    built = tmp_path_factory.mktemp("hostile") / "hostile.so"
    library = faulty.compiled(Path(__file__).with_name("hostile.cc"), built)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        for name in ("runner", "own"):
            (place / name).mkdir()
        faulty.bundle(library, place / "own" / "hostile.pt2", most=MOST_ROWS, buckets=(1,))
        for name in ("mctl-runner", "libmctl_shim.so"):
            shutil.copy(runner().with_name(name), place / "runner")
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        yield place


def as_nobody() -> None:
    """An ordinary user, as most servers are: root is asked less."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def as_is() -> None:
    pass


Start = Callable[..., Server]


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(*options)`: a server of the hostile model, by the shim."""
    monkeypatch.setenv("MCTL_TEST_RUNNER", str(folder / "runner" / "mctl-runner"))
    monkeypatch.setenv("ATTACK_AT_LOAD", "1")
    monkeypatch.chdir(folder / "own")
    return lambda *options, user=as_nobody: Server(Path("hostile.pt2"), *options, standalone=True, prepare=user)


def answers(server: Server, action: int, tries: Sequence[int]) -> list[int]:
    """What came of an action's tries: 0 or errno."""
    x = np.array([(action, which) for which in tries], np.int64)
    return [int(y) for y in outputs_of(server.request(INFER, *infer_binary(x=x)))["y"][:, 0]]


def attempts(server: Server, action: int, names: Sequence[str] = (*FREE, *ATTACKS)) -> dict[str, int]:
    return dict(zip(names, answers(server, action, [(*FREE, *ATTACKS).index(name) for name in names]), strict=True))


REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS}


@pytest.mark.parametrize("user", [as_nobody, as_is])
@pytest.mark.parametrize("options", [(), ("--sandbox", "strict"), ("--debuggable",)], ids=" ".join)
def test_an_attack_fails_when_the_model_is_loaded_and_when_it_is_ready(
    start: Start, options: tuple[str, ...], user: Callable[[], None]
) -> None:
    with start(*options, user=user) as server:
        assert not [line for line in server.lines if line.startswith("warning")], server.lines
        for action in (ATTACK_AT_LOAD, ATTACK_NOW):
            came = attempts(server, action)
            assert {name: came[name] for name in FREE} == dict.fromkeys(FREE, 0)
            assert {name: came[name] for name in ATTACKS if came[name] not in REFUSED} == {}
        assert server.request("/v2/health/ready").status == 200


def test_without_a_sandbox_the_attacks_are_real(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTACK_AT_LOAD")
    real = (
        *("kill the front", "F_SETOWN", "F_SETOWN_EX", "F_SETSIG", "FIOASYNC", "dnotify", "timer on another"),
        *("affinity of another", "ioprio of another", "read limits of another", "write its memory", "run a program"),
        *("read its environment", "UDP", "O_TMPFILE", "flock", "lock", "shmget", "mq_open", "inotify"),
        "outlive the front",
    )
    with start("--no-sandbox") as server:
        assert attempts(server, ATTACK_NOW, real) == dict.fromkeys(real, 0)


def test_a_strict_sandbox_has_files_of_the_system_alone(start: Start) -> None:
    came = {}
    for options in ((), ("--sandbox", "strict")):
        with start(*options) as server:
            (came[options],) = answers(server, ATTACK_NOW, [len(FREE) + len(ATTACKS)])
    assert came == {(): 0, ("--sandbox", "strict"): errno.EACCES}


@pytest.mark.parametrize("options", [(), ("--debuggable",)], ids=" ".join)
def test_nobody_else_reads_the_memory_of_front_and_workers(start: Start, options: tuple[str, ...]) -> None:
    """Files that only whoever may trace a process can open belong to root, unless it is debuggable."""
    with start(*options, user=as_nobody) as server:
        owners = {Path(f"/proc/{pid}/mem").stat().st_uid for pid in (server.process.pid, *server.workers())}
        own = Path(f"/proc/{server.process.pid}").stat().st_uid if options else 0
        assert owners == {own} and (options == () or own != 0)
        for pid in (server.process.pid, *server.workers()):
            limit = "Max core file size"  # as /proc has it: nobody else may ask for it
            of_process, mine = (Path(f"/proc/{one}/limits").read_text() for one in (pid, "self"))
            dumped, usual = (text.split(limit)[1].split()[:2] for text in (of_process, mine))
            assert dumped == (usual if options else ["0", "0"])


SAMPLES = ("mlp", "cnn", "mixed", "stateful")


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_samples_run_in_a_strict_sandbox(make_bundle: Callable[[str], Path], sample: str) -> None:
    with Server(make_bundle(sample), "--sandbox", "strict", "--threads", "2") as server:
        assert not [line for line in server.lines if line.startswith(("warning", "note"))]
        assert server.request("/v2/health/ready").status == 200  # it replayed each golden case


# --- the kernel's table of calls -------------------------------------------------------------------------------------


def table() -> dict[int, tuple[str, dict[str, str]]]:
    """Number to name and verdicts."""
    vectors = Path(__file__).parents[1] / "vectors" / "sandbox" / f"{platform.machine()}.txt"
    rows = [line.split() for line in vectors.read_text().splitlines() if line and not line.startswith("#")]
    stages = ("front", "loading", "ready", "strict")
    return {int(number): (name, dict(zip(stages, verdicts, strict=True))) for number, name, *verdicts in rows}


@pytest.mark.parametrize("strict", [False, True])
def test_each_system_call_meets_what_the_table_says(start: Start, strict: bool) -> None:
    with start(*(("--sandbox", "strict") if strict else ())) as server:
        decided, newest = table(), max(table())
        stages = {CALL_NOW: "strict" if strict else "ready"} | ({} if strict else {CALL_AT_LOAD: "loading"})
        for action, stage in stages.items():
            wrong = []
            for number, came in enumerate(answers(server, action, range(CALLS))):
                name, verdicts = decided.get(number, ("", {}))
                wanted = verdicts.get(stage, "absent" if number > newest else "any")
                right = {"yes": came != errno.EPERM, "no": came == errno.EPERM, "absent": came == errno.ENOSYS}
                if came != NOT_TRIED and not right.get(wanted, True):
                    wrong.append((number, name, wanted, errno.errorcode.get(came, came)))
            assert wrong == [], stage


def test_no_system_call_of_this_kernel_is_undecided() -> None:
    """A newer kernel has calls that nobody has looked at: they are to be added to profiles.cc and to the tables."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    newest = max(table())
    nothing = [ctypes.c_long(-1)] * 6
    for number in range(newest + 1, newest + 64):
        ctypes.set_errno(0)
        assert call(ctypes.c_long(number), *nothing) == -1 and ctypes.get_errno() == errno.ENOSYS, number
