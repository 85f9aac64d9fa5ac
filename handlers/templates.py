"""What `mctl handler new` writes."""

import keyword
import re
from pathlib import Path

from ..bundle_format.errors import UsageError
from ..bundle_format.files import atomic

_ROUTES = '''"""{title}: answers `POST /{route}` (and `POST /predictions/MODEL`)."""

from mctl.handlers import BadRequest, Context, Model, Request, route

requirements: list[str] = []  # packages that this file imports, as pip names them


class {title}:
    def __init__(self, context: Context) -> None:  # once a process; context.assets is the folder with its files
        self.context = context

    @route("POST", "/{route}")
    async def {route}(self, request: Request, model: Model) -> object:
        said = await request.json()
        if not isinstance(said, dict):
            raise BadRequest("the body is no JSON object")
        outputs = await model.call(said)  # inputs by name: arrays or numbers in lists; batched with everybody's
        return {{name: array.tolist() for name, array in outputs.items()}}
'''

_TORCHSERVE = '''"""{title}: a handler as TorchServe has them; it runs there and in mctl."""

from ts.torch_handler.base_handler import BaseHandler


class {title}(BaseHandler):
    def preprocess(self, data):  # one item a request: {{"body": …}}, or the parts of a form by name
        import torch

        return torch.tensor([item.get("data") or item.get("body") for item in data], dtype=torch.float32)

    def postprocess(self, outputs):  # one item a request
        return outputs.tolist()
'''

_STREAM = '''"""{title}: answers `POST /{route}` piece by piece, as server-sent events."""

from collections.abc import AsyncIterator

from mctl.handlers import Context, Model, Request, route


class {title}:
    def __init__(self, context: Context) -> None:
        self.context = context

    @route("POST", "/{route}")
    async def {route}(self, request: Request, model: Model) -> AsyncIterator[object]:
        for inputs in await request.json():  # a list of inputs by name: an event for each
            outputs = await model.call(inputs)
            yield {{name: array.tolist() for name, array in outputs.items()}}
'''

_TEMPLATES = {"routes": _ROUTES, "torchserve": _TORCHSERVE, "stream": _STREAM}


def write_template(path: Path, kind: str, force: bool = False) -> Path:
    """Writes a handler whose class and route are called like the file. UsageError for a name that cannot be."""
    route = path.stem
    if not route.isidentifier() or keyword.iskeyword(route):
        raise UsageError(f"`{route}` cannot be the name of a class", "use letters, digits and `_`")
    if path.exists() and not force:
        raise UsageError(f"there is a file `{path}`", "choose another name, or write over it with `--force`")
    title = "".join(word[:1].upper() + word[1:] for word in re.split(r"_+", route)) or "Handler"
    with atomic(path) as file:
        file.write(_TEMPLATES[kind].format(title=title, route=route).encode())
    return path
