"""A script of steps: requests that come and go, in chunks, with the logits that each step should give."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .blocks import BLOCK
from .step import Part

Run = Callable[[Sequence[Part]], Tensor]  # a step: logits of the wanted tokens, part after part


@dataclass(slots=True)
class Request:
    """Tokens whose keys and values are computed step by step; `blocks` as they are given out."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.cached


@dataclass(slots=True)
class Blocks:
    """Blocks of the caches that are free, given out from the front."""

    free: list[int]

    def give(self, request: Request, length: int) -> None:
        while len(request.blocks) * BLOCK < length:
            request.blocks.append(self.free.pop(0))

    def take_back(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks, request.cached = [], 0


def next_part(request: Request, count: int, blocks: Blocks, *, every: bool = True) -> Part:
    """The next `count` tokens; logits of all of them, or of the last."""
    start, end = request.cached, request.cached + count
    blocks.give(request, end)
    request.cached = end
    wanted = range(count) if every else range(count - 1, count)
    return Part(request.tokens[start:end], start, tuple(request.blocks), wanted)


def in_chunks(run: Run, tokens: Sequence[int], chunks: Sequence[int], blocks: Blocks, *, every: bool = True) -> Tensor:
    """Logits of one request alone, its tokens in steps of these sizes; its blocks are free again afterwards."""
    import torch

    request = Request(list(tokens))
    made = [run([next_part(request, count, blocks, every=every)]) for count in chunks]
    blocks.take_back(request)
    return torch.cat(made)


def chunks_of(length: int, size: int) -> list[int]:
    """`size` as often as it fits into `length`, and the rest."""
    return [size] * (length // size) + ([length % size] if length % size else [])


def random_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]
