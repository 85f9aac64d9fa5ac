"""The Grafana dashboard: its queries are PromQL, and name only what a real server tells."""

import json
import re
from itertools import combinations
from pathlib import Path

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ..serving.server import Server, infer_binary
from ..serving.test_batching import INFER, random

DASHBOARD = json.loads((Path(__file__).parents[2] / "samples" / "grafana" / "mctl.json").read_text())
PANELS = DASHBOARD["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds


@pytest.fixture(scope="module")
def labels(mlp_bundle: Path) -> dict[str, set[str]]:
    """Every sample's name with the labels that it has."""
    with Server(mlp_bundle) as server:
        server.request(INFER, *infer_binary(x=random(3)))
        text = server.request("/metrics").body.decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: set(sample.labels) for sample in samples}


def parsed(query: str) -> promql_parser.Expr:
    """Grafana's variables are put in as Grafana does."""
    query = query.replace("$__rate_interval", "1m").replace("$model", "mlp|other")
    assert "$" not in query
    return promql_parser.parse(query)


def nodes(query: str) -> list[object]:
    found: list[object] = []
    promql_parser.walk(parsed(query), found.append)
    return found


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=lambda value: value if isinstance(value, str) else "")
def test_queries_name_what_a_server_tells(title: str, target: dict, labels: dict[str, set[str]]) -> None:
    selectors = [node for node in nodes(target["expr"]) if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    known = set().union(*(labels[selector.name] for selector in selectors)) | SCRAPED
    for selector in selectors:
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels[selector.name]
        if not selector.name.startswith("process_"):
            assert "model" in {matcher.name for matcher in selector.matchers.matchers}  # the variable is obeyed
    for node in nodes(target["expr"]):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= known
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= set(node.modifier.labels)


def test_counters_are_seen_as_rates_only() -> None:
    """A counter by itself says how long a server has run."""
    counters = re.compile(r"\w+_(total|bucket|sum|count)$")
    for title, target in TARGETS:
        inside = [
            node.args[0].vector_selector.name
            for node in nodes(target["expr"])
            if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase")
        ]
        named = [n.name for n in nodes(target["expr"]) if isinstance(n, promql_parser.VectorSelector)]
        assert sorted(filter(counters.match, named)) == sorted(inside), title


def test_what_has_to_be_there_is_there() -> None:
    names = {n.name for _, t in TARGETS for n in nodes(t["expr"]) if isinstance(n, promql_parser.VectorSelector)}
    assert names >= {
        "mctl_requests_total",
        "mctl_request_duration_seconds_bucket",
        "mctl_queue_duration_seconds_bucket",
        "mctl_queue_rows",
        "mctl_batch_rows_bucket",
        "mctl_padded_rows_total",
        "mctl_compute_duration_seconds_bucket",
        "mctl_worker_restarts_total",
        "mctl_model_ready",
        "mctl_bundle_info",
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
    }


def test_the_page_is_whole() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["model"]["definition"] == "label_values(mctl_bundle_info, model)"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["model"]["datasource"] == source
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 39
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["datasource"] == source and all(target["datasource"] == source for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and place["h"] > 0 < place["w"]
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart = (one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
                 or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"])  # fmt: skip
        assert apart, (one, other)
