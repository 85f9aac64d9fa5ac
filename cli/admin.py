"""`mctl admin`: changes what a running server serves."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ..bundle_format.errors import UsageError
from . import console

if TYPE_CHECKING:
    from ..runner.operate import Operator

USES = {
    "ls": "",
    "load": "MODEL VERSION PATH",
    "unload": "MODEL [VERSION]",
    "scale": "MODEL INSTANCES",
    "label": "MODEL LABEL VERSION (`-`: take it away)",
    "traffic": "MODEL LABEL=PERCENT…",
    "shadow": "MODEL VERSION [PERCENT] (`off` as version: none)",
    "rollout": "MODEL VERSION [PATH]",
    "rollback": "MODEL",
    "events": "",
}
Asked = Literal["ls", "load", "unload", "scale", "label", "traffic", "shadow", "rollout", "rollback", "events"]


def admin(
    url: Annotated[str, typer.Argument(help="Of the management port: `mctl serve --admin-port`.")],
    what: Annotated[Asked, typer.Argument(help="What to do.")],
    words: Annotated[
        list[str] | None, typer.Argument(help=", ".join(f"{what} {use}".strip() for what, use in USES.items()) + ".")
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Of a rollout: percent of the requests, ascending to 100.")
    ] = "1,10,50,100",
    hold: Annotated[int, typer.Option(help="Seconds that a step of a rollout lasts at least.")] = 60,
    min_requests: Annotated[int, typer.Option(help="Requests that a step of a rollout sees at least.")] = 200,
    gate: Annotated[
        list[str] | None, typer.Option(help="What takes a rollout back: `errors=0.1%` or `p99=1.2x`; may be repeated.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds that a load may take.")] = 300,
    follow: Annotated[bool, typer.Option("--follow", help="Go on printing events.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="Holds the bearer token that the port wants.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Change what a running server serves: models, versions, labels, traffic, rollouts."""
    from ..runner.operate import Operator, gates_from
    from ..runner.scrape import address_from
    from .top import read_token

    operator, given = Operator(address_from(url), read_token(token_file)), words or []
    if what == "events" and follow:
        _follow(operator)
    rollout = {
        "steps": _steps(steps),
        "hold_s": hold,
        "min_requests": min_requests,
        "gates": gates_from(gate or []),
    }
    actions: dict[str, Callable[..., Any]] = {
        "ls": operator.models,
        "load": lambda model, version, path: _load(operator, model, version, path, wait),
        "unload": lambda model, version=None: operator.change_model(
            model, {"versions": {version: None}} if version else None
        ),
        "scale": lambda model, instances: _scale(operator, model, instances),
        "label": lambda model, label, version: operator.change_model(
            model, {"labels": {label: None if version == "-" else version}}
        ),
        "traffic": lambda model, *shares: _traffic(operator, model, shares),
        "shadow": lambda model, version, percent="10": _shadow(operator, model, version, percent),
        "rollout": lambda model, version, path=None: _roll_out(operator, model, version, path, rollout),
        "rollback": operator.roll_back,
        "events": lambda: operator.events(0),
    }
    _check_count(what, given)
    found = actions[what](*given)
    if json:
        console.emit_json("mctl.admin/1", True, **{what: found})
    elif what == "events":
        console.write(_line(event) for event in found)
    else:
        console.write(_table(operator.models()))


def _check_count(what: str, words: Sequence[str]) -> None:
    names = USES[what].partition(" (")[0].split()
    least = sum(not name.startswith("[") for name in names)
    if len(words) < least or (len(words) > len(names) and not USES[what].endswith("…")):
        raise UsageError(f"`mctl admin URL {what}` takes {USES[what] or 'nothing more'}")


def _steps(text: str) -> list[int]:
    try:
        return [int(step) for step in text.split(",")]
    except ValueError:
        raise UsageError(f"`{text}` are no steps", "write percents: `--steps 1,10,50,100`") from None


def _load(operator: "Operator", model: str, version: str, path: str, wait: float) -> Any:
    operator.change_model(model, {"versions": {version: {"bundle": path}}})
    return operator.wait_for(model, version, wait)


def _scale(operator: "Operator", model: str, instances: str) -> Any:
    if not instances.isdecimal():
        raise UsageError(f"`{instances}` is no number of instances")
    return operator.change_model(model, {"settings": {"instances": int(instances)}})


def _traffic(operator: "Operator", model: str, shares: Sequence[str]) -> Any:
    from ..runner.operate import replaced, traffic_from

    before = operator.state()["models"].get(model, {}).get("traffic", {})
    return operator.change_model(model, {"traffic": replaced(before, traffic_from(shares))})


def _shadow(operator: "Operator", model: str, version: str, percent: str) -> Any:
    if not percent.isdecimal():
        raise UsageError(f"`{percent}` is no percent")
    shadow = None if version == "off" else {"version": version, "percent": int(percent)}
    return operator.change_model(model, {"shadow": shadow})


def _roll_out(operator: "Operator", model: str, version: str, path: str | None, rollout: dict[str, Any]) -> Any:
    patch: dict[str, Any] = {"rollout": {"version": version, **rollout}}
    if path is not None:
        patch["versions"] = {version: {"bundle": path}}
    return operator.change_model(model, patch)


def _follow(operator: "Operator") -> NoReturn:
    seen = 0
    while True:
        for event in operator.events(seen):
            console.write([_line(event)])
            seen = event["id"]
        time.sleep(1)


def _line(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event["at_ms"] / 1000))
    rest = (f"{name}={value}" for name, value in event.items() if name not in ("id", "at_ms", "kind"))
    return " ".join([str(event["id"]), at, event["kind"], *rest])


def _table(models: dict[str, Any]) -> list[str]:
    """A line for each version, in columns."""
    rows = [("model", "version", "phase", "traffic", "workers", "")]
    for name, model in models.items():
        for version, its in model["versions"].items():
            shown = (f"{its['percent']} %" if its.get("percent") else "-", str(its.get("workers", "-")))
            rows.append((name, version, its["phase"], *shown, its.get("why", "")))
        if "rollout" in model:
            rows.append((name, "", "rollout", "", "", model["rollout"]))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
