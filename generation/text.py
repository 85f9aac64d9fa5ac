"""Text to tokens and back, by the tokenizer that the bundle carries."""

from pathlib import Path
from typing import Any

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from ..bundle_format.layout import TOKENIZER

_INCOMPLETE = "\ufffd"  # what bytes become that are no character yet


class Tokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, data: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Known
        except ImportError:
            raise UsageError(
                "text needs the package `tokenizers`", "`pip install tokenizers`, or give tokens: `--prompt-ids 1,2,3`"
            ) from None
        try:
            self._known: Any = Known.from_buffer(data)
        except Exception as error:
            raise UsageError(f"the tokenizer cannot be read: {' '.join(str(error).split())[:200]}") from error

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._known.encode(text).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        text: str = self._known.decode(tokens, skip_special_tokens=True)
        return text


class Stream:
    """Decodes tokens as they come: text is held back until its last character is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.told = 0  # characters

    def add(self, token: int) -> str:
        """What can be told since the token before."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        return "" if text.endswith(_INCOMPLETE) else self._rest(text)

    def end(self) -> str:
        """What was held back."""
        return self._rest(self.tokenizer.decode(self.tokens))

    def _rest(self, text: str) -> str:
        rest = text[self.told :]
        self.told = max(self.told, len(text))
        return rest


def tokenizer_of(bundle: Path, folder: Path | None = None) -> Tokenizer:
    """The one in `folder` (or that file), else the bundle's. UsageError where there is none."""
    if folder is not None:
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        if not path.is_file():
            raise UsageError(f"there is no file `{path}`", "give the folder that holds `tokenizer.json`")
        return Tokenizer(path.read_bytes())
    with open_bundle(bundle) as archive:
        if TOKENIZER not in archive.members:
            hint = "give tokens, `--prompt-ids 1,2,3`, or the folder that holds `tokenizer.json`, `--tokenizer DIR`"
            raise UsageError(f"`{bundle}` has no tokenizer", hint)
        archive.verify(TOKENIZER)
        return Tokenizer(bytes(archive.view(TOKENIZER)))
