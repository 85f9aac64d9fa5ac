"""The Kubernetes manifests: valid by Kubernetes' own schemas, consistent, and true of a real server."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mctl.runner.packing.pack import MODEL

from ..serving.server import Server, runner

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "samples" / "kubernetes"
OWN_SCHEMA = {"PodMonitor", "Kustomization"}  # not Kubernetes' own kinds


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def patched(document: dict, patch: list[dict]) -> dict:
    """RFC 6902, as far as the patches here go: `add` to objects and to the end of lists."""
    document = copy.deepcopy(document)
    for step in patch:
        assert step["op"] == "add"
        *parents, last = step["path"].strip("/").split("/")
        place: Any = document
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            assert last == "-"
            place.append(step["value"])
        else:
            assert last not in place
            place[last] = step["value"]
    return document


def manifests() -> dict[str, dict]:
    """What `kubectl apply -k` applies, by kind."""
    kustomization = load("kustomization.yaml")
    found = {document["kind"]: document for document in map(load, kustomization["resources"])}
    for patch in kustomization["patches"]:
        document = found[patch["target"]["kind"]]
        assert document["metadata"]["name"] == patch["target"]["name"]
        found[patch["target"]["kind"]] = patched(document, load(patch["path"]))
    return found


ALL = manifests()
POD = ALL["Deployment"]["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
PROBES = {name: SERVER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


def flag(name: str) -> str:
    [value] = [a.partition("=")[2] for a in SERVER["args"] if a.startswith(f"--{name}=")]
    return value


def test_every_file_belongs_to_it() -> None:
    kustomization = load("kustomization.yaml")
    used = {*kustomization["resources"], *(patch["path"] for patch in kustomization["patches"]), "kustomization.yaml"}
    assert used == {path.name for path in FOLDER.glob("*.yaml")}
    assert all(load(name)["metadata"]["name"] == "scorer" for name in kustomization["resources"])


@pytest.mark.parametrize("version", ["1.30", "1.34"])
@pytest.mark.parametrize("kind", sorted(set(ALL) - OWN_SCHEMA))
def test_kubernetes_takes_it(kind: str, version: str) -> None:
    kubernetes_validate.validate(ALL[kind], version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(ALL[kind] | {"speck": {}}, version, strict=True)


def test_everything_selects_the_pods() -> None:
    labels, ports = POD["metadata"]["labels"], {port["name"] for port in SERVER["ports"]}
    assert ALL["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert ALL["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert ALL["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert ALL["Service"]["spec"]["selector"] == labels
    assert {port["targetPort"] for port in ALL["Service"]["spec"]["ports"]} <= ports
    assert {probe["httpGet"]["port"] for probe in PROBES.values()} <= ports
    target = ALL["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", ALL["Deployment"]["metadata"]["name"])
    assert [port["containerPort"] for port in SERVER["ports"]] == [int(flag("port"))]


def test_the_token_is_the_secret_that_is_mounted() -> None:
    [endpoint] = ALL["PodMonitor"]["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    [mount] = [mount for mount in SERVER["volumeMounts"] if mount["name"] == "token"]
    [volume] = [volume for volume in POD["spec"]["volumes"] if volume["name"] == "token"]
    assert volume["secret"]["secretName"] == credentials["name"]
    assert flag("token-file") == f"{mount['mountPath']}/{credentials['key']}"
    command = (FOLDER / "README.md").read_text()
    assert f"create secret generic {credentials['name']} --from-literal={credentials['key']}=" in command
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == {volume["name"] for volume in POD["spec"]["volumes"]}
    # the file belongs to root; the group may read it
    assert volume["secret"]["defaultMode"] == 0o440 and POD["spec"]["securityContext"]["fsGroup"]


def test_times_leave_room_to_drain() -> None:
    pause = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause >= 5
    assert POD["spec"]["terminationGracePeriodSeconds"] > pause + int(flag("exit-timeout"))
    startup = PROBES["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 120
    liveness, readiness = PROBES["liveness"], PROBES["readiness"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 5 * readiness["periodSeconds"]


def test_threads_are_the_cpu_limit() -> None:
    resources = SERVER["resources"]
    assert int(flag("instances")) * int(flag("threads")) == int(resources["limits"]["cpu"])
    assert resources["requests"] == resources["limits"]


def test_it_may_do_little() -> None:
    pod, container = POD["spec"]["securityContext"], SERVER["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] >= 10000 and pod["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["readOnlyRootFilesystem"] and container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert POD["spec"]["automountServiceAccountToken"] is False


@pytest.fixture(scope="module")
def server(mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the arguments of the pod, but for its address and the place of the secret."""
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_text("s3cret")
    arguments = [a for a in SERVER["args"][1:] if not a.startswith(("--host=", "--port=", "--token-file="))]
    with Server(mlp_bundle, *arguments, f"--token-file={token}") as running:
        yield running


def test_the_server_takes_the_arguments(server: Server) -> None:
    table = subprocess.run([runner(), "serve", "--help"], capture_output=True, text=True).stdout
    known = set(re.findall(r"^  (--[a-z-]+)", table, re.MULTILINE))
    verb = set(json.loads((ROOT / "tests" / "cli" / "flags.json").read_text())["serve"])
    assert {argument.partition("=")[0] for argument in SERVER["args"][1:]} <= known & verb


def test_probes_and_metrics_answer(server: Server) -> None:
    for name, probe in PROBES.items():
        assert server.request(probe["httpGet"]["path"]).status == 200, name
    assert PROBES["liveness"]["httpGet"]["path"] != PROBES["readiness"]["httpGet"]["path"]
    [endpoint] = ALL["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert server.request(endpoint["path"]).status == 401
    samples = server.request(endpoint["path"], headers={"Authorization": "Bearer s3cret"}).body.decode()
    [metric] = ALL["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert f"\n{metric['pods']['metric']['name']}{{" in samples


def test_the_image_is_what_the_pod_runs() -> None:
    text = (ROOT / "samples" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {words.split()[0] for step, words in lines if step == "FROM"} == {
        "python:3.12-slim-bookworm",
        "gcr.io/distroless/base-nossl-debian12:nonroot",  # bookworm's C library
    }
    last = {step: words for step, words in lines}  # noqa: C416
    pod = POD["spec"]["securityContext"]
    assert last["USER"] == f"{pod['runAsUser']}:{pod['runAsGroup']}"
    assert json.loads(last["ENTRYPOINT"]) == [f"{last['COPY'].split()[-1]}/mctl-runner", "serve"]
    assert json.loads(last["CMD"])[0] == SERVER["args"][0] == f"{last['COPY'].split()[-1]}/{MODEL}"
    assert int(last["EXPOSE"]) == SERVER["ports"][0]["containerPort"]
