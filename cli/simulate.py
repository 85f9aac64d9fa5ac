"""`mctl simulate`: what a setting of the batcher would do, before anything is deployed."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from . import console

if TYPE_CHECKING:
    from ..runner.policy import Settings
    from ..runner.trace import Result

_COLUMNS = (
    *("batch", "delay", "target", "mean", "p50", "p90", "p99", "last"),
    *("rows/batch", "padding", "busy", "served", "refused", "expired"),
)


def simulate(
    bundle: Annotated[Path | None, typer.Argument(help="A bundle whose curve `mctl bench --save` measured.")] = None,
    c_fixed_ms: Annotated[float | None, typer.Option(min=0, help="What a batch costs, and")] = None,
    c_item_ms: Annotated[float | None, typer.Option(min=0, help="what each of its rows adds.")] = None,
    arrivals: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines of MS [ROWS [TIMEOUT_MS]], or a server's access log.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Or a Poisson stream of so many requests a second.")
    ] = None,
    burst: Annotated[int, typer.Option(min=1, help="So many at a time.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.001, help="Of the stream.")] = 30.0,
    max_batch_size: Annotated[
        str, typer.Option(metavar="ROWS,…", help="One or several [the contract's maximum].")
    ] = "",
    max_queue_delay_us: Annotated[str, typer.Option(metavar="US,…", help="One or several.")] = "0",
    latency_target_ms: Annotated[str, typer.Option(metavar="MS,…", help="One or several [none].")] = "",
    percentile: Annotated[int, typer.Option(min=50, max=99, help="Of the requests that keep the target.")] = 99,
    allowed_batch_sizes: Annotated[str, typer.Option(metavar="ROWS,…", help="[the bundle's buckets]")] = "",
    max_queue_size: Annotated[int | None, typer.Option(min=1, help="[4 x batch x instances]")] = None,
    default_timeout_ms: Annotated[int, typer.Option(min=1, help="A request's deadline.")] = 30_000,
    instances: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the curve [the fewest that it has].")] = None,
    seed: Annotated[int, typer.Option(help="Of the stream.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run the server's batching policy over a trace of arrivals, for one setting or for each of several."""
    from ..runner import trace
    from ..runner.simulator import simulate as run

    cost, largest, buckets, unpadded = _cost(bundle, c_fixed_ms, c_item_ms, threads)
    if (arrivals is None) == (rate is None):
        raise UsageError("say when requests come", "with either `--arrivals FILE` or `--rate N`")
    came = trace.read_arrivals(arrivals) if arrivals else trace.poisson(rate or 0, seconds, burst, seed)
    sizes = _numbers("max-batch-size", max_batch_size) or [largest or 64]
    allowed = tuple(_numbers("allowed-batch-sizes", allowed_batch_sizes))
    found = []
    for settings in _grid(
        sizes,
        _numbers("max-queue-delay-us", max_queue_delay_us),
        [round(ms * 1000) for ms in _numbers("latency-target-ms", latency_target_ms, float)] or [None],
        allowed=allowed or buckets,
        unpadded=() if allowed else unpadded,
        percentile=percentile,
        queue=max_queue_size,
        instances=instances,
        timeout_us=default_timeout_ms * 1000,
    ):
        outcome = run(settings, cost, came, instances=instances, ahead=True)
        found.append((settings, trace.result_of(outcome, came, cost, instances)))
    if json:
        runs = [{"settings": asdict(settings), "result": asdict(result)} for settings, result in found]
        console.emit_json("mctl.simulate/1", True, cost=asdict(cost), arrivals=len(came), runs=runs)
        return
    console.write(_table(found))
    console.say(
        f"{len(came)} arrivals; a batch costs {cost.fixed_us / 1000:.3g} ms + {cost.per_row_us / 1000:.3g} ms a row"
    )


def _cost(bundle: Path | None, fixed_ms: float | None, item_ms: float | None, threads: int | None) -> Any:
    """The cost of a batch; and of the bundle, the largest batch, its buckets, and those that are not padded to."""
    from ..bundle_format.lookup import Lookup
    from ..runner.bench import Curve, fit
    from ..runner.simulator import Cost

    given = None
    if fixed_ms is not None or item_ms is not None:
        given = Cost((fixed_ms or 0) * 1000, (item_ms or 0) * 1000)
        if not (isfinite(given.fixed_us) and isfinite(given.per_row_us)):
            raise UsageError("a batch that never ends cannot be simulated", "give what it costs in milliseconds")
    if bundle is None:
        if given is None:
            raise UsageError("say what a batch costs", "name a bundle, or give `--c-fixed-ms` and `--c-item-ms`")
        return given, None, (), ()
    with open_bundle(bundle) as archive:
        manifest = archive.manifest
    batch = manifest.contract.batch_dim
    largest = manifest.contract.dim(batch).max if batch else 1
    buckets = manifest.buckets.get(batch or "", ())
    numbers = sorted({point.threads for point in manifest.curve})
    number = threads or (numbers[0] if numbers else 1)
    unpadded = Lookup(manifest, number).unpadded(batch) if batch else ()
    if given is not None:
        return given, largest, buckets, unpadded
    points = [p for p in manifest.curve if p.threads == number]
    measured = [(point.dims.get(batch or "", 1), point.median_us) for point in points]
    curve = fit(measured)
    if curve is None and measured and len(buckets) <= 1:  # every batch is of this size
        curve = Curve(measured[-1][1], 0, 0)
    if curve is None:
        why = f"no curve with {threads} threads" if numbers and threads else "no curve"
        raise UsageError(
            f"`{bundle}` has {why}", "`mctl bench --save` measures it; or give `--c-fixed-ms`, `--c-item-ms`"
        )
    return Cost(round(curve.fixed_us, 3), round(curve.row_us, 3)), largest, buckets, unpadded


def _numbers(option: str, text: str, kind: Any = int) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",")] if text else []
        if not all(map(isfinite, numbers)):
            raise ValueError
        return numbers
    except ValueError:
        raise UsageError(
            f"`--{option} {text}` is not understood", f"write `--{option} 1` or `--{option} 1,2`"
        ) from None


def _grid(
    sizes: list[int],
    delays: list[int],
    targets: list[int | None],
    *,
    allowed: tuple[int, ...],
    unpadded: tuple[int, ...],
    percentile: int,
    queue: int | None,
    instances: int,
    timeout_us: int,
) -> Iterator["Settings"]:
    from ..runner.policy import Settings

    for size, delay, target in product(sizes, delays, targets):
        yield Settings(
            max_batch_size=size,
            max_queue_size=queue or 4 * size * instances,
            max_queue_delay_us=delay,
            allowed_batch_sizes=allowed,
            unpadded_sizes=unpadded,
            default_timeout_us=timeout_us,
            latency_target_us=target,
            percentile=percentile,
        )


def _table(found: list[tuple["Settings", "Result"]]) -> list[str]:
    rows = [list(_COLUMNS)]
    for settings, result in found:
        target = settings.latency_target_us
        rows.append(
            [
                str(settings.max_batch_size),
                f"{settings.max_queue_delay_us} us",
                f"{target / 1000:g} ms" if target else "-",
                *map(_ms, (result.mean_ms, result.p50_ms, result.p90_ms, result.p99_ms)),
                f"{result.last_ms:.0f} ms",
                f"{result.rows_per_batch:.1f}",
                f"{result.padding:.0%}",
                f"{result.utilisation:.0%}",
                *map(str, (result.served, result.rejected, result.expired)),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"
