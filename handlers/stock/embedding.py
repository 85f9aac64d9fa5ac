"""text-embedding: texts to vectors, also as OpenAI's clients ask for them (`POST /v1/embeddings`)."""

import base64
from typing import Any

import numpy as np

from ..api import BadRequest, Context, Request, route
from ..models import Model
from ..tensors import Array
from .settings import read_settings
from .text import TextRequest, truth
from .tokens import Texts, Tokens

_MOST = 2048  # inputs of one request, as OpenAI has it


class TextEmbedding:
    """`POST {"text": …}`, get a vector, for a list of texts a list of vectors."""

    def __init__(self, context: Context) -> None:
        self.name = context.name
        self.texts = Texts(context, read_settings(context))
        output = context.contract.outputs[0]
        self.output = output.name
        self.size = output.shape[-1]

    @route("POST", "/embed")
    async def embed(self, request: Request, model: Model) -> object:
        asked = await TextRequest.read(request)
        tokens = await self.texts.encode(asked.texts, asked.truncate)
        vectors = await self._vectors(model, tokens)
        return vectors[0] if asked.alone else vectors

    @route("POST", "/v1/embeddings")
    async def embeddings(self, request: Request, model: Model) -> dict[str, object]:
        said = await request.json()
        if not isinstance(said, dict):
            raise BadRequest("the body is no JSON object")
        encoding = said.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise BadRequest("`encoding_format` has to be `float` or `base64`", param="encoding_format")
        self._refuse_dimensions(said.get("dimensions"))
        tokens = await self._tokens(said.get("input"), truth(said.get("truncate", False), "truncate"))
        vectors = await self._vectors(model, tokens)
        count = sum(len(each.ids) for each in tokens)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": at, "embedding": _base64(vector) if encoding == "base64" else vector}
                for at, vector in enumerate(vectors)
            ],
            "model": said.get("model") or self.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    async def _tokens(self, given: Any, truncate: bool) -> list[Tokens]:
        """Of a text, texts, tokens, or lists of tokens."""
        inputs = [given] if isinstance(given, str) or _are_tokens(given) else given
        if not isinstance(inputs, list) or not inputs:
            raise BadRequest("`input` has to be a text, tokens, or a list of these", param="input")
        if len(inputs) > _MOST:
            raise BadRequest(f"`input` has {len(inputs)} entries, allowed {_MOST}", param="input")
        if all(isinstance(each, str) for each in inputs):
            if not all(inputs):
                raise BadRequest("`input` holds an empty text", param="input")
            return await self.texts.encode(inputs, truncate, "input")
        if not all(map(_are_tokens, inputs)):
            raise BadRequest("`input` has to be a text, tokens, or a list of these", param="input")
        return [self.texts.given(ids, truncate, at, len(inputs), "input") for at, ids in enumerate(inputs)]

    async def _vectors(self, model: Model, tokens: list[Tokens]) -> list[Array]:
        return [outputs[self.output] for outputs in await self.texts.outputs(model, tokens)]

    def _refuse_dimensions(self, wanted: object) -> None:
        if wanted is not None and wanted != self.size:
            raise BadRequest(f"`dimensions` has to be {self.size}: the model has no other", param="dimensions")


def _are_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def _base64(vector: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
