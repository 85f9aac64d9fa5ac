"""Texts to tokens by a Hugging Face tokenizer.json, within what the model takes; longer ones are cut only if asked."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ...bundle_format.contract import Contract
from ...bundle_format.errors import HandlerError
from ...bundle_format.task import TOKENIZER_FILE, TaskSettings
from ..api import BadRequest, Context
from ..models import Model
from ..tensors import Array

_IN_THREAD = 20_000  # characters; fewer are done before another thread would have begun
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")

Text = str | tuple[str, str]  # a pair for models that compare two


class Tokens(NamedTuple):
    """One text's tokens."""

    ids: Sequence[int]
    types: Sequence[int]
    encoding: Any = None  # of the tokenizer: offsets, words


class Texts:
    """Tokenizes texts and calls the model with them: those of one length together."""

    def __init__(self, context: Context, settings: TaskSettings) -> None:
        contract = context.contract
        self.names = [declared.name for declared in contract.inputs]
        if not {"input_ids"} <= set(self.names) <= set(_INPUTS):
            raise HandlerError(
                f"the model takes {', '.join(self.names)}, not what a tokenizer makes",
                f"its inputs have to be of {', '.join(_INPUTS)}, or write a handler of your own",
            )
        self.max_tokens = min(filter(None, (settings.max_tokens, _longest(contract))), default=None)
        self.min_tokens = _shortest(contract)
        self.pad = next((declared.pad for declared in contract.inputs if declared.name == "input_ids"), None)
        self.vocabulary = self._load(context)

    def _load(self, context: Context) -> int:
        path = context.assets / TOKENIZER_FILE
        if not path.is_file():
            raise HandlerError(f"the handler has no `{TOKENIZER_FILE}`", "add it: `--asset tokenizer.json`")
        try:
            self.whole, self.cut = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
        except Exception as error:
            raise HandlerError(f"`{TOKENIZER_FILE}` cannot be read: {' '.join(str(error).split())[:200]}") from None
        for each in (self.whole, self.cut):
            each.no_padding()
        self.whole.no_truncation()
        if self.max_tokens is not None:
            self.cut.enable_truncation(self.max_tokens)
        self.unknown = getattr(self.whole.model, "unk_token", None)
        return int(self.whole.get_vocab_size())

    async def encode(self, texts: Sequence[Text], truncate: bool, field: str = "text") -> list[Tokens]:
        """Tokens of each text. BadRequest for one that is too long, unless it may be cut."""
        known = self.cut if truncate else self.whole
        if sum(map(_length, texts)) > _IN_THREAD:
            encodings = await asyncio.to_thread(known.encode_batch, texts)
        else:
            encodings = [known.encode(*text) if isinstance(text, tuple) else known.encode(text) for text in texts]
        for at, encoding in enumerate(encodings):
            self._refuse_long(len(encoding.ids), at, len(texts), field)
        return [Tokens(each.ids, each.type_ids, each) for each in encodings]

    def given(self, ids: Sequence[int], truncate: bool, at: int, of: int, field: str) -> Tokens:
        """Tokens that the client made itself."""
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise BadRequest(f"token {token} is not in the vocabulary of {self.vocabulary}", param=field)
        kept = ids[: self.max_tokens] if truncate else ids
        self._refuse_long(len(kept), at, of, field)
        return Tokens(kept, [0] * len(kept))

    async def outputs(self, model: Model, texts: Sequence[Tokens]) -> list[dict[str, Array]]:
        """Each text's outputs, without the batch axis."""
        groups: dict[int, list[int]] = {}
        for at, tokens in enumerate(texts):
            groups.setdefault(len(tokens.ids), []).append(at)
        calls = (model.call(self._inputs([texts[at] for at in group])) for group in groups.values())
        found: list[dict[str, Array]] = [{}] * len(texts)
        for group, made in zip(groups.values(), await asyncio.gather(*calls), strict=True):
            for row, at in enumerate(group):
                found[at] = {name: array[row] for name, array in made.items()}
        return found

    def _inputs(self, group: Sequence[Tokens]) -> dict[str, Array]:
        """Arrays for texts of one length; a text below the model's least length is padded to it."""
        length = len(group[0].ids)
        missing = max(0, self.min_tokens - length)
        if missing and (self.pad is None or "attention_mask" not in self.names):
            raise BadRequest(f"the text has {length} tokens, the model takes {self.min_tokens} or more")
        ids = [[*tokens.ids, *[int(self.pad or 0)] * missing] for tokens in group]
        types = [[*tokens.types, *[0] * missing] for tokens in group]
        made = {
            "input_ids": ids,
            "attention_mask": [[1] * length + [0] * missing for _ in group],
            "token_type_ids": types,
            "position_ids": [list(range(length + missing)) for _ in group],
        }
        return {name: np.asarray(made[name], np.int64) for name in self.names}

    def _refuse_long(self, count: int, at: int, of: int, field: str) -> None:
        if self.max_tokens is not None and count > self.max_tokens:
            which = "the text" if of == 1 else f"text {at}"
            raise BadRequest(
                f"{which} has {count} tokens, the model takes {self.max_tokens}: shorten it, or send `truncate: true`",
                param=field,
                code="context_length_exceeded",
            )
        if not count:
            raise BadRequest("a text without tokens cannot be sent to the model", param=field)


def _length(text: Text) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def _ids_axis(contract: Contract) -> int | str:
    return next(declared.shape[-1] for declared in contract.inputs if declared.name == "input_ids")


def _longest(contract: Contract) -> int | None:
    axis = _ids_axis(contract)
    return axis if isinstance(axis, int) else contract.dim(axis).max


def _shortest(contract: Contract) -> int:
    axis = _ids_axis(contract)
    return axis if isinstance(axis, int) else contract.dim(axis).min
