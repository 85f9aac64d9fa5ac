"""TorchServe's contract: handlers of a .mar run as they are; `ts.torch_handler.base_handler` and its like are here."""

import asyncio
import base64
import inspect
import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from ..bundle_format.contract import Contract
from ..bundle_format.errors import HandlerError
from .answers import Response
from .api import Context, Refused, Request, Route
from .form import media_type
from .models import Caller, PlainCaller
from .routed import run_in_thread

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class PredictionException(Exception):
    """TorchServe's own: the answer has this status and this message."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code


class Outputs(tuple[Any, ...]):
    """Several outputs of a model: by place, by name, or as an attribute."""

    names: tuple[str, ...]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.names:
            raise AttributeError(name)
        return self[name]

    def keys(self) -> tuple[str, ...]:
        return self.names


class CompiledModel:
    """What stands where TorchServe would have an `nn.Module`: called with torch tensors, it asks the server.

    Arguments are those of the eager model: by place or by name. A lone tensor comes back as one, several as Outputs.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self.caller: PlainCaller | None = None  # of the batch that is being handled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        names = [declared.name for declared in self._contract.inputs]
        if len(args) > len(names):
            raise Refused(400, f"the model takes {len(names)} inputs, {len(args)} were given")
        if self.caller is None:
            raise RuntimeError("the compiled model can be called when a request is handled, not before")
        inputs = dict(zip(names, args, strict=False)) | kwargs
        wanted = {declared.name: declared.dtype for declared in self._contract.inputs}
        converted = {name: _as_declared(value, wanted.get(name)) for name, value in inputs.items()}
        arrays = self.caller.call("", "", converted, None)
        tensors = [torch.from_numpy(arrays[output.name]) for output in self._contract.outputs]
        outputs = [output.name for output in self._contract.outputs]
        if outputs == ["output"]:
            return tensors[0]
        made = Outputs(tensors)
        made.names = tuple(outputs)
        return made

    def to(self, *args: Any, **kwargs: Any) -> "CompiledModel":
        return self

    eval = cpu = float = to


def _as_declared(value: Any, dtype: str | None) -> Any:
    """Whole numbers of another width become what the contract has, as eager models take either; nothing else does."""
    import torch

    if not isinstance(value, torch.Tensor) or dtype is None:
        return value
    wanted = getattr(torch, dtype)
    both_whole = not (value.is_floating_point() or wanted.is_floating_point or value.dtype == torch.bool)
    return value.to(wanted) if both_whole and value.dtype != wanted else value


class BaseHandler:
    """TorchServe's base class; its model is the compiled one."""

    model: Any = None
    mapping: Any = None
    device: Any = None
    initialized = False
    context: Any = None
    manifest: Any = None
    map_location: Any = None
    model_pt_path: Any = None
    explain = False
    target = 0

    def initialize(self, context: Any) -> None:
        """Sets `model`, `device`, `manifest`, and `mapping` from index_to_name.json."""
        import torch

        self.context = context
        self.manifest = context.manifest
        self.device, self.map_location = torch.device("cpu"), "cpu"
        self.model = context.compiled_model
        folder = Path(context.system_properties["model_dir"])
        serialized = (self.manifest or {}).get("model", {}).get("serializedFile")
        self.model_pt_path = str(folder / serialized) if serialized else None
        self.model_yaml_config = context.model_yaml_config
        self.mapping = load_label_mapping(str(folder / "index_to_name.json"))
        self.initialized = True

    def preprocess(self, data: Any) -> Any:
        import torch

        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model(data, *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def describe_handle(self) -> Any:
        return None

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        raise PredictionException("explanations are not served", 501)


class VisionHandler(BaseHandler):
    """Images as tensors, by the `image_processing` of the class."""

    image_processing: Any = None

    def preprocess(self, data: Any) -> Any:
        import torch

        return torch.stack([self._tensor_from(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _tensor_from(self, image: Any) -> Any:
        import torch
        from PIL import Image

        if isinstance(image, str):
            image = base64.b64decode(image)
        if isinstance(image, bytearray | bytes):
            return self.image_processing(Image.open(io.BytesIO(image)))
        return torch.FloatTensor(image)


def _processed(image: Any) -> Any:
    """Short side to 256, the middle 224 x 224, ImageNet's mean and deviation: what TorchServe's classifier does."""
    import torch

    from .stock.images import pixels_from

    return torch.from_numpy(pixels_from(image, resize=256, crop=224))


class ImageClassifier(VisionHandler):
    """The most likely classes of an image."""

    topk = 5
    image_processing: Any = staticmethod(_processed)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        import torch

        scores, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(scores.tolist(), self.mapping, classes.tolist())


def load_label_mapping(mapping_file_path: str, mapping: Any = None) -> Any:
    """What index_to_name.json holds; None where there is none."""
    path = Path(mapping_file_path)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("index_to_name.json holds no object")
    found = found.get("object_type_names", found)
    return {str(key): str(value[-1]) if isinstance(value, list) else value for key, value in found.items()}


def map_class_to_label(probs: Any, mapping: Any = None, lbl_classes: Any = None) -> list[dict[str, Any]]:
    """`[{label: score, …}, …]`; labels are numbers where there is no mapping."""
    classes = lbl_classes or [list(range(len(row))) for row in probs]
    return [
        {(mapping[str(at)] if mapping is not None else str(at)): score for at, score in zip(row, scores, strict=True)}
        for row, scores in zip(classes, probs, strict=True)
    ]


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """TorchServe's decorator; mctl's own metrics say where time goes."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


class Metrics:
    """TorchServe's `context.metrics`: taken, and not kept. `/metrics` has what the server measures."""

    def _ignored(self, *args: Any, **kwargs: Any) -> "Metrics":
        return self

    add_counter = add_time = add_size = add_percent = add_error = add_metric = _ignored
    add_metric_to_cache = get_metric = add_or_update = update = _ignored


@dataclass(slots=True)
class _OneRequest:
    """What TorchServe calls a request processor: headers in, status and headers out."""

    headers: Mapping[str, str]
    status: int = 200
    response_headers: dict[str, str] = field(default_factory=dict)


class TorchServeContext:
    """The `context` of TorchServe's handlers."""

    def __init__(self, context: Context, batch_size: int) -> None:
        self.model_name = context.name
        self.system_properties = {
            "model_dir": str(context.assets),
            "gpu_id": None,
            "batch_size": batch_size,
            "server_name": "mctl",
            "server_version": "1",
            "limit_max_image_pixels": True,
        }
        self.manifest = _manifest_of(context)
        self.model_yaml_config = _yaml_config(context.assets, self.manifest)
        self.metrics = Metrics()
        self.compiled_model = CompiledModel(context.contract)
        self.request_ids: dict[int, str] = {}
        self._requests: list[_OneRequest] = []

    def begin(self, requests: list[Request]) -> None:
        self.request_ids = {at: request.id for at, request in enumerate(requests)}
        self._requests = [_OneRequest(request.headers) for request in requests]

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self._requests[idx].headers.get(key.lower())

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return dict(self._requests[idx].headers)

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self._requests[idx].response_headers[key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self._requests[idx].response_headers

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        if self._requests:
            self._requests[idx].status = code

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for each in self._requests:
            each.status = code

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self._requests[idx].status, ""


def _manifest_of(context: Context) -> dict[str, Any]:
    """MAR-INF/MANIFEST.json of an unpacked .mar, else one that names the model."""
    path = context.assets / "MAR-INF" / "MANIFEST.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {"model": {"modelName": context.name, "modelVersion": context.version}}


def _yaml_config(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own settings, where the archive has some and PyYAML is there to read them."""
    name = manifest.get("model", {}).get("configFile")
    if not name or not (folder / name).is_file():
        return {}
    try:
        import yaml
    except ImportError:
        raise HandlerError(f"`{name}` of the handler needs PyYAML", "`pip install pyyaml`") from None
    return dict(yaml.safe_load((folder / name).read_text(encoding="utf-8")) or {})


def data_from(request: Request) -> dict[str, Any]:
    """A request as TorchServe's handlers get it: each part of a form by its name, else the whole body as `body`."""
    data: dict[str, Any] = {name: text.encode() for name, text in request.query.items()}
    kind = request.headers.get("content-type", "")
    if media_type(kind) in _FORMS:
        return data | {name: _value(part.content_type, part.value) for name, part in request.read_form().items()}
    return data | {"body": _value(kind, request.body)}


def _value(content_type: str, body: bytes | bytearray) -> Any:
    """JSON and text are decoded where they can be; anything else stays bytes."""
    kind = media_type(content_type)
    try:
        if kind == "application/json":
            return json.loads(body)
        if kind.startswith("text/"):
            return body.decode()
    except ValueError:
        pass
    return bytearray(body)


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    caller: Caller
    done: asyncio.Future[object]


class TorchServeApplication:
    """Calls the handler in one thread, one batch after another, as TorchServe does."""

    routes: tuple[Route, ...] = ()
    streams = False

    def __init__(
        self,
        entry: Callable[..., Any] | type,
        context: Context,
        *,
        batch_size: int = 1,
        batch_delay_ms: float = 0,
        file: Path,
    ) -> None:
        self._context = TorchServeContext(context, batch_size)
        self._batch_size = batch_size
        self._delay = batch_delay_ms / 1000
        self._threads = ThreadPoolExecutor(1, "handler")
        self._queue: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._handle = self._prepared(entry, file)

    def resize(self, concurrency: int) -> None:
        """One thread, whatever the concurrency: these handlers keep a batch's data in themselves."""

    def _prepared(self, entry: Callable[..., Any] | type, file: Path) -> Callable[..., Any]:
        from .loading import describe

        try:
            if not inspect.isclass(entry):
                entry(None, self._context)  # as TorchServe does, for the function to initialize itself
                return entry
            made: Any = entry()
            if hasattr(made, "initialize"):
                made.initialize(self._context)
            if getattr(made, "model", None) is not self._context.compiled_model:
                sys.stderr.write("warning: the handler loads a model of its own; requests are not batched by mctl\n")
            handle: Callable[..., Any] = made.handle
            return handle
        except BaseException as error:
            raise HandlerError(f"the handler of `{file.name}` cannot be initialized: {describe(error)}") from error

    async def handle(self, request: Request, caller: Caller) -> object:
        waiting = _Waiting(request, caller, asyncio.get_running_loop().create_future())
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.done
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            raise

    async def _work(self) -> None:
        """Gathers batches, as large as the setting says or as old as it allows, and handles one after another."""
        while True:
            await self._arrived.wait()
            deadline = time.monotonic() + self._delay
            while self._queue and len(self._queue) < self._batch_size and (left := deadline - time.monotonic()) > 0:
                self._arrived.clear()
                try:
                    await asyncio.wait_for(self._arrived.wait(), left)
                except TimeoutError:
                    break
            batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
            if not self._queue:
                self._arrived.clear()
            if batch:
                await self._handle_batch(batch)

    async def _handle_batch(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        last = max(batch, key=lambda waiting: waiting.request.deadline)  # the calls have its time
        plain = PlainCaller(last.caller, loop)
        try:
            answers = await run_in_thread(loop, self._threads, plain, lambda: self._answers(batch, plain))
        except Exception as error:
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(_as_refused(error))
            return
        assert isinstance(answers, list)
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.done.done():
                waiting.done.set_result(answer)

    def _answers(self, batch: list[_Waiting], plain: PlainCaller) -> list[object]:
        """In the thread: what the handler returns, one answer for each request."""
        self._context.begin([waiting.request for waiting in batch])
        self._context.compiled_model.caller = plain
        made = self._handle([data_from(waiting.request) for waiting in batch], self._context)
        if inspect.iscoroutine(made):
            made = asyncio.run(made)
        if not isinstance(made, list):
            raise TypeError(f"the handler returned a {type(made).__name__}, not a list with one item a request")
        if len(made) != len(batch):
            raise TypeError(f"the handler returned {len(made)} items for a batch of {len(batch)} requests")
        return [self._response(at, item) for at, item in enumerate(made)]

    def _response(self, at: int, item: object) -> Response:
        status, _ = self._context.get_response_status(at)
        return Response(status, self._context.get_response_headers(at), _body(item))


def _as_refused(error: Exception) -> Exception:
    if isinstance(error, PredictionException):
        return Refused(error.error_code, error.message)
    return error


def _body(item: object) -> object:
    if hasattr(item, "detach"):  # TorchServe sends a tensor as torch.save writes it
        import torch

        buffer = io.BytesIO()
        torch.save(item, buffer)
        return buffer.getvalue()
    return item


_MODULES: dict[str, dict[str, object]] = {
    "ts": {"__version__": "0"},
    "ts.context": {"Context": TorchServeContext},
    "ts.handler_utils": {},
    "ts.handler_utils.timer": {"timed": timed},
    "ts.service": {"PredictionException": PredictionException},
    "ts.torch_handler": {},
    "ts.torch_handler.base_handler": {"BaseHandler": BaseHandler},
    "ts.torch_handler.image_classifier": {"ImageClassifier": ImageClassifier},
    "ts.torch_handler.vision_handler": {"VisionHandler": VisionHandler},
    "ts.utils": {},
    "ts.utils.util": {
        "PredictionException": PredictionException,
        "load_label_mapping": load_label_mapping,
        "map_class_to_label": map_class_to_label,
    },
}


def provide_ts() -> None:
    """Handlers' `from ts.torch_handler.base_handler import BaseHandler` finds what is here."""
    for name, content in _MODULES.items():
        module = ModuleType(name, "TorchServe's names, as mctl has them")
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
