"""`mctl serve`: bundles over HTTP, by mctl-runner."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console


def serve(
    context: typer.Context,
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="BUNDLE…|FOLDER", help="Bundles, or a folder NAME/VERSION/*.pt2 [bundle.pt2]."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A file with models, versions and traffic; read again on SIGHUP.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="What was changed is kept in this file, over any end of the server.")
    ] = None,
    ready: Annotated[
        Literal["all", "any"] | None, typer.Option(help="Models that have to be ready for the server to be [any].")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="0: a free one, told on stderr [8000].")] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Names of this server in requests, `*`: any [its own on loopback without a token, else any]."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Its first line is what clients have to send as a bearer token [no token].")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="For management; 0: a free one, told on stderr [no management].")
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of that [127.0.0.1].")] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="Its first line is what operators have to send [no token].")
    ] = None,
    model_store: Annotated[
        Path | None, typer.Option(help="Folder of the bundles that operators may load [none].")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder for bundles that come in load requests [they are refused].")
    ] = None,
    max_load_mb: Annotated[int | None, typer.Option(help="MiB of a load request with a bundle in it [1024].")] = None,
    max_resident: Annotated[
        int | None, typer.Option(help="Models in memory; those on demand go for others [what fits].")
    ] = None,
    libtorch: Annotated[
        Path | None, typer.Option(help="Folder of libtorch_cpu.so [that of the installed torch].")
    ] = None,
    instances: Annotated[int | None, typer.Option(help="Worker processes [1].")] = None,
    replicate_state: Annotated[
        bool, typer.Option("--replicate-state", help="Each instance keeps the state of the model for itself.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="OpenMP threads of a worker [cores / instances].")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Rows [the contract's maximum].")] = None,
    max_queue_delay_us: Annotated[int | None, typer.Option(help="How long the oldest waits for company [0].")] = None,
    allowed_batch_sizes: Annotated[
        str | None, typer.Option(help="V,V,… a batch is padded to [the bundle's buckets].")
    ] = None,
    max_queue_size: Annotated[
        int | None, typer.Option(help="Rows; 503 beyond [4 x batch size x instances, at least 256].")
    ] = None,
    default_timeout_ms: Annotated[int | None, typer.Option(help="A request's deadline [30000].")] = None,
    latency_target_ms: Annotated[int | None, typer.Option(help="Batch size and admission keep it [no target].")] = None,
    percentile: Annotated[int | None, typer.Option(help="Percent of requests that keep the target [99].")] = None,
    max_request_rows: Annotated[
        int | None, typer.Option(help="Split into batches; 400 beyond [max-queue-size].")
    ] = None,
    max_body_mb: Annotated[int | None, typer.Option(help="MiB; 413 beyond, inflated too [64].")] = None,
    max_header_kb: Annotated[int | None, typer.Option(help="KiB of a request's head [64].")] = None,
    max_clients_mb: Annotated[
        int | None, typer.Option(help="MiB that all clients may make it hold; 503 beyond [a quarter of the memory].")
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="At the same time [1024].")] = None,
    idle_timeout: Annotated[int | None, typer.Option(help="Seconds without a request, or to send one [60].")] = None,
    exit_timeout: Annotated[int | None, typer.Option(help="Seconds to drain after SIGTERM or SIGINT [30].")] = None,
    worker_timeout: Annotated[
        int | None, typer.Option(help="Seconds that a batch may run; then a new worker [60].")
    ] = None,
    start: Annotated[
        Literal["full", "quick"] | None,
        typer.Option(help="quick: ready before all buckets are warmed and all golden cases replayed [full]."),
    ] = None,
    handler: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]FILE", help="Python between requests and tensors, or `stock:NAME` [none]."),
    ] = None,
    handlers: Annotated[int | None, typer.Option(help="Handler processes of a model [1].")] = None,
    handler_concurrency: Annotated[int | None, typer.Option(help="Requests in one of them [64].")] = None,
    handler_timeout: Annotated[
        int | None, typer.Option(help="Seconds that its event loop may be blocked; then a new process [60].")
    ] = None,
    handler_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="What runs handlers: it needs mctl [the Python that runs this].")
    ] = None,
    allow_handler: Annotated[
        bool, typer.Option("--allow-handler", help="Run Python code that a bundle brings.")
    ] = False,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="One JSON line a request on stderr.")] = False,
    bundle_memory: Annotated[
        Literal["map", "copy"] | None,
        typer.Option(help="map: a file that is changed stops being served; copy: to memory that nobody changes [map]."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the digests of weights and golden cases.")
    ] = False,
    sandbox: Annotated[
        Literal["default", "strict"] | None,
        typer.Option(help="strict: workers may do what is listed; default: all but what is listed [default]."),
    ] = None,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="Workers may do all that this user may, and dump core.")
    ] = False,
    debuggable: Annotated[
        bool, typer.Option("--debuggable", help="This user's debuggers may look into the processes; cores are dumped.")
    ] = False,
    null: Annotated[
        bool, typer.Option("--null", help="Answer zeros without a model: measures the server alone.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what is started as one JSON object.")] = False,
) -> None:
    """Serve bundles over HTTP: Open Inference Protocol v2, dynamic batching, Prometheus metrics."""
    from ..runner import native

    options = {name: value for name, value in context.params.items() if name not in ("bundles", "libtorch", "json")}
    bundles = bundles or ([] if config or state or admin_port is not None else [Path("bundle.pt2")])
    prepared = native.prepare(bundles, libtorch, options, console.say)
    verdict = prepared.verdict
    if verdict:
        console.say(f"host: {verdict.kind}, {verdict.reason}")
    if json:
        said = {"host": verdict.kind, "reason": verdict.reason} if verdict else {}
        console.emit_json("mctl.serve/1", True, **said, command=prepared.command)
    native.become(prepared)
