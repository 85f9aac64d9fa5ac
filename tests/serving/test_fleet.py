"""Models in a folder or a file: versions come and go while the server answers."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as triton

from .fleet import Shelf, clients, eventually, factor_of, infer
from .server import Server


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def folder(tmp_path: Path, shelf: Shelf) -> Path:
    """Of two models; the scorer has two versions, which answer with 3 and 5."""
    models = tmp_path / "models"
    shelf.bundle(3, models / "scorer" / "1" / "bundle.pt2")
    shelf.bundle(5, models / "scorer" / "2" / "bundle.pt2")
    shelf.bundle(7, models / "other" / "1" / "any_name.pt2")
    return models


def put(source: Path, version: Path) -> None:
    """As deployments do: written beside, then renamed."""
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, version / "new")
    (version / "new").rename(version / "bundle.pt2")


def looks(server: Server) -> None:
    """Has the folder looked at now rather than within a second."""
    os.kill(server.process.pid, signal.SIGHUP)


@pytest.fixture
def served(folder: Path) -> Iterator[Server]:
    with Server(folder, standalone=True) as server:
        eventually(lambda: server.request("/v2/health/ready").status == 200)
        eventually(lambda: server.request("/v2/models/scorer/versions/1/ready").status == 200)
        yield server


def test_a_folder_is_served(served: Server) -> None:
    assert factor_of(infer(served, "scorer")) == 5  # the highest version
    assert factor_of(infer(served, "scorer/versions/1")) == 3
    other = infer(served, "other")
    assert (factor_of(other), other.headers["x-mctl-version"], other.json()["model_name"]) == (7, "1", "other")
    assert served.request("/v2/models/scorer").json()["versions"] == ["1", "2"]
    assert "scorer (version 1)" in served.request("/").body.decode()
    unknown = infer(served, "scorer/versions/9")
    assert (unknown.status, unknown.error) == (404, "model 'scorer' has no version '9': it has '1', '2'")


def test_versions_and_models_come_and_go(served: Server, folder: Path, shelf: Shelf) -> None:
    with clients(served, "scorer") as noted:
        put(shelf.bundle(9), folder / "scorer" / "10")  # 10 is higher than 2
        eventually(lambda: (9, "10") in noted[-4:])
        shutil.rmtree(folder / "scorer" / "10")
        eventually(lambda: (5, "2") in noted[-4:])
        put(shelf.bundle(11), folder / "late" / "1")
        eventually(lambda: infer(served, "late").status == 200)
    assert set(noted) == {(5, "2"), (9, "10")}  # each version with its own numbers
    shutil.rmtree(folder / "late")
    eventually(lambda: infer(served, "late").status == 404)


def test_a_bundle_is_replaced_under_load(served: Server, folder: Path, shelf: Shelf) -> None:
    with clients(served, "scorer") as noted:
        for factor in (9, 11, 13):
            put(shelf.bundle(factor), folder / "scorer" / "2")
            looks(served)
            eventually(lambda factor=factor: (factor, "2") in noted[-4:])  # type: ignore[misc]
    factors = [factor for factor, _ in noted]
    assert set(factors) == {5, 9, 11, 13}
    seen = sorted(set(factors), key=lambda factor: len(factors) - factors[::-1].index(factor))
    assert seen == [5, 9, 11, 13]  # in this order, and none of them once more after the next


def test_half_a_bundle_is_none(served: Server, folder: Path, shelf: Shelf) -> None:
    whole = shelf.bundle(9).read_bytes()
    path = folder / "scorer" / "3" / "bundle.pt2"
    path.parent.mkdir()
    path.write_bytes(whole[: len(whole) // 2])
    eventually(lambda: any(f"`{path}`" in line for line in served.lines))
    assert factor_of(infer(served, "scorer")) == 5
    path.write_bytes(whole)
    eventually(lambda: factor_of(infer(served, "scorer")) == 9)


def test_a_version_that_is_wrong_here_changes_nothing(served: Server, folder: Path, shelf: Shelf) -> None:
    put(shelf.bundle(9, golden_factor=3), folder / "scorer" / "3")
    looks(served)
    warning = "warning: model 'scorer', version '3': "
    eventually(lambda: any(line.startswith(warning) for line in served.lines))
    assert factor_of(infer(served, "scorer")) == 5
    told = infer(served, "scorer/versions/3")
    assert told.status == 503 and "could not be loaded: golden case" in told.error
    assert served.request("/v2/health/ready").status == 200
    put(shelf.bundle(9), folder / "scorer" / "3")  # mended
    eventually(lambda: factor_of(infer(served, "scorer")) == 9)


def test_a_deleted_file_goes_on_serving_until_the_folder_is_looked_at(served: Server, folder: Path) -> None:
    with clients(served, "scorer") as noted:
        (folder / "scorer" / "2" / "bundle.pt2").unlink()
        eventually(lambda: (3, "1") in noted[-4:])
    assert set(noted) == {(5, "2"), (3, "1")}


def test_settings_of_a_folder(folder: Path) -> None:
    (folder / "scorer" / "serve.toml").write_text("max_batch_size = 4\ninstances = 2\n")
    with Server(folder, "--max-batch-size", "8", standalone=True) as server:
        eventually(lambda: server.request("/v2/models/scorer/versions/2/ready").status == 200)
        eventually(lambda: server.request("/v2/models/other/ready").status == 200)
        metrics = server.request("/metrics").body.decode()
        assert 'mctl_batch_limit_rows{model="scorer",version="2"} 4' in metrics
        assert 'mctl_batch_limit_rows{model="other",version="1"} 8' in metrics
        assert 'mctl_workers{model="scorer",version="2",state="live"} 2' in metrics


def test_an_unreadable_serve_toml_leaves_out_its_model(folder: Path) -> None:
    (folder / "scorer" / "serve.toml").write_text("instances = 2\nthreds = 2\n")
    with Server(folder, standalone=True) as server:
        assert any("serve.toml, line 2" in line and "`threads`" in line for line in server.lines)
        assert infer(server, "scorer").status == 404
        assert factor_of(infer(server, "other")) == 7


@pytest.mark.parametrize(("which", "status"), [("any", 200), ("all", 503)])
def test_ready_with_a_model_that_fails(folder: Path, shelf: Shelf, which: str, status: int) -> None:
    put(shelf.bundle(9, golden_factor=3), folder / "wrong" / "1")
    with Server(folder, "--ready", which, standalone=True) as server:
        eventually(lambda: any("model 'wrong'" in line for line in server.lines))
        eventually(lambda: "loading" not in server.request("/v2/health/ready").body.decode())
        told = server.request("/v2/health/ready")
        assert told.status == status
        assert (which == "any") or "wrong: golden case" in told.error
        assert factor_of(infer(server, "scorer")) == 5


def test_an_empty_folder_waits_for_models(tmp_path: Path, shelf: Shelf) -> None:
    with Server(tmp_path, standalone=True, ready=False) as server:
        told = server.request("/v2/health/ready")
        assert (told.status, told.error) == (503, "there is no model yet")
        put(shelf.bundle(3), tmp_path / "late" / "1")
        looks(server)
        eventually(lambda: server.request("/v2/health/ready").status == 200)


def test_bundles_beside_one_that_is_wrong(shelf: Shelf, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(b"nothing")
    with Server(damaged, str(shelf.bundle(3)), standalone=True) as server:
        assert any(line.startswith("warning: `") and "damaged.pt2" in line for line in server.lines)
        assert factor_of(infer(server, "faulty")) == 3


def config(path: Path, **models: object) -> None:
    path.write_text(json.dumps({"schema": "mctl.state/1", "models": models}))


def versions(*bundles: Path) -> dict[str, object]:
    return {str(number): {"bundle": str(bundle)} for number, bundle in enumerate(bundles, 1)}


def test_a_file_says_what_is_served(shelf: Shelf, tmp_path: Path) -> None:
    three, five = shelf.bundle(3, tmp_path / "three.pt2"), shelf.bundle(5, tmp_path / "five.pt2")
    path = tmp_path / "state.json"
    scorer = {"versions": versions(Path("three.pt2"), five), "labels": {"stable": "1", "canary": "2"}}
    config(path, scorer={**scorer, "traffic": {"stable": 75, "canary": 25}})
    with Server(path, standalone=True, ready=False, flag="--config") as server:
        eventually(lambda: server.request("/v2/models/scorer/versions/canary/ready").status == 200)
        eventually(lambda: server.request("/v2/models/scorer/versions/stable/ready").status == 200)
        factors = [factor_of(infer(server, "scorer")) for _ in range(100)]
        assert (factors.count(3), factors.count(5)) == (75, 25)
        assert factor_of(infer(server, "scorer/versions/canary")) == 5
        keyed = {key: factor_of(infer(server, "scorer", x_mctl_key=key)) for key in map(str, range(40))}
        assert set(keyed.values()) == {3, 5}
        assert keyed == {key: factor_of(infer(server, "scorer", x_mctl_key=key)) for key in keyed}
        config(path, scorer={**scorer, "traffic": {"canary": 100}}, again={"versions": versions(three)})
        looks(server)
        eventually(lambda: infer(server, "again").status == 200)
        assert {factor_of(infer(server, "scorer")) for _ in range(10)} == {5}
        path.write_text('{"schema": "mctl.state/1",\n "models": {"scorer": {"verions": {}}}}')
        looks(server)
        eventually(lambda: any("nothing has changed" in line and "line 2" in line for line in server.lines))
        assert factor_of(infer(server, "scorer")) == 5


def test_names_with_slashes(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    document = {
        "schema": "mctl.state/1",
        "models": {"scorer": {"versions": versions(shelf.bundle(3))}},
        "aliases": {"org/scorer": "scorer"},
    }
    path.write_text(json.dumps(document))
    with Server(path, standalone=True, flag="--config") as server:
        for name in ("org/scorer", "org%2Fscorer", "org/scorer/versions/1"):
            assert factor_of(infer(server, name)) == 3
        assert server.request("/v2/models/org/scorer").json()["name"] == "scorer"
        assert infer(server, "org/other").status == 404
        with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert client.is_model_ready("org/scorer") and client.is_model_ready("scorer", "1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "mctl.state/2", "models": {}}', "this mctl reads `mctl.state/1`"),
        ('{"schema": "mctl.state/1", "models": {', "the text ends too early"),
        ('{"schema": "mctl.state/1",\n"models": {"m": {"versions": {}, "traffic": {"1": 50}}}}', "line 2: models.m.tr"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, refusal, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "state.json"
    path.write_text(text)
    for flag in ("--config", "--state"):
        code, told = refusal(f"{flag}={path}")
        assert code == 2 and said in told and f"`{path}`" in told


def test_what_does_not_go_together(tmp_path: Path, shelf: Shelf, refusal) -> None:  # type: ignore[no-untyped-def]
    code, told = refusal(shelf.bundle(3), "--config", str(tmp_path / "state.json"))
    assert code == 2 and "give no bundle beside it" in told
    code, told = refusal(shelf.bundle(3), "--state", str(tmp_path / "nowhere" / "state.json"))
    assert code == 2 and "cannot write beside the state file" in told
