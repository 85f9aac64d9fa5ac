"""The management port: mctl's own paths, and Triton's and TorchServe's, by their real clients."""

import base64
import itertools
import json
import os
import resource
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from . import faulty
from .fleet import Shelf, clients, eventually, factor_of, infer
from .server import Answer, Server, at_rest


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


class Managed(Server):
    """A server with a management port, and requests to that."""

    def __init__(self, *words: str, **options: object) -> None:
        super().__init__(Path("0"), *words, flag="--admin-port", standalone=True, ready=False, **options)  # type: ignore[arg-type]
        self.data, self.admin = self.url, self._wait("management on ").removeprefix("management on ")

    def manage(self, path: str, body: object = None, verb: str = "", **headers: str) -> Answer:
        self.url = self.admin
        try:
            sent = None if body is None else json.dumps(body).encode()
            return self.request(path, sent, {name.replace("_", "-"): value for name, value in headers.items()}, verb)
        finally:
            self.url = self.data

    def kill(self) -> None:
        """As kill -9 does. The context manager then waits for a process that has ended well."""
        self.process.kill()
        self.process.wait()
        self.process = subprocess.Popen(["true"])
        self.process.wait()

    def patch(self, body: object, **headers: str) -> Answer:
        return self.manage("/admin/v1/state", body, "PATCH", **headers)

    def state(self) -> dict:  # type: ignore[type-arg]
        return self.manage("/admin/v1/state").json()

    def wait_for(self, path: str) -> None:
        try:
            eventually(lambda: self.request(f"/v2/models/{path}/ready").status == 200)
        except AssertionError:
            raise AssertionError(f"{path}: {self.manage('/admin/v1/models').body!r}") from None


@pytest.fixture
def store(tmp_path: Path, shelf: Shelf) -> Path:
    """A model store: `scorer` with versions 1 and 2, and bundles beside."""
    shelf.bundle(3, tmp_path / "store" / "scorer" / "1" / "bundle.pt2")
    shelf.bundle(5, tmp_path / "store" / "scorer" / "2" / "bundle.pt2")
    shelf.bundle(7, tmp_path / "store" / "seven.pt2")
    shelf.bundle(9, tmp_path / "store" / "wrong.pt2", golden_factor=3)
    return tmp_path / "store"


@pytest.fixture
def managed(store: Path, tmp_path: Path) -> Iterator[Managed]:
    words = ("--state", str(tmp_path / "state.json"), "--model-store", str(store), "--store", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    with Managed(*words) as server:
        yield server


def version(bundle: str, **settings: object) -> dict[str, object]:
    return {"bundle": bundle, **({"settings": settings} if settings else {})}


SCORER = {
    "models": {"scorer": {"versions": {"1": version("scorer/1/bundle.pt2"), "2": version("scorer/2/bundle.pt2")}}}
}


def test_the_state_is_changed_by_patches(managed: Managed) -> None:
    assert managed.state()["models"] == {}
    changed = managed.patch(SCORER)
    assert changed.status == 200 and set(changed.json()["models"]["scorer"]["versions"]) == {"1", "2"}
    managed.wait_for("scorer/versions/1")
    managed.wait_for("scorer/versions/2")
    assert factor_of(infer(managed, "scorer")) == 5
    traffic = {"models": {"scorer": {"labels": {"stable": "1"}, "traffic": {"stable": 80, "2": 20}}}}
    assert managed.patch(traffic).status == 200
    factors = [factor_of(infer(managed, "scorer")) for _ in range(100)]
    assert (factors.count(3), factors.count(5)) == (80, 20)
    listed = managed.manage("/admin/v1/models").json()["models"]["scorer"]["versions"]
    assert {name: (one["phase"], one["percent"]) for name, one in listed.items()} == {
        "1": ("ready", 80),
        "2": ("ready", 20),
    }
    back = managed.manage("/admin/v1/models/scorer/rollback", {})
    assert back.status == 409 and "no version to go back to" in back.error
    managed.patch({"models": {"scorer": {"labels": {"stable": "2"}, "traffic": {"2": None, "stable": 100}}}})
    assert {factor_of(infer(managed, "scorer")) for _ in range(9)} == {5}
    assert managed.manage("/admin/v1/models/scorer/rollback", {}).status == 200
    assert {factor_of(infer(managed, "scorer")) for _ in range(9)} == {3}
    events = managed.manage("/admin/v1/events?after=1").json()["events"]
    assert events[0]["id"] == 2 and {"loading", "ready", "changed"} <= {event["kind"] for event in events}


def test_what_restarts_has_its_requests_until_another_version_is_ready(
    managed: Managed, store: Path, shelf: Shelf
) -> None:
    with_one = {"models": {"scorer": {"versions": {"1": version("scorer/1/bundle.pt2")}}}}
    assert managed.patch(with_one).status == 200
    managed.wait_for("scorer/versions/1")
    victim = managed.workers()[0]
    long = faulty.rows((faulty.Action.NAP, 3000))  # so long its golden case takes
    shelf.bundle(5, store / "long.pt2", golden=[long])
    assert managed.patch({"models": {"scorer": {"versions": {"1": None, "2": version("long.pt2")}}}}).status == 200
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in managed.workers())
    assert factor_of(infer(managed, "scorer")) in (3, 5)
    managed.wait_for("scorer/versions/2")
    assert factor_of(infer(managed, "scorer")) == 5


@pytest.mark.parametrize(
    ("patch", "status", "said"),
    [
        (
            {"models": {"scorer": {"traffic": {"1": 50, "2": 40}}}},
            400,
            "models.scorer.traffic adds up to 90, not to 100",
        ),
        ({"models": {"scorer": {"labels": {"stable": "9"}}}}, 400, "points to version `9`, which is not there"),
        ({"models": {"a/b": {"versions": {}}}}, 400, "is no name"),
        ({"models": {"é": {"versions": {}}}}, 400, "is no name"),
        ({"models": {"m" * 300: {"versions": {}}}}, 400, "is no name"),
        (
            {"models": {"m": {"versions": {"1": {"bundle": "../outside.pt2"}}}}},
            400,
            "there is no file `../outside.pt2`",
        ),
        (
            {"models": {"m": {"versions": {"1": {"bundle": "/etc/passwd"}}}}},
            400,
            "there is no file `/etc/passwd` below",
        ),
        ({"models": {"m": {"versions": {"1": {"bundle": "http://there/b.pt2"}}}}}, 400, "is a URL"),
        ({"models": {"m": {"versions": {"1": {}}}}}, 400, "has no `bundle`"),
        ({"modls": {}}, 400, "modls"),
        ([], 400, "is no object"),
    ],
)
def test_a_wrong_patch_changes_nothing(managed: Managed, patch: object, status: int, said: str) -> None:
    assert managed.patch(SCORER).status == 200
    before = managed.state()
    told = managed.patch(patch)
    assert (told.status, said in told.error) == (status, True), told.error
    assert managed.state() == before


def test_a_link_out_of_the_store_is_not_followed(managed: Managed, store: Path, tmp_path: Path, shelf: Shelf) -> None:
    outside = shelf.bundle(3, tmp_path / "outside.pt2")
    (store / "link.pt2").symlink_to(outside)
    told = managed.patch({"models": {"m": {"versions": {"1": {"bundle": "link.pt2"}}}}})
    assert told.status == 400 and "there is no file `link.pt2` below" in told.error


def test_two_operators_do_not_overwrite_each_other(managed: Managed) -> None:
    managed.patch(SCORER)
    seen = managed.manage("/admin/v1/state").headers["etag"]
    first = managed.patch({"models": {"scorer": {"labels": {"a": "1"}}}}, If_Match=seen)
    assert first.status == 200 and first.headers["etag"] != seen
    second = managed.patch({"models": {"scorer": {"labels": {"b": "2"}}}}, If_Match=seen)
    assert second.status == 412 and "has changed since it was read" in second.error
    assert managed.state()["models"]["scorer"]["labels"] == {"a": "1"}


def test_the_data_port_manages_nothing(managed: Managed) -> None:
    for path, verb in (("/admin/v1/state", "GET"), ("/v2/repository/models/m/load", "POST"), ("/models", "GET")):
        told = managed.request(path, b"" if verb == "POST" else None)
        assert told.status == 403 and "`--admin-port`" in told.error
    assert managed.request("/v2/repository/index", b"").json() == []
    managed.patch(SCORER)
    managed.wait_for("scorer")
    assert factor_of(infer(managed, "scorer")) in (3, 5)  # and the management port serves all
    managed.url = managed.admin
    assert factor_of(infer(managed, "scorer")) in (3, 5)
    managed.url = managed.data


def test_the_management_port_has_a_token_of_its_own(tmp_path: Path, shelf: Shelf) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    with Managed("--admin-token-file", str(token), str(shelf.bundle(3))) as server:
        server.wait_for("faulty")
        assert server.manage("/admin/v1/state").status == 401
        assert server.manage("/admin/v1/state", Authorization="Bearer secret").status == 200
        assert factor_of(infer(server, "faulty")) == 3  # the data port needs none


def test_kill_9_and_the_same_models_again(store: Path, tmp_path: Path) -> None:
    words = ("--state", str(tmp_path / "state.json"), "--model-store", str(store))
    with Managed(*words) as server:
        server.patch(SCORER)
        server.patch({"models": {"scorer": {"labels": {"stable": "1"}, "traffic": {"stable": 70, "2": 30}}}})
        kept = server.state()
        server.kill()
    with Managed(*words) as server:
        assert server.state() == kept
        server.wait_for("scorer/versions/1")
        server.wait_for("scorer/versions/2")
        factors = [factor_of(infer(server, "scorer")) for _ in range(100)]
        assert (factors.count(3), factors.count(5)) == (70, 30)


def test_one_server_a_state(store: Path, tmp_path: Path, refusal, shelf: Shelf) -> None:  # type: ignore[no-untyped-def]
    with Managed("--state", str(tmp_path / "state.json")):
        code, told = refusal(shelf.bundle(3), "--state", str(tmp_path / "state.json"))
        assert code == 2 and "another server has the state file" in told


def no_files_over(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_refuses_the_change(store: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with Managed("--state", str(state), "--model-store", str(store), prepare=lambda: no_files_over(500)) as server:
        before = state.read_text()
        many = {str(number): version("seven.pt2") for number in range(20)}
        told = server.patch({"models": {"seven": {"versions": many}}})
        assert told.status == 503 and told.error.startswith("nothing has changed, since the state cannot be written to")
        assert state.read_text() == before and server.state()["models"] == {}


# --- Triton


def test_tritons_client_loads_and_unloads(managed: Managed, store: Path, tmp_path: Path) -> None:
    with (
        triton.InferenceServerClient(managed.admin.removeprefix("http://")) as admin,
        triton.InferenceServerClient(managed.data.removeprefix("http://")) as client,
    ):
        admin.load_model("scorer")
        assert client.is_model_ready("scorer", "2") and factor_of(infer(managed, "scorer")) == 5
        managed.wait_for("scorer/versions/1")
        ready = {"name": "scorer", "version": "1", "state": "READY", "reason": ""}
        assert client.get_model_repository_index() == [ready, {**ready, "version": "2"}]
        stats = client.get_inference_statistics("scorer", "2")["model_stats"]
        assert [(one["name"], one["version"], one["inference_count"]) for one in stats] == [("scorer", "2", 1)]
        config = {"max_batch_size": 4, "instance_group": [{"count": 2, "kind": "KIND_CPU"}]}
        admin.load_model("scorer", config=json.dumps(config))
        eventually(
            lambda: 'mctl_batch_limit_rows{model="scorer",version="2"} 4' in managed.request("/metrics").body.decode()
        )
        seven = (store / "seven.pt2").read_bytes()
        admin.load_model("inline", config="{}", files={"file:3/bundle.pt2": seven})
        assert factor_of(infer(managed, "inline/versions/3")) == 7
        assert len(list((tmp_path / "kept").iterdir())) == 1
        with pytest.raises(InferenceServerException, match="failed to load 'inline': golden case"):
            admin.load_model("inline", config="{}", files={"file:4/b.pt2": (store / "wrong.pt2").read_bytes()})
        assert set(managed.state()["models"]["inline"]["versions"]) == {"3"}  # as it was
        admin.unload_model("scorer")
        assert not client.is_model_ready("scorer")
        assert [one["name"] for one in client.get_model_repository_index()] == ["inline"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"parameters": {"config": json.dumps({"optimization": {}})}}, "optimization"),
        ({"parameters": {"config": json.dumps({"name": "other"})}}, "the request is for `scorer`"),
        ({"parameters": {"config": "{"}}, "parameters.config"),
        ({"parameters": {"file:bundle.pt2": ""}}, "names no version"),
        ({"parameters": {"file:1/bundle.pt2": base64.b64encode(b"no bundle").decode()}}, "is no bundle"),
        ({"parameters": {"file:1/bundle.pt2": "no base64 !"}}, "is no base64"),
        ({"parameters": {"colour": "red"}}, "allowed are `config` and `file:VERSION/NAME`"),
    ],
)
def test_load_requests_that_are_wrong(managed: Managed, tmp_path: Path, body: object, said: str) -> None:
    told = managed.manage("/v2/repository/models/scorer/load", body)
    assert (told.status, said in told.error) == (400, True), told.error
    assert managed.state()["models"] == {} and not list((tmp_path / "kept").iterdir())
    told = managed.manage("/v2/repository/models/none/load", {})
    assert told.status == 404 and "there is no model 'none'" in told.error


def test_what_a_folder_owns_is_not_loaded_by_request(store: Path) -> None:
    with Managed(str(store), "--model-store", str(store)) as server:
        server.wait_for("scorer")
        for path in ("/v2/repository/models/scorer/load", "/v2/repository/models/scorer/unload"):
            told = server.manage(path, {})
            assert told.status == 409 and "the folder" in told.error
        server.wait_for("scorer/versions/1")
        assert server.patch({"models": {"scorer": {"labels": {"old": "1"}, "traffic": {"old": 100}}}}).status == 200
        assert factor_of(infer(server, "scorer")) == 3  # traffic is not the folder's


def test_a_version_is_unloaded_with_requests_everywhere(managed: Managed) -> None:
    managed.patch(SCORER)
    managed.wait_for("scorer/versions/1")
    managed.wait_for("scorer/versions/2")
    with clients(managed, "scorer", 8) as noted:
        eventually(lambda: len(noted) > 50)
        managed.patch({"models": {"scorer": {"versions": {"2": None}}}})
        eventually(lambda: (3, "1") in noted[-4:])
        managed.patch(SCORER)
        eventually(lambda: (5, "2") in noted[-4:])
    assert set(noted) == {(3, "1"), (5, "2")}


# --- TorchServe: https://docs.pytorch.org/serve/management_api.html, its calls with the names of our files


def curl(server: Managed, words: str) -> tuple[int, object]:
    """A documented command; `-v` would print the status among much else."""
    words = words.replace("http://localhost:8081", server.admin).replace("curl -v", "curl")
    done = subprocess.run(
        [*shlex.split(words), "-s", "-w", "\n%{http_code}"], capture_output=True, text=True, check=True, timeout=60
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), json.loads(body)


def test_torchserves_documented_calls(managed: Managed) -> None:
    registered = curl(
        managed,
        'curl -v -X POST "http://localhost:8081/models?initial_workers=1&synchronous=true&model_name=noop&url=scorer/1/bundle.pt2"',
    )
    assert registered == (200, {"status": 'Model "noop" Version: 1 registered with 1 initial workers'})
    assert factor_of(infer(managed, "noop")) == 3
    scaled = curl(managed, 'curl -v -X PUT "http://localhost:8081/models/noop?min_worker=3&synchronous=true"')
    assert scaled == (200, {"status": "Workers scaled to 3 for model: noop"})
    live = 'mctl_workers{model="noop",version="1",state="live"} 3'
    eventually(lambda: live in managed.request("/metrics").body.decode())
    assert curl(managed, 'curl -v -X PUT "http://localhost:8081/models/noop?min_worker=1"') == (
        202,
        {"status": "Processing worker updates..."},
    )
    status, described = curl(managed, "curl http://localhost:8081/models/noop")
    assert status == 200 and isinstance(described, list)
    assert (described[0]["modelName"], described[0]["modelVersion"], described[0]["minWorkers"]) == ("noop", "1", 1)
    assert curl(managed, "curl http://localhost:8081/models/noop/all")[0] == 200
    curl(managed, 'curl -X POST "http://localhost:8081/models?url=seven.pt2&synchronous=true"')
    status, listed = curl(managed, 'curl "http://localhost:8081/models"')
    assert isinstance(listed, dict) and [one["modelName"] for one in listed["models"]] == ["faulty", "noop"]
    status, listed = curl(managed, 'curl "http://localhost:8081/models?limit=1"')
    assert isinstance(listed, dict) and len(listed["models"]) == 1 and listed["nextPageToken"] == "1"
    managed.patch({"models": {"noop": {"versions": {"2.0": version("scorer/2/bundle.pt2")}}}})
    managed.wait_for("noop/versions/2.0")
    assert factor_of(infer(managed, "noop")) == 3  # the first one stays the default
    assert curl(managed, "curl -v -X PUT http://localhost:8081/models/noop/2.0/set-default") == (
        200,
        {"status": 'Default vesion succsesfully updated for model "noop" to "2.0"'},
    )
    assert factor_of(infer(managed, "noop")) == 5
    assert curl(managed, "curl -X DELETE http://localhost:8081/models/noop/1") == (
        200,
        {"status": 'Model "noop" unregistered'},
    )
    assert curl(managed, "curl http://localhost:8081/ping") == (200, {"status": "Healthy"})
    assert curl(managed, 'curl -X POST "http://localhost:8081/models?url=https://there/x.mar"')[0] == 400
    assert curl(managed, "curl -X DELETE http://localhost:8081/models/none")[0] == 404


def test_metrics_of_versions_by_prometheus_parser(managed: Managed) -> None:
    managed.patch(SCORER)
    managed.wait_for("scorer/versions/1")
    managed.wait_for("scorer/versions/2")
    for name in ("1", "2", "2"):
        infer(managed, f"scorer/versions/{name}")
    text = urllib.request.urlopen(managed.data + "/metrics").read().decode()
    counted = {
        sample.labels["version"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "mctl_requests_total" and sample.labels["code"] == "ok"
    }
    assert counted == {"1": 1.0, "2": 2.0}


def test_many_loads_leave_nothing_behind(managed: Managed) -> None:
    """Descriptors, threads, processes and memory after many cycles are those after a few."""

    def cycle(count: int) -> None:
        for _ in range(count):
            managed.patch({"models": {"m": {"versions": {"1": version("seven.pt2")}}}})
            managed.wait_for("m")
            managed.patch({"models": {"m": None}})

    def held() -> tuple[int, int, int]:
        process = Path(f"/proc/{managed.process.pid}")
        return len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()]), len(managed.workers())

    cycle(5)
    eventually(lambda: not managed.workers())
    before, pages = at_rest(held), resident_of(managed)
    cycle(40)
    eventually(lambda: not managed.workers())
    assert at_rest(held) == before
    assert resident_of(managed) - pages < 2 << 20


def resident_of(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_signals_end_it_as_ever(managed: Managed) -> None:
    managed.process.send_signal(signal.SIGTERM)
    assert managed.process.wait(40) == 0


def stream_of(managed: Managed, **headers: str) -> httpx.Response:
    request = httpx.Client(timeout=60).build_request(
        "GET",
        managed.admin + "/admin/v1/events",
        headers={"Accept": "text/event-stream", **{name.replace("_", "-"): text for name, text in headers.items()}},
    )
    return httpx.Client(timeout=60).send(request, stream=True)


def next_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """As the standard has them: lines `id:` and `data:`, and an empty one behind each event."""
    for line in lines:
        assert line.startswith("id: ")
        data, rest = next(lines), next(lines)
        assert data.startswith("data: ") and rest == ""
        event = json.loads(data.removeprefix("data: "))
        assert str(event["id"]) == line.removeprefix("id: ")
        yield event


def test_events_come_in_a_stream(managed: Managed) -> None:
    load = {"models": {"scorer": {"versions": {"1": {"bundle": "scorer/1/bundle.pt2"}}}}}
    assert managed.patch(load).status == 200
    managed.wait_for("scorer")
    answer = stream_of(managed)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    events = next_events(answer.iter_lines())
    kept = [event["kind"] for event in itertools.islice(events, 3)]
    assert kept == ["changed", "loading", "ready"]
    again = stream_of(managed, Last_Event_ID="2")
    assert next(next_events(again.iter_lines()))["id"] == 3
    again.close()  # who leaves is no harm to the others
    assert managed.patch({"models": {"scorer": None}}).status == 200
    assert [event["kind"] for event in itertools.islice(events, 2)] == ["changed", "unloaded"]
    managed.process.send_signal(signal.SIGTERM)
    assert list(events) == []  # an end in good order
    assert managed.process.wait(40) == 0
    answer.close()


def test_an_id_that_is_none(managed: Managed) -> None:
    answer = stream_of(managed, Last_Event_ID="x1")
    assert answer.status_code == 400
    assert "allowed is the id of an event" in answer.read().decode()
