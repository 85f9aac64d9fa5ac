"""One step over consecutive tokens of many requests: its inputs, and the contract that they have."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bundle_format.contract import Contract, Dim, Dtype, Input, Output
from ..bundle_format.manifest import Generation
from .blocks import BLOCK

LOGITS = "logits"
MOST_TOKENS = 1 << 16  # in a step
MOST_REQUESTS = 1 << 12
MOST_BLOCKS = 1 << 24  # in a cache
TRACED_TABLE = 5  # blocks in the tables that a step is traced with


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one request in a step: the ones from position `start` on, whose earlier ones are cached.

    `blocks`: the request's, from position 0 on. `wanted`: of which tokens logits are wanted, counted from `start`.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wanted: Sequence[int]


def cache_names(generation: Generation) -> list[str]:
    """The inputs that are the caches, one for each group of layers."""
    return [f"kv{at}" for at in range(len(generation.groups))]


def step_inputs(parts: Sequence[Part]) -> dict[str, Tensor]:
    """The inputs of a step but for its caches. Logits come in the order of the parts' `wanted` tokens."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    most = max(len(part.blocks) for part in parts)
    for part in parts:
        own = range(part.start, part.start + len(part.tokens))
        rows += [len(tokens) + offset for offset in part.wanted]
        tokens += part.tokens
        positions += own
        slots += [part.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in own]
        ends.append(len(tokens))
    return {
        "tokens": torch.tensor(tokens),
        "positions": torch.tensor(positions),
        "slots": torch.tensor(slots),
        "tables": torch.tensor([[*part.blocks, *[-1] * (most - len(part.blocks))] for part in parts]),
        "lengths": torch.tensor([part.start + len(part.tokens) for part in parts]),
        "ends": torch.tensor(ends),
        "rows": torch.tensor(rows),
    }


def contract_of(generation: Generation, most_tokens: int) -> Contract:
    """What a step takes and gives. `most_tokens`: in one step."""
    table = max(-(-generation.context // BLOCK), TRACED_TABLE)
    whole: Dtype = "int64"
    inputs = [
        Input(name="tokens", dtype=whole, shape=("tokens",), range=(0, generation.vocabulary - 1)),
        Input(name="positions", dtype=whole, shape=("tokens",), range=(0, generation.context - 1)),
        Input(name="slots", dtype=whole, shape=("tokens",)),
        Input(name="tables", dtype=whole, shape=("requests", "table")),
        Input(name="lengths", dtype=whole, shape=("requests",), range=(0, generation.context)),
        Input(name="ends", dtype=whole, shape=("requests",)),
        Input(name="rows", dtype=whole, shape=("rows",)),
    ]
    for name, group in zip(cache_names(generation), generation.groups, strict=True):
        size = BLOCK * (group.key_size + group.value_size)
        shape = (group.layers, "pool", group.heads, size)
        inputs.append(Input(name=name, dtype=generation.cache_dtype, shape=shape))
    return Contract(
        dims=(
            Dim(name="tokens", min=1, max=most_tokens),
            Dim(name="requests", min=1, max=min(most_tokens, MOST_REQUESTS)),
            Dim(name="table", min=1, max=table),
            Dim(name="rows", min=1, max=most_tokens),
            Dim(name="pool", min=1, max=MOST_BLOCKS),
        ),
        inputs=tuple(inputs),
        outputs=(Output(name=LOGITS, dtype="float32", shape=("rows", generation.vocabulary)),),
        batch_note="a step is a batch of many requests already",
    )


def new_caches(generation: Generation, blocks: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Caches of so many blocks. What no request has written is NaN: a step that read it would show."""
    dtype = dtype or getattr(torch, generation.cache_dtype)
    return [
        torch.full(
            (group.layers, blocks, group.heads, BLOCK * (group.key_size + group.value_size)), float("nan"), dtype=dtype
        )
        for group in generation.groups
    ]
