"""One request without a server: the handler and the model in this process, so that a debugger works."""

import asyncio
import base64
import binascii
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec

from ..bundle_format.contract import Contract
from ..bundle_format.errors import ContractError, ModelError, UsageError
from ..bundle_format.manifest import STOCK, Manifest
from . import answers
from .answers import Answer
from .api import Context, Refused, Request
from .carrying import stock_name
from .loading import load_application
from .process import refused_from
from .routed import Application
from .tensors import Array, pack, unpack
from .unpacking import OF_BUNDLE, handler_files

if TYPE_CHECKING:
    from torch import Tensor

Run = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]  # named inputs to named outputs


@dataclass(frozen=True, slots=True)
class LocalCaller:
    """The handler's own model, by a function in this process. There are no others."""

    name: str
    version: str
    contract: Contract
    run: Run

    async def call(
        self, model: str, version: str, inputs: Mapping[str, object], timeout_ms: float | None
    ) -> dict[str, Array]:
        if model not in ("", self.name) or version not in ("", self.version):
            raise Refused(
                404, f"there is no model `{model or self.name}`{f' version {version}' if version else ''} here"
            )
        tensors = self._tensors(inputs)
        try:
            outputs = self.run(tensors)
        except ContractError as error:
            raise Refused(400, error.message) from None
        except ModelError as error:
            raise Refused(500, error.message) from None
        return {name: _array(tensor) for name, tensor in outputs.items()}

    def _tensors(self, inputs: Mapping[str, object]) -> "dict[str, Tensor]":
        """As they would arrive at a server: checked and converted by the same code."""
        import torch

        described, buffers = pack(self.contract, inputs)
        arrays = unpack(described, bytearray().join(buffers))
        wanted = {declared.name: getattr(torch, declared.dtype) for declared in self.contract.inputs}
        return {name: torch.from_numpy(array.copy()).to(wanted[name]) for name, array in arrays.items()}


def _array(tensor: "Tensor") -> Array:
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return array


def load_local(source: str, assets: Path, caller: LocalCaller) -> Application:
    """The handler, for requests in this process. HandlerError."""
    return load_application(source, Context(caller.name, caller.version, caller.contract, assets))


async def answer_locally(application: Application, request: Request, caller: LocalCaller) -> Answer:
    """One request's answer; a stream's parts as one body. What fails is told on stderr, as in a server's log."""
    try:
        made: Any = await application.handle(request, caller)
        if not hasattr(made, "__aiter__"):
            return answers.answer_from(made)
        parts = [item async for item in made]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise
        return answers.error_answer(request.path, refused_from(error, request))
    kind = answers.stream_type(parts[0] if parts else "")
    return Answer(200, [("content-type", kind)], b"".join(map(answers.part_from, parts)))


def request_of_file(path: Path, name: str, route: str | None) -> Request:
    """The file's bytes as the body of a request; its ending says what it is. UsageError where it cannot be read."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Request("POST", route or f"/predictions/{name}", body, headers={"content-type": kind}, id="local")


def request_of_record(record: Mapping[str, Any], name: str) -> Request:
    """A golden request: `{"path", "method", "headers"}` as needed, and its body as `json`, `text` or `base64`."""
    headers = {str(key).lower(): str(value) for key, value in dict(record.get("headers") or {}).items()}
    path, _, query = str(record.get("path") or f"/predictions/{name}").partition("?")
    if "json" in record:
        body, kind = msgspec.json.encode(record["json"]), "application/json"
    elif "text" in record:
        body, kind = str(record["text"]).encode(), "text/plain"
    elif "base64" in record:
        try:
            body, kind = base64.b64decode(str(record["base64"]), validate=True), "application/octet-stream"
        except binascii.Error:
            raise UsageError("`base64` of a request is no base64") from None
    else:
        raise UsageError("a request has no body", 'give it as `"json"`, `"text"` or `"base64"`')
    headers.setdefault("content-type", kind)
    method = str(record.get("method") or "POST")
    return Request(method, path, body, query=dict(parse_qsl(query)), headers=headers, id="golden")


def _own_handler(bundle: Path, manifest: Manifest) -> str:
    """The bundle's, if it is mctl's own code."""
    if manifest.handler is None:
        raise UsageError(f"`{bundle}` has no handler", "name one with `--handler`")
    if not manifest.handler.is_stock:
        raise UsageError(
            f"`{bundle}` brings Python code as its handler", "run it with `--handler bundle`, if you trust it"
        )
    return OF_BUNDLE


def run_request(bundle: Path, handler: str | None, file: Path, route: str | None, threads: int | None) -> Answer:
    """The answer of a bundle's handler, or another one, to the request that a file holds. MctlErrors."""
    from ..runner.session import load

    with load(bundle, threads) as session:
        manifest = session.manifest
        chosen = handler or _own_handler(bundle, manifest)
        name = stock_name(chosen)
        source, assets = handler_files(f"{STOCK}{name}" if name else chosen, str(bundle), "")
        caller = LocalCaller(manifest.name, manifest.version, manifest.contract, session.call)
        request = request_of_file(file, manifest.name, route)
        application = load_local(source, assets, caller)
        return asyncio.run(answer_locally(application, request, caller))
