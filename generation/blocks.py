"""The blocks of the caches: who holds them, and which beginnings of texts they keep for others.

runner/cpp/engine/kv_blocks.cc does the same; tests/vectors/generation/policy.json runs both. A full block can be
published under its parent, its 16 tokens and the salt of whoever may use it; what is found is compared token by token.
A parent is known by the number of its publication, which no later one has: a block that was given to somebody else is
no parent any more. Blocks that nobody holds keep what they have until they are needed, the least recently used first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 16  # positions of one request in a block; kernels/paged_attention.cc

_Key = tuple[int, tuple[int, ...], int]  # publication of the parent (0: there is none), tokens, salt


@dataclass(slots=True)
class _Block:
    holders: int = 0
    publication: int = 0  # 0: it is not published
    key: _Key | None = None


class Blocks:
    """So many blocks, numbered from 0 on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blocks = [_Block() for _ in range(count)]
        self._free = list(reversed(range(count)))
        self._idle: dict[int, None] = {}  # published and held by nobody, the least recently used first
        self._known: dict[_Key, int] = {}
        self._publications = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Of these, the ones that keep a beginning."""
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def take(self) -> int | None:
        """A block for its first holder, which may hold anything; None if there is none."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        else:
            return None
        self._blocks[block].holders = 1
        return block

    def find(self, tokens: Sequence[int], salt: int) -> list[int]:
        """The published blocks that a text begins with: full ones, of which nobody becomes a holder yet."""
        found: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = self._known.get((parent, tuple(tokens[start : start + BLOCK]), salt))
            if block is None:
                break
            found.append(block)
            parent = self._blocks[block].publication
        return found

    def hold(self, block: int) -> None:
        """One more holder of a block that `find` gave."""
        self._blocks[block].holders += 1
        self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The last ones are the first to be given to others."""
        for block in reversed(blocks):
            held = self._blocks[block]
            held.holders -= 1
            if held.holders:
                continue
            if held.publication:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], salt: int) -> None:
        """The last of a text's blocks is full of its last 16 tokens. Private if others published it."""
        parent = self._blocks[blocks[-2]].publication if len(blocks) > 1 else 0
        if len(blocks) > 1 and not parent:
            return  # nobody could find it
        block, key = blocks[-1], (parent, tuple(tokens), salt)
        if key in self._known or self._blocks[block].publication:
            return
        self._publications += 1
        self._blocks[block].publication, self._blocks[block].key = self._publications, key
        self._known[key] = block

    def _forget(self, block: int) -> None:
        held = self._blocks[block]
        assert held.key is not None
        del self._known[held.key]
        held.publication, held.key = 0, None
