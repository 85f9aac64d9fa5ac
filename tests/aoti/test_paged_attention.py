"""Attention over a paged cache: beside a dense softmax in float64, and the same bits however a step is made up."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from .kernels import MARCHES, Kernels, Refused, kernels_of

BLOCK = 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module", params=MARCHES[:2])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return kernels_of(request.param, tmp_path_factory.mktemp("paged"))


@dataclass(frozen=True)
class Layer:
    """What a layer's attention is like; its cache lies in the middle of three."""

    heads: int = 4
    kv_heads: int = 2
    depth: int = 8
    width: int = 8
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass
class Prompt:
    """Queries, keys and values of all tokens of a request, how many the cache has, and in which blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: list[int] = field(default_factory=list)
    cached: int = 0


def prompt(layer: Layer, length: int, dtype: torch.dtype = torch.float32) -> Prompt:
    """Numbers that the cache can hold exactly."""
    k, v = torch.randn(length, layer.kv_heads, layer.depth), torch.randn(length, layer.kv_heads, layer.width)
    return Prompt(torch.randn(length, layer.heads, layer.depth), k.to(dtype).float(), v.to(dtype).float())


class Cache:
    """A cache whose unused places are NaN, and which gives out its blocks in the order of `free`."""

    def __init__(self, layer: Layer, free: list[int], dtype: torch.dtype = torch.float32) -> None:
        size = BLOCK * (layer.depth + layer.width)
        self.layer, self.free = layer, list(free)
        self.kv = torch.full((3, max(free) + 1, layer.kv_heads, size), float("nan"), dtype=dtype)

    def step(self, kernels: Kernels, work: list[tuple[Prompt, int]], spare: int = 0) -> list[Tensor]:
        """The next so many tokens of each prompt; `spare` tokens of nobody follow them. What each prompt gets."""
        parts, slots, lengths, ends = [], [], [], []
        for of, count in work:
            length = of.cached + count
            while len(of.blocks) * BLOCK < length:
                of.blocks.append(self.free.pop(0))
            parts.append(slice(of.cached, length))
            slots += [of.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(of.cached, length)]
            lengths.append(length)
            ends.append(len(slots))
            of.cached = length
        most = max(len(of.blocks) for of, _ in work)
        tables = [of.blocks + [-1] * (most - len(of.blocks)) for of, _ in work]
        q, k, v = (
            torch.cat([*(getattr(of, name)[part] for (of, _), part in zip(work, parts, strict=True)), extra])
            for name, extra in (
                ("q", torch.randn(spare, self.layer.heads, self.layer.depth)),
                ("k", torch.randn(spare, self.layer.kv_heads, self.layer.depth)),
                ("v", torch.randn(spare, self.layer.kv_heads, self.layer.width)),
            )
        )
        step = [torch.tensor(numbers) for numbers in (slots + [-1] * spare, tables, lengths, ends)]
        made = kernels.paged_attention(
            q, k, v, self.kv, step, self.layer.sinks, layer=1,
            scale=self.layer.scale, window=self.layer.window, softcap=self.layer.softcap,
        )  # fmt: skip
        assert not made[len(slots) :].any(), "a token of nobody gets zeros"
        return list(made[: len(slots)].split([count for _, count in work]))


def run(kernels: Kernels, cache: Cache, of: Prompt, chunks: list[int]) -> Tensor:
    return torch.cat([cache.step(kernels, [(of, count)])[0] for count in chunks])


def dense(layer: Layer, of: Prompt) -> Tensor:
    """By the formula, in float64, over the whole sequence at once."""
    q, k, v = (x.double().transpose(0, 1) for x in (of.q, of.k, of.v))
    group = layer.heads // layer.kv_heads
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    length = len(of.q)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & ((distance < layer.window) if layer.window else True)
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, length, 1)
        return (torch.cat([scores, sinks], 2).softmax(2)[..., :-1] @ v).transpose(0, 1)
    return (scores.softmax(2) @ v).transpose(0, 1)


LAYERS = [
    Layer(),
    Layer(heads=1, kv_heads=1, depth=1, width=1),
    Layer(heads=3, kv_heads=3, depth=64, width=64),
    Layer(heads=9, kv_heads=3, depth=64, width=64),
    Layer(heads=7, kv_heads=1, depth=24, width=40),
    Layer(heads=40, kv_heads=1, depth=16, width=72),  # more rows than a tile has
    Layer(heads=4, kv_heads=2, depth=33, width=20, window=5),
    Layer(heads=4, kv_heads=4, depth=16, width=130, window=17, softcap=2.0),
    Layer(heads=6, kv_heads=2, depth=8, width=8, window=300),
    Layer(heads=6, kv_heads=2, depth=16, width=16, sinks=torch.linspace(-3, 4, 6)),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_equals_a_dense_softmax(kernels: Kernels, layer: Layer, dtype: torch.dtype) -> None:
    for length in (1, 15, 16, 17, 33, 300, 530):
        of = prompt(layer, length, dtype)
        cache = Cache(layer, list(range(34, 0, -1)), dtype)
        got = run(kernels, cache, of, [length])
        assert cache.kv[::2].isnan().all(), "it wrote to another layer"
        torch.testing.assert_close(got.double(), dense(layer, of), rtol=1e-5, atol=5e-6)


@DTYPES
@pytest.mark.parametrize("layer", LAYERS[3:], ids=repr)
def test_chunks_neighbours_and_places_change_no_bit(kernels: Kernels, layer: Layer, dtype: torch.dtype) -> None:
    """Alone at once; in chunks; among others that come and go; in other blocks: always the same bits."""
    length = 290  # over a stretch's end
    of = prompt(layer, length, dtype)
    alone = run(kernels, Cache(layer, list(range(20)), dtype), of, [length])

    for chunk in (7, 16, 17):
        chunks = [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
        again = Prompt(of.q, of.k, of.v)
        assert torch.equal(run(kernels, Cache(layer, torch.randperm(20).tolist(), dtype), again, chunks), alone)

    cache = Cache(layer, torch.randperm(170).tolist(), dtype)
    others = [prompt(layer, size, dtype) for size in (1, 40, 400, 3, 290, *[70] * 20)]
    again = Prompt(of.q, of.k, of.v)
    got = []
    for count in (100, 1, 1, 60, 1, 127):
        first = [
            (other, min(count, len(other.q) - other.cached)) for other in others[:12] if len(other.q) > other.cached
        ]
        rest = [(other, 1) for other in others[12:] if len(other.q) > other.cached]
        got.append(cache.step(kernels, [*first, (again, count), *rest], spare=3)[len(first)])
    assert torch.equal(torch.cat(got), alone)


@pytest.mark.parametrize("layer", [Layer(1, 1, 64, 64), Layer(6, 2, 16, 16), Layer(3, 3, 32, 32, window=700)], ids=repr)
def test_threads_change_no_bit(kernels: Kernels, layer: Layer) -> None:
    """Few heads and long contexts, whose stretches are shared out, and many rows, whose tiles are."""
    length = 2000
    of = prompt(layer, length)
    threads = torch.get_num_threads()
    made = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)  # of torch and of the kernels: they share one OpenMP
            again = Prompt(of.q, of.k, of.v)
            made.append(run(kernels, Cache(layer, list(range(125))), again, [length - 19, 1, 17, 1]))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(made[0].double(), dense(layer, of), rtol=1e-5, atol=5e-6)
    assert all(torch.equal(other, made[0]) for other in made)


def test_a_later_token_that_is_not_a_number_leaves_earlier_ones_alone(kernels: Kernels) -> None:
    layer = Layer()
    of = prompt(layer, 40)
    clean = run(kernels, Cache(layer, list(range(3))), of, [40])
    of.cached, of.blocks = 0, []
    of.k[33], of.v[20] = float("nan"), float("inf")
    got = run(kernels, Cache(layer, list(range(3))), of, [40])
    assert torch.equal(got[:20], clean[:20])
    assert not got[20:].isfinite().any()


def test_takes_queries_where_a_projection_left_them(kernels: Kernels) -> None:
    layer = Layer(heads=2, kv_heads=2)
    whole = torch.randn(2, 5, 3 * 8).transpose(0, 1)  # heads outermost in memory
    q, k, v = whole.chunk(3, dim=2)
    got = run(kernels, Cache(layer, [0]), of := Prompt(q, k, v), [5])
    torch.testing.assert_close(got.double(), dense(layer, of), rtol=1e-5, atol=5e-6)


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    layer = Layer()
    of = prompt(layer, 20)
    kv = torch.zeros(3, 4, 2, BLOCK * 16)
    sound = [torch.arange(20), torch.tensor([[0, 1]]), torch.tensor([20]), torch.tensor([20])]
    kernels.paged_attention(of.q, of.k, of.v, kv, sound)
    for at, wrong in (
        (0, torch.arange(20) + 64),  # beyond the cache
        (0, torch.arange(19)),
        (0, torch.arange(20).int()),
        (1, torch.tensor([[0, 4]])),
        (1, torch.tensor([[-1, 0]])),
        (1, torch.tensor([[0]])),  # fewer blocks than the length needs
        (2, torch.tensor([19])),  # fewer tokens than are given
        (3, torch.tensor([21])),
        (3, torch.tensor([-1])),
        (3, torch.tensor([20, 20])),
    ):
        with pytest.raises(Refused):
            kernels.paged_attention(of.q, of.k, of.v, kv, [*sound[:at], wrong, *sound[at + 1 :]])
    for call in (
        lambda: kernels.paged_attention(of.q, of.k, of.v, kv, sound, layer=3),
        lambda: kernels.paged_attention(of.q, of.k, of.v, kv.double(), sound),
        lambda: kernels.paged_attention(of.q, of.k, of.v, kv.transpose(0, 1), sound),
        lambda: kernels.paged_attention(of.q[:, :3], of.k, of.v, kv, sound),
        lambda: kernels.paged_attention(of.q, of.k, of.v[:, :, :7], kv, sound),
        lambda: kernels.paged_attention(of.q, of.k, of.v, kv, sound, torch.zeros(3)),
    ):
        with pytest.raises(Refused):
            call()
