"""The servers that are compared: how each is started, what is sent to it, and that its answers are right."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bodies
import numpy as np
from examples import Examples, Row
from load import http_request
from measure import descendants, pinned

PEERS = Path(__file__).resolve().parent / "peers"
START_SECONDS, STOP_SECONDS = 180, 5


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers of one model share."""

    bundle: Path
    onnx: Path | None  # None: no peer is measured
    python: str  # the peers'
    threads: int  # of the model
    max_connections: int
    cpus: set[int]
    work_dir: Path


@dataclass(frozen=True, slots=True)
class Server:
    """One line of the tables. `{model}` in the path is the bundle's name."""

    name: str
    command: Callable[["Server", Setup, int], list[str]]
    path: str
    write: bodies.Writer
    read: bodies.Reader
    needs: tuple[str, ...] = ()  # packages, in the peers' environment
    options: tuple[str, ...] = ()
    has_numbers: bool = True  # false: zeros of the right shape
    has_metrics: bool = False

    def requests(self, examples: Examples, rows: tuple[Row, ...]) -> list[bytes]:
        """Whole HTTP requests, one a row."""
        path = self.path.format(model=examples.manifest.name)
        return [http_request(path, body, headers) for body, headers in (self.write(row.inputs) for row in rows)]


def _mctl(server: Server, setup: Setup, port: int) -> list[str]:
    # room for a request of each connection: what is compared is speed, not refusals
    words = [sys.executable, "-m", "mctl.cli.main", "serve", str(setup.bundle), f"--port={port}", *server.options]
    room = max(1024, 2 * setup.max_connections)
    limits = [f"--max-queue-size={room}", f"--max-connections={room}"]
    return [*words, f"--threads={setup.threads}", *limits, "--debuggable"]  # its memory is looked at


def _peer(server: Server, setup: Setup, port: int) -> list[str]:
    app, workers, batch = server.options
    words = [setup.python, str(PEERS / app), f"--model={setup.onnx}", f"--port={port}", f"--workers={workers}"]
    work_dir = setup.work_dir / Path(app).stem
    work_dir.mkdir(parents=True, exist_ok=True)
    threads = max(1, setup.threads // int(workers))
    return [*words, f"--threads={threads}", f"--max-batch-size={batch}", f"--work-dir={work_dir}"]


def servers_for(binary: bodies.Writer, workers: int, batch: int) -> list[Server]:
    """`binary`: how mctl is given the model's inputs; `workers`: of peers; `batch`: the contract's maximum."""

    def mctl(name: str, write: bodies.Writer, read: bodies.Reader, *options: str, **facts: bool) -> Server:
        return Server(name, _mctl, "/v2/models/{model}/infer", write, read, options=options, **facts)

    def peer(name: str, app: str, path: str, write: bodies.Writer, read: bodies.Reader, *needs: str) -> Server:
        options = (app, str(workers), str(batch))
        return Server(name, _peer, path, write, read, needs=(*needs, "onnxruntime"), options=options)

    as_bytes, as_oip = (bodies.write_bytes, bodies.read_bytes), (bodies.write_oip_binary, bodies.read_oip_binary)
    as_bentoml = (bodies.write_bentoml, bodies.read_json)
    fastapi = ("fastapi", "uvicorn", "uvloop", "httptools")
    return [
        mctl("mctl", binary, bodies.read_oip_binary, has_metrics=True),
        mctl("mctl null", binary, bodies.read_oip_binary, "--null", has_numbers=False),
        mctl("mctl JSON", bodies.write_oip_json, bodies.read_oip_json, has_metrics=True),
        peer("FastAPI + onnxruntime", "fastapi_app.py", "/infer", *as_bytes, *fastapi),
        peer("LitServe", "litserve_app.py", "/infer", *as_bytes, "litserve"),
        peer("BentoML", "bentoml_app.py", "/infer", *as_bentoml, "bentoml"),
        peer("TorchServe", "torchserve_app.py", "/predictions/model", *as_bytes, "ts", "model_archiver"),
        peer("Triton (pytriton)", "pytriton_app.py", "/v2/models/model/infer", *as_oip, "pytriton"),
    ]


@contextmanager
def started(server: Server, setup: Setup, examples: Examples, rows: tuple[Row, ...]) -> Iterator[tuple[int, int]]:
    """The process and the port of the server, which answered the golden rows one by one, and `rows` eight at a time."""
    port = _free_port()
    log = setup.work_dir / f"{server.name.replace(' ', '-')}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            server.command(server, setup, port),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=pinned(setup.cpus),
        )
        try:
            _wait_ready(server, process, port, examples, rows[0], log)
            for row in examples.rows:
                _check(server, port, examples, row)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda row: _check(server, port, examples, row), rows))
            yield process.pid, port
        finally:
            _stop(process)


def ask(server: Server, port: int, examples: Examples, row: Row) -> np.ndarray:
    """The outputs of one request. RuntimeError for another status than 200."""
    body, headers = server.write(row.inputs)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", server.path.format(model=examples.manifest.name), body, headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{server.name} answers {answer.status}: {content[:500]!r}")
    return server.read(content, {name.lower(): value for name, value in answer.getheaders()})


def _check(server: Server, port: int, examples: Examples, row: Row) -> None:
    got = ask(server, port, examples, row)
    if not server.has_numbers:
        assert got.shape == row.outputs.shape and not got.any(), "the null mode does not answer zeros"
        return
    slack = 1 if server.command is _mctl else 10  # peers run another compiler's code
    np.testing.assert_allclose(got, row.outputs, slack * examples.rtol, slack * examples.atol, err_msg=server.name)


def _wait_ready(
    server: Server, process: subprocess.Popen[bytes], port: int, examples: Examples, row: Row, log: Path
) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            ask(server, port, examples, row)
            return
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            if process.poll() is not None or time.monotonic() > until:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{server.name} did not start: {error}\n{tail}") from error
            time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then each of its processes, and makes sure that none is left."""
    family = descendants(process.pid)
    for number, asked in ((signal.SIGTERM, [process.pid]), (signal.SIGTERM, family), (signal.SIGKILL, family)):
        for pid in filter(_alive, asked):
            os.kill(pid, number)
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until and any(map(_alive, family)):
            process.poll()
            time.sleep(0.05)
    process.wait()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def missing(server: Server, python: str) -> list[str]:
    """The packages of `needs` that this Python does not have."""
    code = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    return subprocess.run(
        [python, "-c", code, *server.needs], capture_output=True, text=True, check=True
    ).stdout.split()
