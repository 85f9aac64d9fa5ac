"""text-classification and token-classification: texts in, labels out, as transformers' pipelines say them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...bundle_format.task import TaskSettings
from ..api import BadRequest, Context, Request, route
from ..form import media_type
from ..models import Model
from ..tensors import Array
from .settings import read_settings
from .tokens import Text, Texts, Tokens


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def scores_of(logits: Array, settings: TaskSettings) -> Array:
    """What the model's task makes of its logits."""
    if settings.scores == "none":
        return logits
    return sigmoid(logits) if settings.scores == "sigmoid" else softmax(logits)


def best(scores: Array, settings: TaskSettings, top: int) -> list[dict[str, object]]:
    """Labels with their scores, the highest first."""
    order = np.argsort(-scores, kind="stable")[:top]
    return [{"label": settings.label(int(at)), "score": float(scores[at])} for at in order]


class TextRequest:
    """`{"text": …}` or `{"inputs": …}`, one text or a list, with options beside it; or plain text."""

    def __init__(self, texts: list[Text], alone: bool, options: dict[str, Any]) -> None:
        self.texts = texts
        self.alone = alone
        self.options = options

    @classmethod
    async def read(cls, request: Request) -> "TextRequest":
        if media_type(request.headers.get("content-type", "")) == "text/plain":
            return cls([await request.text()], True, dict(request.query))
        said = await request.json()
        if not isinstance(said, dict):
            raise BadRequest('the body is no object: send `{"text": "…"}`')
        field = "inputs" if "inputs" in said and "text" not in said else "text"
        given = said.get(field)
        pair = said.get("text_pair")
        texts = [given] if isinstance(given, str) else given
        pairs = [pair] if isinstance(pair, str) else pair
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f"`{field}` has to be a text, or a list of texts")
        parameters = said.get("parameters")
        options = {**said, **(parameters if isinstance(parameters, dict) else {})}
        if pairs is None:
            return cls(texts, isinstance(given, str), options)
        fits = isinstance(pairs, list) and len(pairs) == len(texts) and all(isinstance(text, str) for text in pairs)
        if not fits:
            raise BadRequest("`text_pair` has to be like `text`: one for each")
        return cls(list(zip(texts, pairs, strict=True)), isinstance(given, str), options)

    @property
    def truncate(self) -> bool:
        return truth(self.options.get("truncate", False), "truncate")

    @property
    def top(self) -> int:
        value = self.options.get("top", self.options.get("top_k", 5))
        if value is None:
            return 10**6
        text = str(value)
        if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
            raise BadRequest(f"`top` is `{text[:40]}`, allowed a whole number from 1")
        return int(text)


def truth(value: object, name: str) -> bool:
    """A JSON boolean, or one of a query."""
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise BadRequest(f"`{name}` has to be true or false", param=name)
    return value


class TextClassification:
    """`POST {"text": …}`, get `[{"label", "score"}, …]`; for a list of texts, a list of these."""

    def __init__(self, context: Context) -> None:
        self.settings = read_settings(context)
        self.texts = Texts(context, self.settings)
        self.output = context.contract.outputs[0].name

    @route("POST", "/classify")
    async def classify(self, request: Request, model: Model) -> object:
        asked = await TextRequest.read(request)
        top = asked.top
        tokens = await self.texts.encode(asked.texts, asked.truncate)
        made = await self.texts.outputs(model, tokens)
        found = [best(scores_of(outputs[self.output], self.settings), self.settings, top) for outputs in made]
        return found[0] if asked.alone else found


class TokenClassification:
    """`POST {"text": …}`, get what its words are: `[{"entity_group", "score", "word", "start", "end"}, …]`.

    With `aggregation_strategy: "none"` each token by itself.
    """

    def __init__(self, context: Context) -> None:
        self.settings = read_settings(context)
        self.texts = Texts(context, self.settings)
        self.output = context.contract.outputs[0].name

    @route("POST", "/tokens")
    async def tokens(self, request: Request, model: Model) -> object:
        asked = await TextRequest.read(request)
        strategy = asked.options.get("aggregation_strategy", "simple")
        if strategy not in ("none", "simple"):
            raise BadRequest(f"`aggregation_strategy` is `{str(strategy)[:40]}`, allowed `none` or `simple`")
        tokens = await self.texts.encode(asked.texts, asked.truncate)
        made = await self.texts.outputs(model, tokens)
        logits = [outputs[self.output] for outputs in made]
        found = [self._entities(*each) for each in zip(asked.texts, tokens, logits, strict=True)]
        if strategy == "simple":
            found = [self._grouped(entities) for entities in found]
        else:
            found = [[entity for entity in entities if entity["entity"] != "O"] for entities in found]
        return found[0] if asked.alone else found

    def _entities(self, text: Text, tokens: Tokens, logits: Array) -> list[dict[str, Any]]:
        """Each token that is no special one, with its likeliest label."""
        scores = softmax(logits)
        encoding = tokens.encoding
        return [
            {
                "entity": self.settings.label(int(scores[at].argmax())),
                "score": float(scores[at].max()),
                "index": at,
                "word": self._word(text, tokens, at),
                "start": encoding.offsets[at][0],
                "end": encoding.offsets[at][1],
            }
            for at in range(len(tokens.ids))
            if not encoding.special_tokens_mask[at]
        ]

    def _word(self, text: Text, tokens: Tokens, at: int) -> str:
        """The token; of one that is not in the vocabulary what stands in the text."""
        word: str = tokens.encoding.tokens[at]
        if word != self.texts.unknown or not isinstance(text, str):
            return word
        start, end = tokens.encoding.offsets[at]
        return text[start:end]

    def _grouped(self, entities: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Neighbours of one label as one; a `B-` begins another."""
        groups: list[list[dict[str, Any]]] = []
        for entity in entities:
            begins, tag = _tag(entity["entity"])
            if groups and not begins and _tag(groups[-1][-1]["entity"])[1] == tag:
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [self._group(group) for group in groups if _tag(group[0]["entity"])[1] != "O"]

    def _group(self, group: Sequence[dict[str, Any]]) -> dict[str, Any]:
        words = [entity["word"] for entity in group]
        decoder = self.texts.whole.decoder
        return {
            "entity_group": group[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([entity["score"] for entity in group])),
            "word": decoder.decode(words) if decoder is not None else " ".join(words),
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }


def _tag(label: str) -> tuple[bool, str]:
    """Whether it begins something, and what: `B-PER` is (True, "PER")."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label
