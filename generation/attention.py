"""The attention of a model that is exported for generation: what it is like, and what stands in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from ..aoti import ops
from ..bundle_format.manifest import AttentionLayer, CacheGroup
from .blocks import BLOCK


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention: q [tokens, heads, key size], k and v [tokens, heads of keys, size]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def factor(self) -> float:
        return 1 / sqrt(self.q.shape[2]) if self.scale is None else self.scale


class Attend(Protocol):
    """What computes a model's attention, layer after layer: [tokens, heads, value size]."""

    def __call__(self, call: Call) -> Tensor: ...


class Probe:
    """Attention over one whole sequence, which remembers what each layer asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[CacheGroup, AttentionLayer]] = []

    def __call__(self, call: Call) -> Tensor:
        of = CacheGroup(layers=1, heads=call.k.shape[1], key_size=call.k.shape[2], value_size=call.v.shape[2])
        sinks = call.sinks is not None
        self.asked.append((of, AttentionLayer(group=0, window=call.window, softcap=call.softcap, sinks=sinks)))
        return dense(call)

    def layers(self) -> tuple[tuple[CacheGroup, ...], tuple[AttentionLayer, ...]]:
        """Groups of layers of the same sizes, and each layer with its group."""
        sizes = list(dict.fromkeys(of for of, _ in self.asked))
        groups = tuple(
            CacheGroup(
                layers=sum(other == of for other, _ in self.asked),
                heads=of.heads,
                key_size=of.key_size,
                value_size=of.value_size,
            )
            for of in sizes
        )
        layers = tuple(
            AttentionLayer(group=sizes.index(of), window=layer.window, softcap=layer.softcap, sinks=layer.sinks)
            for of, layer in self.asked
        )
        return groups, layers


class Paged:
    """Attention over the caches of one step: the n-th call is that of layer n."""

    def __init__(
        self, layers: tuple[AttentionLayer, ...], caches: tuple[Tensor, ...], step: tuple[Tensor, ...]
    ) -> None:
        self.layers, self.caches = layers, caches
        self.step = step  # slots, tables, lengths, ends
        self.done = 0

    def __call__(self, call: Call) -> Tensor:
        group = self.layers[self.done].group
        index = sum(layer.group == group for layer in self.layers[: self.done])
        self.done += 1
        numbers = (index, call.factor, call.window, call.softcap)
        return ops.paged_attention(call.q, call.k, call.v, self.caches[group], *self.step, call.sinks, *numbers)


_current: list[Attend] = []


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """`attend` computes the attention of adapted models inside the block."""
    _current.append(attend)
    try:
        yield
    finally:
        _current.pop()


def attend(call: Call) -> Tensor:
    """What the innermost `attending` says."""
    return _current[-1](call)


def dense(call: Call) -> Tensor:
    """Causal attention over one whole sequence."""
    length = call.q.shape[0]
    return _attention(call.q, call.k, call.v, torch.arange(length), call)


def _attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, like: Call) -> Tensor:
    """Queries at `positions` over the keys of positions 0 on."""
    repeated = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.repeat_interleave(repeated, 1).transpose(0, 1), v.repeat_interleave(repeated, 1)
    scores = q @ k.transpose(1, 2) * like.factor
    if like.softcap:
        scores = like.softcap * torch.tanh(scores / like.softcap)
    distance = positions[:, None] - torch.arange(k.shape[1])
    seen = (distance >= 0) & (distance < (like.window or k.shape[1] + 1))
    scores = scores.masked_fill(~seen, float("-inf"))
    if like.sinks is not None:
        sinks = like.sinks.to(scores.dtype)[:, None, None].expand(-1, len(positions), 1)
        scores = torch.cat([scores, sinks], 2)
    weights = scores.softmax(2)[..., : k.shape[1]]
    return (weights @ v.transpose(0, 1)).transpose(0, 1).contiguous()


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    slots: Tensor,
    tables: Tensor,
    lengths: Tensor,
    ends: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """The operator by torch's own, request by request: what an exported program is compared with."""
    key_size, value_size = k.shape[2], v.shape[2]
    halves = kv[layer].split([BLOCK * key_size, BLOCK * value_size], 2)
    keys = halves[0].view(*kv.shape[1:3], key_size, BLOCK).permute(0, 3, 1, 2)  # [blocks, 16, heads, size]
    values = halves[1].view(*kv.shape[1:3], BLOCK, value_size).transpose(1, 2)
    kept = slots >= 0
    block, place = slots[kept] // BLOCK, slots[kept] % BLOCK
    keys[block, place], values[block, place] = k[kept].to(kv.dtype), v[kept].to(kv.dtype)
    out = q.new_zeros(*q.shape[:2], value_size)
    like = Call(q, k, v, scale, window, softcap, sinks)
    begin = 0
    for table, length, end in zip(tables, lengths.tolist(), ends.tolist(), strict=True):
        mine = table[: -(-length // BLOCK)].clamp(min=0)
        own_keys, own_values = (x[mine].flatten(0, 1)[:length].to(q.dtype) for x in (keys, values))
        positions = torch.arange(length - (end - begin), length)
        first = max(0, int(positions[0]) - window + 1) if window and len(positions) else 0
        own_keys[:first], own_values[:first] = 0, 0  # nobody looks there, and anything may be there
        out[begin:end] = _attention(q[begin:end], own_keys, own_values, positions, like)
        begin = end
    return out


_LIBRARY = torch.library.Library("mctl", "IMPL")
_LIBRARY.impl("mctl_paged_attention", _paged, "CPU")
