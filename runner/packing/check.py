"""Tries a packed folder: serves it in a clean environment, replays its golden cases, asks once, and stops it."""

import http.client
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from urllib.parse import urlsplit

from ...bundle_format.archive import Archive
from ...bundle_format.contract import DTYPES
from ...bundle_format.dependencies import C_LIBRARY
from ...bundle_format.errors import PackError
from ...bundle_format.manifest import Golden
from ...bundle_format.tensors import read_header

_PATIENCE = 600.0  # seconds, for the slowest of models to get ready
_GOODBYE = 40.0  # seconds, more than it drains


@dataclass(frozen=True, slots=True)
class Trial:
    """What a try showed: seconds from the start to ready, and resident bytes of all its processes then."""

    seconds: float
    resident: int


def try_folder(folder: Path, script: str, archive: Archive) -> Trial:
    """PackError says what did not work, with what the server said."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [folder / script, "--port", "0", "--debuggable"],  # or nobody but root sees what it has mapped
        cwd="/",
        env={"PATH": os.defpath},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    timer = Timer(_PATIENCE, process.kill)
    timer.start()
    try:
        url = _ready(process)
        seconds = time.monotonic() - begin
        pids = [process.pid, *_children(process.pid)]
        _check_mapped(pids, folder)
        resident = sum(_resident(pid) for pid in pids)
        _ask(url, archive)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=_GOODBYE)
        if process.returncode:
            raise PackError(f"the packed server ended with {process.returncode} when it was stopped: {said.strip()}")
        return Trial(round(seconds, 3), resident)
    except subprocess.TimeoutExpired:
        raise PackError(f"the packed server did not end within {_GOODBYE:g} s after SIGTERM") from None
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


def _ready(process: "subprocess.Popen[str]") -> str:
    """The server's URL, once it has replayed the golden cases."""
    assert process.stderr is not None
    said: list[str] = []
    url = ""
    for line in process.stderr:
        said.append(line.rstrip())
        if line.startswith("listening on "):
            url = line.removeprefix("listening on ").strip()
        if line.startswith("ready: "):
            return url
    raise PackError(f"the packed server does not start: {'; '.join(said[-4:]) or 'it says nothing'}")


def _check_mapped(pids: list[int], folder: Path) -> None:
    """Nothing is loaded that is neither packed nor of the C library."""
    for pid in pids:
        with suppress(ProcessLookupError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.partition("/")[1] + line.partition("/")[2])
                if ".so" in path.name and path.name not in C_LIBRARY and path.parent != folder.resolve():
                    raise PackError(f"the packed server loads `{path}`, which is not packed")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _ask(url: str, archive: Archive) -> None:
    """One request: the smallest golden case. Its numbers were compared when the server replayed it."""
    manifest = archive.manifest
    if not manifest.golden:
        return
    head, body = _request(archive, min(manifest.golden, key=lambda case: manifest.members[case.member].size))
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        length = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        connection.request("POST", f"/v2/models/{manifest.name}/infer", head + body, length)
        answer = connection.getresponse()
        text = answer.read()
    except OSError as error:
        raise PackError(f"the packed server does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise PackError(f"the packed server answers {answer.status}: {text[:300].decode(errors='replace')}")


def _request(archive: Archive, golden: Golden) -> tuple[bytes, bytes]:
    """Head and tensors of a request of the Open Inference Protocol, with the inputs of a golden case."""
    view = archive.view(golden.member)
    inputs, raw = [], b""
    for name, entry in read_header(view).items():
        if name.startswith("input."):
            part = {"name": name.removeprefix("input."), "shape": entry.shape, "datatype": DTYPES[entry.dtype].oip}
            inputs.append({**part, "parameters": {"binary_data_size": entry.end - entry.begin}})
            raw += bytes(view[entry.begin : entry.end])
    return json.dumps({"inputs": inputs}).encode(), raw
