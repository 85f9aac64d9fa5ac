"""What JSON readers disagree about is refused before two of them can disagree."""

import json
from typing import Any

from .layout import MAX_JSON_DEPTH, MAX_JSON_PARTS


def refuse_repeated_keys(text: bytes) -> None:
    """ValueError if an object of this valid JSON has a key twice: one reader takes the first, another the last."""
    json.loads(text, object_pairs_hook=_unrepeated)


def _unrepeated(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key `{repeated[:64]}` is there twice")


def refuse_many_parts(text: bytes) -> None:
    """ValueError if this JSON may hold so many objects and lists that they take far more memory than their text."""
    if text.count(b"{") + text.count(b"[") > MAX_JSON_PARTS:
        raise ValueError(f"it has more than {MAX_JSON_PARTS} objects and lists")


def refuse_depth(value: Any, depth: int) -> None:
    """ValueError if a decoded JSON value that stands `depth` levels deep has too many levels below it."""
    level = [value]
    while level:
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"it nests more than {MAX_JSON_DEPTH} levels deep")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ValueError(f"the number {str(item)[:32]} has more than 64 bits")
        level, depth = inner, depth + 1
