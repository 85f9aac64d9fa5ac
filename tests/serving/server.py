"""A running mctl-runner, and clients that say exactly which bytes they send."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mctl.runner import native

DTYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "float64": "FP64", "float16": "FP16", "bool": "BOOL"}


def runner() -> Path:
    """The binary under test: MCTL_TEST_RUNNER names another build, one with sanitizers for example."""
    named = os.environ.get("MCTL_TEST_RUNNER")
    return Path(named) if named else native.find_runner()


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes

    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json()["error"]


class Server:
    """`mctl-runner serve` on a free port; a context manager that expects it to drain and exit with 0."""

    def __init__(
        self,
        bundle: Path,
        *options: str,
        ready: bool = True,
        libtorch: Path | None = None,
        standalone: bool = False,
        flag: str | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """`prepare` runs in the new process before it becomes the server. `standalone`: it is told of no libtorch.

        `bundle` is the value of `flag`, if that is given.
        """
        library = [] if standalone else ["--libtorch", libtorch or native.find_libtorch()]
        words = [runner(), "serve", *([flag] if flag else []), bundle, *library, "--port", "0", *options]
        self.process = subprocess.Popen(
            [*map(str, words)], stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=prepare
        )
        self.lines: list[str] = []
        self.reading = threading.Event()  # while it is cleared, nobody reads the server's stderr
        self.reading.set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait("listening on ").removeprefix("listening on ")
        self.port = int(self.url.rpartition(":")[2])
        if ready:
            self._wait("ready: ")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.reading.wait()
            self.lines.append(line.rstrip("\n"))

    def _wait(self, start: str) -> str:
        for _ in range(6000):
            found = [line for line in self.lines if line.startswith(start)]
            if found:
                return found[0]
            assert self.process.poll() is None, self.lines
            time.sleep(0.01)
        raise AssertionError(f"no line `{start}`: {self.lines}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(40) == 0, self.lines
        self._reader.join(5)

    def workers(self) -> list[int]:
        """The worker processes."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def request(self, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}, verb: str = "") -> Answer:
        """One request by urllib; `body` makes it a POST."""
        verb = verb or ("GET" if body is None else "POST")
        sent = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json", **headers}, method=verb
        )
        try:
            with urllib.request.urlopen(sent, timeout=60) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _lower(error.headers), error.read())

    def connect(self, source: str = "127.0.0.1") -> "Raw":
        return Raw(self.port, source)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels, without model and version."""
        samples = {}
        for line in self.request("/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name.replace(_labels(name), "").replace("{}", "")] = float(value)
        return samples


def _labels(name: str) -> str:
    """`model="m",version="1"` and the comma after it, as they stand in a sample's name."""
    if 'model="' not in name:
        return "\0"
    inside = name[name.index("{") + 1 : name.rindex("}")].split(",")
    return ",".join(inside[:2]) + ("," if len(inside) > 2 else "")


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Raw:
    """A TCP connection that reads answers one by one."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))
        self._rest = b""

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes | str) -> "Raw":
        self.socket.sendall(data.encode() if isinstance(data, str) else data)
        return self

    def read(self, *, head: bool = False) -> Answer:
        """The next answer; `head`: to a HEAD request."""
        start, _, self._rest = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        lines = start.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = 0 if head else int(headers.get("content-length", 0))
        while len(self._rest) < length:
            self._rest += self._some()
        body, self._rest = self._rest[:length], self._rest[length:]
        return Answer(int(lines[0].split()[1]), headers, body)

    def closed(self) -> bool:
        """Waits for the server's end of the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._rest:
            self._rest += self._some()
        return self._rest

    def _some(self) -> bytes:
        data = self.socket.recv(1 << 20)
        assert data, "the server closed the connection"
        return data


def post(path: str, body: bytes | str, *headers: str) -> bytes:
    """The bytes of a POST."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def infer_json(**inputs: np.ndarray) -> dict:
    """A request of JSON tensors."""
    return {
        "inputs": [
            {
                "name": name,
                "shape": list(value.shape),
                "datatype": DTYPES[str(value.dtype)],
                "data": np.atleast_1d(value).tolist() if value.size else [],
            }
            for name, value in inputs.items()
        ]
    }


def infer_binary(**inputs: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request of binary tensors, for binary answers."""
    tensors, raw = [], b""
    for name, value in inputs.items():
        data = np.ascontiguousarray(value).tobytes()
        tensors.append(
            {
                "name": name,
                "shape": list(value.shape),
                "datatype": DTYPES[str(value.dtype)],
                "parameters": {"binary_data_size": len(data)},
            }
        )
        raw += data
    text = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return text + raw, {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}


def outputs_of(answer: Answer) -> dict[str, np.ndarray]:
    """The tensors of an answer, JSON or binary."""
    assert answer.status == 200, answer.body[:500]
    length = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    raw, tensors = answer.body[length:], {}
    names = {oip: name for name, oip in DTYPES.items()}
    for tensor in json.loads(answer.body[:length])["outputs"]:
        dtype = np.dtype(names[tensor["datatype"]])
        if "data" in tensor:
            value = np.array(tensor["data"], dtype)
        else:
            size = tensor["parameters"]["binary_data_size"]
            value, raw = np.frombuffer(raw[:size], dtype), raw[size:]
        tensors[tensor["name"]] = value.reshape(tensor["shape"])
    assert not raw
    return tensors


def at_rest(held: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """The least that a server holds within half a second: the connection that was answered last may still be open."""
    readings = []
    for _ in range(50):
        readings.append(held())
        time.sleep(0.01)
    return min(readings)
