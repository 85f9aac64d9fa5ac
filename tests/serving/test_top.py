"""`mctl top`: its figures against the clients' own, and what it says and does as a process."""

import codecs
import fcntl
import http.server
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mctl.bundle_format.errors import ServeError
from mctl.cli.top_view import duration, rate, seconds
from mctl.runner.scrape import address_from, read
from mctl.runner.telemetry import overview, snapshot

from .fleet import Shelf, eventually, infer
from .server import Server, infer_binary
from .test_batching import INFER, random
from .test_metrics import families

Run = Callable[..., subprocess.CompletedProcess[str]]
TOP = [sys.executable, "-m", "mctl.cli.main", "top"]


def interpolated(q: float, times: list[float], bounds: list[float]) -> float:
    """histogram_quantile by numpy: the histogram of `times`, and a line through its cumulative counts."""
    counts, _ = np.histogram(times, bins=[0, *bounds])  # of no time above the last bound
    return float(np.interp(q * len(times), [0, *np.cumsum(counts)], [0, *bounds]))


def test_figures_of_a_known_run(mlp_bundle: Path) -> None:
    """One request at a time: each is a batch of its own, and the headers of its answer tell its times."""
    rows = [1] * 21 + [3] * 10 + [5] * 6 + [33] * 3 + [64]  # 41: no quantile falls between two requests
    with Server(mlp_bundle) as server:
        for _ in range(30):  # not of the interval
            server.request(INFER, *infer_binary(x=random(2)))
        buckets = server.request("/v2/models/mlp").json()["properties"]["buckets"]["batch"]
        before = read(address_from(server.url))
        answers = [server.request(INFER, *infer_binary(x=random(count))).headers for count in rows]
        invalid = [server.request(INFER, b"{").headers for _ in range(4)]
        after = read(address_from(server.url))
        told = families(server)["mctl_request_duration_seconds"].samples
        bounds = [float(sample.labels["le"]) for sample in told if "le" in sample.labels]
    found = snapshot(before, after)
    padded = [min(size for size in buckets if size >= count) for count in rows]

    assert found.requests["ok"] * found.seconds == pytest.approx(41)
    assert found.requests["invalid"] * found.seconds == pytest.approx(4)
    assert found.total_requests["ok"] == 71
    assert found.pad_waste == pytest.approx(1 - sum(rows) / sum(padded))
    assert found.mean_rows == pytest.approx(np.mean(rows))
    assert found.batches * found.seconds == pytest.approx(41)
    assert found.batch_reasons == pytest.approx({"idle": 40 / 41, "full": 1 / 41})
    expected = {1: 21, 4: 10, 8: 6, 64: 4}
    assert {size.at_most: size.batches for size in found.batch_sizes} == expected
    for size in found.batch_sizes:
        assert size.share == pytest.approx(expected[size.at_most or 0] / 41)

    def times(headers: list, name: str) -> list[float]:  # type: ignore[type-arg]
        return [float(header[name]) / 1000 for header in headers]

    def compare(told, measured: list[float]) -> None:  # type: ignore[no-untyped-def]
        count = len(measured)
        assert told.count == count
        assert told.mean == pytest.approx(np.mean(measured), abs=1e-6)  # the headers have whole microseconds
        for q, value in ((0.5, told.p50), (0.9, told.p90), (0.99, told.p99)):
            # one of them may lie so near a bound that its header is on the other side
            around = [interpolated(q + step / count, measured, bounds[:-1]) for step in (-1.01, 1.01)]
            assert around[0] <= value <= around[1], (q, value, around)

    compare(found.latency, times(answers + invalid, "x-total-time"))
    compare(found.queue, times(answers, "x-queue-time"))
    for size in (1, 4, 8):
        ran = [headers for headers in answers if headers["x-mctl-bucket"] == f"batch={size}"]
        compare(found.compute[f"batch={size}"], times(ran, "x-inference-time"))
    assert list(found.compute) == ["batch=1", "batch=4", "batch=8", "batch=64"]
    assert found.stages is not None
    assert found.stages.queue == pytest.approx(np.mean(times(answers, "x-queue-time")), abs=1e-6)
    assert found.stages.compute == pytest.approx(np.mean(times(answers, "x-inference-time")), abs=1e-6)


def test_once_prints_one_picture(server: Server, run_mctl: Run) -> None:
    done = run_mctl("top", server.url, "--once", "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    info = read(address_from(server.url)).info()
    lines = done.stdout.splitlines()
    assert lines[0].split() == f"mlp version 1 at {server.url} ready".split()
    assert lines[1].startswith(f"{info['digest'][:12]}, torch {info['torch']}, {info['target']}, up ")
    assert re.fullmatch(r"the last 0\.\d s:", lines[2])
    names = [line[:12].rstrip() for line in lines[4:]]
    assert names == ["requests/s", "latency", "queue time", "now", "workers", "processes"]
    assert "1 live, 0 starting; restarts: none" in done.stdout


def test_json_is_the_same_snapshot(server: Server, run_mctl: Run) -> None:
    server.request(INFER, *infer_binary(x=random(3)))
    done = run_mctl("top", server.url, "--json", "--interval", "0.2")
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema"], found["ok"], found["url"]) == (0, "mctl.top/1", True, server.url)
    assert (found["model"], found["ready"], found["workers"]) == ("mlp", True, {"live": 1, "starting": 0})
    assert found["total_requests"]["ok"] >= 1 and found["memory"] > 50e6 and found["queue_capacity"] == 256


def test_a_pipe_gets_one_picture_after_the_other(server: Server) -> None:
    code = f"{shlex.join(TOP)} {server.url} --interval 0.1 | grep -m 3 requests/s"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("requests/s") == 3
    assert "Traceback" not in done.stderr


def test_it_needs_no_torch(server: Server) -> None:
    code = "import sys; sys.modules.update(torch=None, numpy=None); from mctl.cli.main import main; main()"
    words = [sys.executable, "-c", code, "top", server.url, "--once", "--interval", "0.1"]
    assert subprocess.run(words, capture_output=True).returncode == 0


# --- servers that are not there, or something else -------------------------------------------------------------------


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(handler: type) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            thread.join()


def test_a_server_that_wants_a_token(mlp_bundle: Path, run_mctl: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret \r\nwhat comes after it\n")
    (tmp_path / "other").write_text("guess\n")
    with Server(mlp_bundle, "--token-file", str(tmp_path / "token")) as server:
        done = run_mctl("top", server.url, "--once", "--interval", "0.1", "--token-file", tmp_path / "token")
        assert (done.returncode, done.stderr) == (0, "") and "ready" in done.stdout
        for options, message in (
            ([], "wants a bearer token"),
            (["--token-file", tmp_path / "other"], "does not accept the bearer token"),
        ):
            done = run_mctl("top", server.url, "--once", *options)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith(f"error: `{server.url}` {message}\n\nhint: ")
            assert "--token-file" in done.stderr and "guess" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two words", b"\nsecond"])
def test_a_token_file_that_holds_none(tmp_path: Path, run_mctl: Run, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    done = run_mctl("top", "--token-file", tmp_path / "token")
    assert done.returncode == 2 and "has no bearer token in its first line" in done.stderr
    done = run_mctl("top", "--token-file", tmp_path / "missing")
    assert done.returncode == 2 and "no such file" in done.stderr


def test_nobody_there(run_mctl: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for options in ([], ["--once"], ["--json"]):
        done = run_mctl("top", url, *options)
        assert done.returncode == 1 and f"error: cannot reach `{url}`: connection refused\n" in done.stderr
        assert "mctl serve" in done.stderr


def test_something_else_there(run_mctl: Run) -> None:
    class Elsewhere(Quiet):
        def do_GET(self) -> None:
            self.send_response(301)  # whose headers would go along
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

    with listening(Elsewhere) as url:
        done = run_mctl("top", url, "--once")
    assert done.returncode == 1 and f"error: `{url}` answers, but it is no mctl server" in done.stderr

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            client.sendall(b"SSH-2.0-OpenSSH\r\n")
            client.close()

        threading.Thread(target=greet).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run_mctl("top", url, "--once")
    assert done.returncode == 1 and f"error: `{url}` answers, but does not speak HTTP\n" in done.stderr


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServeError, match=f"`{url}` does not answer within 0.2 s"):
            read(address_from(url), timeout=0.2)


def test_what_a_server_says_cannot_move_the_cursor(run_mctl: Run) -> None:
    class Hostile(Quiet):
        def do_GET(self) -> None:
            body = b'mctl_bundle_info{model="\x1b[2Jm",torch="a\\nb\r"} 1\nmctl_model_ready 0\n'
            if self.path != "/metrics":
                body = b'{"error": "\\u001b[2J", "model_stats": [3]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with listening(Hostile) as url:
        done = run_mctl("top", url, "--once", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "\\x1b[2Jm version unknown" in done.stdout
        and "torch a\\nb\\r" in done.stdout
        and "not ready: \\x1b[2J" in done.stdout
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout)


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:port", "http://host:99999", "http://h/?q", "http://ü"]
)
def test_urls_that_are_none(url: str, run_mctl: Run) -> None:
    done = run_mctl("top", url)
    assert done.returncode == 2 and done.stderr.startswith(f"error: `{url}` is no URL of a server\n")


# --- a terminal ------------------------------------------------------------------------------------------------------


class Terminal:
    """`mctl top` on a terminal of its own."""

    def __init__(self, url: str, columns: int = 100, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*TOP, url, "--interval", "0.2"],
            stdin=slave, stdout=slave, stderr=slave,
            env={**environ, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)
        self.seen, self.decode = "", codecs.getincrementaldecoder("utf-8")().decode

    def until(self, text: str) -> str:
        """Reads on; what came until `text`, without what moves the cursor or colours."""
        start, end = len(self.seen), time.monotonic() + 30
        while text not in plain(self.seen[start:]):
            assert time.monotonic() < end, plain(self.seen)
            self.read()
        return plain(self.seen[start:])

    def read(self) -> bool:
        if select.select([self.master], [], [], 0.2)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # nobody has the other end
                return False
            self.seen += self.decode(data)
            return bool(data)
        return True

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        while self.read():
            if self.process.poll() is not None and not select.select([self.master], [], [], 0)[0]:
                break
        os.close(self.master)
        return self.process.wait(10)


def plain(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", text)


ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_screen_is_given_back(server: Server, number: int, code: int) -> None:
    terminal = Terminal(server.url)
    terminal.until("the last 0.2 s")
    assert terminal.end(number) == code
    assert terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    assert terminal.seen.rindex(LEAVE) > terminal.seen.rindex("requests/s")
    assert "Traceback" not in terminal.seen


def test_narrow_and_without_colour(server: Server) -> None:
    server.request(INFER, *infer_binary(x=random(3)))
    terminal = Terminal(server.url, columns=40, NO_COLOR="1")
    told = terminal.until("cores")
    assert terminal.end(signal.SIGINT) == 0
    assert all(len(line) <= 40 for line in told.splitlines())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.seen)


def test_a_server_that_goes_away_and_comes_back(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server:
        server.request(INFER, *infer_binary(x=random(3)))
        terminal = Terminal(server.url)
        assert "batch=4" in terminal.until("the last 0.2 s")
    away = terminal.until(f"away: cannot reach `{server.url}`: connection refused; trying again. The last reading was:")
    assert "mlp version 1" in away + terminal.until("cores")  # a picture comes in pieces of any size
    with Server(mlp_bundle, "--port", str(server.port), ready=False):
        terminal.until("since its start")
        terminal.until("ready")
        terminal.until("the last 0.2 s")
        assert terminal.end(signal.SIGINT) == 0


def test_why_it_is_not_ready(mlp_bundle: Path, run_mctl: Run) -> None:
    with Server(mlp_bundle) as server:
        os.kill(server.workers()[0], signal.SIGSTOP)
        os.kill(server.workers()[0], signal.SIGKILL)
        found = read(address_from(server.url))
        while found.value("mctl_model_ready"):
            found = read(address_from(server.url))
        assert found.why_not is not None and "signal 9" in found.why_not
        told = snapshot(None, found)
        assert (told.ready, told.workers["live"], told.restarts["crash"]) == (False, 0, 1)


def test_how_numbers_are_written() -> None:
    assert [seconds(s) for s in (None, 12e-6, 999.4e-6, 1e-3, 0.0123, 1.5, 10.0)] == [
        "-", "12 us", "999 us", "1 ms", "12.3 ms", "1.5 s", ">10 s"
    ]  # fmt: skip
    assert [rate(value) for value in (0, 0.123, 12.34, 123.4, 63_700)] == ["0", "0.123", "12.3", "123", "63,700"]
    assert [duration(value) for value in (0.4, 59, 61, 3600, 90_061)] == ["0 s", "59 s", "1 min 1 s", "1 h", "1 d 1 h"]


def test_several_versions_have_a_line_each(run_mctl: Run, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    models = tmp_path / "models"
    for name, version, factor in (("scorer", "1", 3), ("scorer", "2", 5), ("other", "1", 7)):
        shelf.bundle(factor, models / name / version / "bundle.pt2")
    with Server(models, standalone=True) as server:
        for path in ("scorer/versions/1", "scorer/versions/2", "other"):
            eventually(lambda path=path: server.request(f"/v2/models/{path}/ready").status == 200)  # type: ignore[misc]
        before = read(address_from(server.url))
        for path, count in (("scorer", 5), ("scorer/versions/1", 3), ("other", 2)):
            for _ in range(count):
                assert infer(server, path).status == 200
        found = overview(before, read(address_from(server.url)))
        counted = {(one.model, one.version): one.requests["ok"] * one.seconds for one in found.models}
        assert counted == pytest.approx({("scorer", "1"): 3, ("scorer", "2"): 5, ("other", "1"): 2})
        assert all(one.ready and one.workers == {"live": 1, "starting": 0} for one in found.models) and found.ready

        told = run_mctl("top", server.url, "--once", "--interval", "0.1").stdout
        assert "3 versions at" in told
        rows = [line.split()[:3] for line in told.splitlines()]
        assert [row for row in rows if row[-1:] == ["ready"]] == [
            ["other", "1", "ready"], ["scorer", "1", "ready"], ["scorer", "2", "ready"],
        ]  # fmt: skip
        every = json.loads(run_mctl("top", server.url, "--json", "--interval", "0.1").stdout)
        assert every["schema"] == "mctl.top.models/1" and len(every["models"]) == 3
        one = json.loads(run_mctl("top", server.url, "--json", "--interval", "0.1", "--model", "scorer").stdout)
        assert (one["schema"], one["model"], one["version"]) == ("mctl.top/1", "scorer", "2")
        assert one["total_requests"]["ok"] == 5
        missing = run_mctl("top", server.url, "--once", "--interval", "0.1", "--model", "scorer", "--version", "9")
        assert missing.returncode == 2
        assert "no model `scorer 9` in memory" in missing.stderr and "scorer 1, scorer 2" in missing.stderr


def test_a_server_without_a_model_in_memory(run_mctl: Run, tmp_path: Path) -> None:
    with Server(tmp_path, standalone=True, ready=False) as server:
        told = run_mctl("top", server.url, "--once", "--interval", "0.1")
        assert told.returncode == 0, told.stderr
        assert "0 versions at" in told.stdout and "there is no model yet" in told.stdout
