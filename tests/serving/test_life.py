"""Start, drain and death: of the server, and of its workers under load."""

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from .conftest import Mlp
from .server import Answer, Server, infer_binary, outputs_of, post
from .test_batching import INFER, eventually, random, start, stopped


class Load:
    """Clients that check their own numbers on every answer, until they are told to stop."""

    def __init__(self, server: Server, mlp: Mlp, clients: int = 8) -> None:
        self.server, self.mlp = server, mlp
        self.statuses: dict[int, int] = {}
        self.failures: list[BaseException] = []
        self.going = True
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self, seed: int) -> None:
        try:
            while self.going:
                x = random(1 + seed % 5, seed)
                seed += 100
                answer = self.server.request(INFER, *infer_binary(x=x))
                if answer.status == 200:
                    np.testing.assert_allclose(outputs_of(answer)["output"], self.mlp(x), rtol=1e-4, atol=1e-6)
                else:
                    assert answer.status == 503, answer
                    time.sleep(0.01)
                with self._lock:
                    self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        except BaseException as error:
            self.failures.append(error)

    def stop(self) -> dict[int, int]:
        self.going = False
        for thread in self._threads:
            thread.join()
        assert not self.failures, self.failures[0]
        return self.statuses


def test_loading_is_told_and_refused(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, ready=False) as server:
        answer = server.request("/v2/health/ready")
        if answer.status == 503:
            assert answer.json()["ready"] is False and answer.error.startswith("loading: ")
            refused = server.request(INFER, *infer_binary(x=random(1)))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert server.request("/v2/health/live").status == 200
        eventually(lambda: server.request("/v2/health/ready").status == 200)


@pytest.mark.parametrize(("instances", "signals"), [(1, [signal.SIGKILL, signal.SIGSEGV]), (2, [signal.SIGKILL])])
def test_workers_that_are_killed_under_load(mlp_bundle: Path, mlp: Mlp, instances: int, signals: list[int]) -> None:
    with Server(mlp_bundle, "--instances", str(instances)) as server:
        load = Load(server, mlp)
        for number in signals:
            time.sleep(0.5)
            victim = server.workers()[0]
            os.kill(victim, number)
            eventually(lambda victim=victim: victim not in server.workers())
            eventually(lambda: len(server.workers()) == instances)
            eventually(lambda: server.request("/v2/health/ready").status == 200)
        time.sleep(0.3)
        statuses = load.stop()
        assert set(statuses) == {200}  # what comes while there is no worker waits for it
        metrics = server.metrics()
        assert metrics['mctl_worker_restarts_total{reason="crash"}'] == len(signals)
        assert metrics['mctl_requests_total{code="ok"}'] == statuses[200]
        assert metrics['mctl_requests_total{code="error"}'] == 0


def test_a_worker_that_hangs_is_replaced(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server, ThreadPoolExecutor(4) as pool:
        old = server.workers()
        os.kill(old[0], signal.SIGSTOP)
        stuck = start(pool, server, random(1), x_mctl_timeout_ms="500")
        eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)  # the first to come is the one that is stuck
        patient = start(pool, server, random(2), x_mctl_timeout_ms="20000")
        assert stuck.result().status == 504
        assert patient.result().status == 200
        assert server.workers() != old
        assert server.metrics()['mctl_worker_restarts_total{reason="stuck"}'] == 1


@pytest.mark.parametrize(("divisor", "message", "restarts"), [("floor", "ZeroDivision", 0), ("trunc", "ended", 2)])
def test_the_request_that_fails_gets_500_and_no_other(
    fragile_bundle: Path, divisor: str, message: str, restarts: int
) -> None:
    def ask(by: int) -> Answer:
        tensors = {"x": 100, "floor": 1, "trunc": 1} | {divisor: by}
        arrays = {name: np.array([[value, 7]], np.int64) for name, value in tensors.items()}
        return server.request("/v2/models/divide/infer", *infer_binary(**arrays))

    with Server(fragile_bundle) as server, ThreadPoolExecutor(8) as pool:
        with stopped(server):  # so that the others share a batch
            first = pool.submit(ask, 1)
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            others = [pool.submit(ask, by) for by in (2, 0, 3, 5)]
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 4)
        assert first.result().status == 200
        answers = [done.result() for done in others]
        assert [answer.status for answer in answers] == [200, 500, 200, 200]
        assert message in answers[1].error
        for by, answer in zip((2, 3, 5), answers[:1] + answers[2:], strict=True):
            assert outputs_of(answer)["output_0" if divisor == "floor" else "output_1"].tolist() == [[100 // by, 1]]
        eventually(lambda: ask(4).status == 200)
        metrics = server.metrics()
        assert metrics['mctl_worker_restarts_total{reason="crash"}'] == restarts
        assert metrics['mctl_requests_total{code="error"}'] == 1


def test_without_a_worker_it_is_not_ready(mlp_bundle: Path) -> None:
    with Server(mlp_bundle) as server:
        os.kill(server.workers()[0], signal.SIGKILL)
        eventually(lambda: server.request("/v2/health/ready").status == 503)
        assert server.request(INFER, *infer_binary(x=random(1))).status == 200  # it waits


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_draining_answers_what_was_accepted(mlp_bundle: Path, mlp: Mlp, number: int) -> None:
    with Server(mlp_bundle) as server, ThreadPoolExecutor(8) as pool:
        kept = server.connect()
        assert kept.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").read().status == 200
        with stopped(server):
            inputs = [random(rows) for rows in (1, 2, 3)]
            accepted = [start(pool, server, inputs[0])]
            eventually(lambda: server.metrics()["mctl_inflight_batches"] == 1)
            accepted += [start(pool, server, x) for x in inputs[1:]]
            eventually(lambda: server.metrics()["mctl_queue_rows"] == 5)
            server.process.send_signal(number)
            eventually(lambda: server.request("/v2/health/ready").status == 503)
            refused = server.request(INFER, *infer_binary(x=random(1)))
            assert (refused.status, "draining" in refused.error) == (503, True)
            last = kept.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").read()
            assert last.headers["connection"] == "close"
        for x, done in zip(inputs, accepted, strict=True):
            np.testing.assert_allclose(outputs_of(done.result())["output"], mlp(x), rtol=1e-4, atol=1e-6)
        assert server.process.wait(5) == 0


def test_draining_under_load_loses_nothing(mlp_bundle: Path, mlp: Mlp) -> None:
    server = Server(mlp_bundle)
    body, headers = infer_binary(x=random(1))
    request = post(INFER, body, *(f"{name}: {value}" for name, value in headers.items()))
    answered = []

    def client() -> None:
        with server.connect() as raw:
            while True:
                raw.send(request)
                answer = raw.read()  # a connection that ends without an answer fails the test
                answered.append(answer.status)
                if answer.headers.get("connection") == "close":
                    return

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        for done in clients:
            done.result()
    assert server.process.wait(5) == 0
    assert set(answered) <= {200, 503} and answered.count(200) > 20


def test_drain_time_is_limited_and_a_second_signal_ends_at_once(mlp_bundle: Path) -> None:
    for options, signals, code in ((["--exit-timeout", "1"], 1, 1), ([], 2, 130)):
        server = Server(mlp_bundle, *options)
        workers = server.workers()
        os.kill(workers[0], signal.SIGSTOP)
        body, headers = infer_binary(x=random(1))
        with server.connect() as raw:
            raw.send(post(INFER, body, *(f"{name}: {value}" for name, value in headers.items())))
            eventually(lambda server=server: server.metrics()["mctl_inflight_batches"] == 1)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert server.process.wait(5) == code
        assert not Path(f"/proc/{workers[0]}").exists()


def test_no_worker_outlives_the_front(mlp_bundle: Path) -> None:
    server = Server(mlp_bundle, "--instances", "2")
    workers = server.workers()
    assert len(workers) == 2
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_a_worker_has_no_descriptors_of_the_front(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--debuggable") as server, server.connect() as raw:
        raw.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n").read()
        for worker in server.workers():
            targets = [str(fd.readlink()) for fd in Path(f"/proc/{worker}/fd").iterdir() if int(fd.name) > 2]
            assert not [target for target in targets if target.startswith("socket:")], targets


def test_descriptors_and_processes_do_not_pile_up(mlp_bundle: Path) -> None:
    with Server(mlp_bundle, "--debuggable") as server:
        fds = Path(f"/proc/{server.process.pid}/fd")
        before = len(list(fds.iterdir()))
        for _ in range(3):
            victim = server.workers()[0]
            os.kill(victim, signal.SIGKILL)
            eventually(lambda victim=victim: server.workers() not in ([victim], []))
            eventually(lambda: server.request(INFER, *infer_binary(x=random(1))).status == 200)
        assert len(list(fds.iterdir())) <= before + 1
        assert len(server.workers()) == 1


# --- starts that end at once -----------------------------------------------------------------------------------------


def test_a_port_in_use_and_a_bad_address(mlp_bundle: Path, refusal: Callable[..., tuple[int, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = refusal(mlp_bundle, "--port", port)
    assert (code, text) == (1, f"error: cannot listen on 127.0.0.1:{port}: another program listens there\n")
    code, text = refusal(mlp_bundle, "--host", "no.such.host.invalid")
    assert (code, text) == (1, "error: no such address: `no.such.host.invalid`\n")


def test_state_is_not_split_over_instances_unless_it_is_asked_for(
    stateful_bundle: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    code, said = refusal(stateful_bundle, "--instances", "2")
    assert code == 2 and "the model keeps state between calls" in said and "`--replicate-state`" in said
    with Server(stateful_bundle, "--instances", "2", "--replicate-state") as server:
        assert len(server.workers()) == 2


def test_files_that_are_no_bundle(tmp_path: Path, mlp_program: Path, refusal: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "missing", tmp_path / "text", mlp_program):  # a folder is one of models
        code, text = refusal(path)
        assert code == 1 and text.startswith("error: ") and text.count("\n") == 1 and str(path) in text, text


def test_a_bundle_with_other_weights_never_gets_ready(
    mlp_bundle: Path, tmp_path: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    path = Path(shutil.copy(mlp_bundle, tmp_path / "damaged.pt2"))
    content = bytearray(path.read_bytes())
    at = content.index(b"weights.safetensors")  # its data begins a little after its local header
    content[at + 20_000] ^= 1
    path.write_bytes(content)
    code, text = refusal(path)
    assert code == 1 and "weights.safetensors" in text


def test_a_libtorch_that_is_not_there(
    mlp_bundle: Path, tmp_path: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    code, text = refusal(mlp_bundle, "--libtorch", str(tmp_path))
    assert code == 1 and text.splitlines()[-1].startswith("error: ") and str(tmp_path) in text
