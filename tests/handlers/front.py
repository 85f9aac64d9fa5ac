"""A front in Python: speaks the frames to a real handler process, and stands for the models that it calls."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

LENGTHS = struct.Struct("<IQ")
DTYPES = {"FP32": np.float32, "INT64": np.int64, "FP16": np.float16, "UINT8": np.uint8, "BOOL": np.bool_}
Frame = tuple[dict[str, Any], bytes]
Model = Callable[[dict[str, Any], dict[str, np.ndarray]], "dict[str, np.ndarray] | tuple[int, str]"]

CONTRACT = {
    "dims": [{"name": "batch", "min": 1, "max": 8}],
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
    "batch_dim": "batch",
}


def double(call: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * 2}


class Front:
    """One handler process. Frames are kept by what they are for; `next` waits for one."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, model: Model, log: Path) -> None:
        self.process = process
        self.log_path = log
        self.model = model
        self.calls: list[dict[str, Any]] = []
        self.uncalled: list[int] = []
        self.ready: dict[str, Any] = {}
        self.ended = threading.Event()
        self._socket = sock
        self._lock = threading.Lock()
        self._frames: dict[Any, Queue[Frame]] = defaultdict(Queue)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        with self._lock:
            self._socket.sendall(LENGTHS.pack(len(text), len(body)) + text + body)

    def request(self, id: int, body: object = b"", **header: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = {"t": "request", "id": id, "method": "POST", "path": "/predictions/m", "query": "", "headers": []}
        said |= {"client": "1.2.3.4", "request_id": f"r{id}", "key": "", "deadline_ms": 60000, "depth": 0}
        self.send(said | header, data)

    def next(self, key: Any, timeout: float = 120) -> Frame:
        """The next frame of request `key`, or of this type."""
        return self._frames[key].get(timeout=timeout)

    def ask(self, body: object = b"", id: int = 1, **header: Any) -> tuple[int, dict[str, str], bytes]:
        """One request and its answer: status, headers, body."""
        self.request(id, body, **header)
        said, data = self.next(id)
        assert said["t"] == "answer", said
        return said["status"], dict(said["headers"]), data

    def ask_json(self, body: object = b"", id: int = 1, **header: Any) -> tuple[int, Any]:
        status, _, data = self.ask(body, id, **header)
        return status, json.loads(data)

    def stream(self, id: int) -> Iterator[Frame]:
        """Frames of a stream up to its end, each part taken as it comes."""
        while True:
            frame = self.next(id)
            yield frame
            if frame[0]["t"] in ("end", "break", "answer"):
                return
            if frame[0]["t"] == "part":
                self.send({"t": "more", "id": id})

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def alive(self) -> bool:
        """It answers a ping: what was sent before has been seen."""
        self.send({"t": "ping", "n": 7})
        return self.next("pong")[0]["n"] == 7

    def exit_code(self) -> int:
        return self.process.wait(timeout=120)

    def _read(self) -> None:
        try:
            while True:
                head, size = LENGTHS.unpack(self._exactly(LENGTHS.size))
                header, body = json.loads(self._exactly(head)), self._exactly(size)
                self._take(header, body)
        except (OSError, EOFError):
            self.ended.set()

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        kind = header["t"]
        if kind == "call":
            self.calls.append(header)
            threading.Thread(target=self._compute, args=(header, body), daemon=True).start()
        elif kind == "uncall":
            self.uncalled.append(header["call"])
            self._frames["uncall"].put((header, body))
        elif "id" in header:
            self._frames[header["id"]].put((header, body))
        else:
            self._frames[kind].put((header, body))

    def _compute(self, header: dict[str, Any], body: bytes) -> None:
        inputs, at = {}, 0
        for tensor in header["inputs"]:
            dtype = np.dtype(DTYPES[tensor["dtype"]])
            count = int(np.prod(tensor["shape"], dtype=np.int64))
            inputs[tensor["name"]] = np.frombuffer(body, dtype, count, at).reshape(tensor["shape"])
            at += count * dtype.itemsize
        assert at == len(body)
        result = {"t": "result", "id": header["id"], "call": header["call"], "model": "m", "model_version": "1"}
        made = self.model(header, inputs)
        if isinstance(made, tuple):
            self.send({**result, "status": made[0], "error": made[1]})
            return
        names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
        described = [{"name": n, "dtype": names[a.dtype], "shape": list(a.shape)} for n, a in made.items()]
        self.send({**result, "status": 200, "outputs": described}, b"".join(a.tobytes() for a in made.values()))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


@contextmanager
def started(handler: str | Path, model: Model = double, **init: Any) -> Iterator[Front]:
    """A handler process that was told what to load; `ready` holds its first frame, also where it failed."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            environment = {**os.environ, "MCTL_HANDLER_FD": str(theirs.fileno()), "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                [sys.executable, "-m", "mctl.handlers.process"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
            )
        theirs.close()
        front = Front(process, ours, model, log)
        try:
            said = {"t": "init", "name": "m", "version": "1", "handler": str(handler), "bundle": "", "assets": ""}
            front.send(said | {"contract": CONTRACT, "properties": {}, "concurrency": 8} | init)
            front.ready = _first_of(front, process)
            yield front
        finally:
            process.kill()
            process.wait()
            ours.close()


def _first_of(front: Front, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """`ready` or `failed`, whichever comes."""
    while True:
        gone = front.ended.wait(0.01)
        for kind in ("ready", "failed"):
            if not front._frames[kind].empty():
                return front._frames[kind].get()[0]
        if gone:
            return {"t": "gone", "code": process.wait()}
