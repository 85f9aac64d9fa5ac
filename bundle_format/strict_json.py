"""What JSON readers disagree about is refused before two of them can disagree."""

import json
from typing import Any

from .layout import MAX_JSON_DEPTH, MAX_JSON_PARTS


def refuse_ambiguity(text: bytes) -> None:
    """ValueError if an object of this valid JSON has a key twice, or an integer has more than 64 bits, sign included.

    Of a repeated key one reader takes the first, another the last; a larger integer is a float to some.
    """
    json.loads(text, object_pairs_hook=_unrepeated, parse_int=_bounded)


def _bounded(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the number {digits[:32]} has more than 64 bits")
    return int(digits)


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
    """ValueError if a decoded JSON value that stands `depth` levels deep has too many objects and lists below it."""
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"it nests more than {MAX_JSON_DEPTH} levels deep")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        depth += 1
