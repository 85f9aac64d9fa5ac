"""The operators of libmctl_shim.so, each by what eager torch gives for the same tensors; and what they refuse."""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .test_shim import blob, call, delete, nothing_is_left, numbers, refused, shape_of, shim

__all__ = ["nothing_is_left", "shim"]  # fixtures

NUMBERS = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def near(got: Tensor, wanted: Tensor, terms: int = 1) -> None:
    """Within the rounding of the dtype: sums of so many terms may be in another order."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
    close = tolerance.get(wanted.dtype, 0.0)
    relative, absolute = close * max(1, terms / 256), close * max(4, terms**0.5)
    alike = (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if not alike or not torch.allclose(got, wanted, relative, absolute, equal_nan=True):
        torch.testing.assert_close(got, wanted, rtol=relative, atol=absolute, equal_nan=True)  # which says where
        raise AssertionError("allclose and assert_close disagree")


def handle_of(shim: ctypes.CDLL, tensor: Tensor) -> c_void_p:
    return blob(shim, tensor, NUMBERS[tensor.dtype])


def result_of(shim: ctypes.CDLL, handle: c_void_p) -> Tensor:
    """A copy of the tensor that an operator made, with its strides; the handle is deleted."""
    sizes, strides = shape_of(shim, handle)
    dtype, data = c_int32(), c_void_p()
    call(shim.aoti_torch_get_dtype, handle, byref(dtype))
    call(shim.aoti_torch_get_data_ptr, handle, byref(data))
    made = torch.empty_strided(sizes, strides, dtype=next(d for d, n in NUMBERS.items() if n == dtype.value))
    if made.numel():
        ctypes.memmove(made.data_ptr(), data.value, made.untyped_storage().nbytes())
    delete(shim, handle)
    return made


class Given:
    """Handles on tensors, for one call."""

    def __init__(self, shim: ctypes.CDLL, *tensors: Tensor | None) -> None:
        self.shim, self.tensors = shim, tensors  # which have to live as long
        self.handles = [None if tensor is None else handle_of(shim, tensor) for tensor in tensors]

    def __enter__(self) -> list[c_void_p | None]:
        return self.handles

    def __exit__(self, *_: object) -> None:
        delete(self.shim, *(handle for handle in self.handles if handle is not None))


def made(
    shim: ctypes.CDLL, function: str, tensors: Iterable[Tensor | None], *rest: object, count: int = 1
) -> list[Tensor]:
    """What the operator makes of the tensors and of what follows them."""
    results = [c_void_p() for _ in range(count)]
    with Given(shim, *tensors) as handles:
        call(getattr(shim, function), *handles, *rest, *(byref(result) for result in results))
    return [result_of(shim, result) for result in results]


def refusal(shim: ctypes.CDLL, function: str, tensors: Iterable[Tensor | None], *rest: object, count: int = 1) -> str:
    results = [c_void_p() for _ in range(count)]
    with Given(shim, *tensors) as handles:
        return refused(shim, getattr(shim, function), *handles, *rest, *(byref(result) for result in results))


def random(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, sizes, generator=generator).to(dtype)


# --- products -----------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t,
    "columns": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "steps": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "one row": lambda t: t[..., :1, :].expand_as(t),
    "one column": lambda t: t[..., :1].expand_as(t),
}
SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (13, 33, 17),
    (64, 40, 100),
    (30, 1100, 40),
    (9, 70, 70),
    (1, 64, 64),
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_mm(shim: ctypes.CDLL, dtype: torch.dtype, m: int, k: int, n: int) -> None:
    layouts = list(LAYOUTS.values()) if m > 1 and k * n > 0 else [LAYOUTS["rows"]]
    for number, one in enumerate(layouts):
        for other in (one, layouts[number - 1]):
            a, b = one(random(m, k, dtype=dtype)), other(random(k, n, dtype=dtype, seed=1))
            out = torch.full((m, n), 3, dtype=dtype)
            with Given(shim, out, a, b) as handles:
                call(shim.aoti_torch_cpu_mm_out, *handles)
            wanted = a.double() @ b.double() if dtype in (torch.float32, torch.bfloat16, torch.float16) else a @ b
            near(out, wanted.to(dtype), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_bmm(shim: ctypes.CDLL, dtype: torch.dtype, count: int) -> None:
    for layout in LAYOUTS.values():
        a, b = layout(random(count, 9, 40, dtype=dtype)), layout(random(count, 40, 35, dtype=dtype, seed=1))
        out = torch.zeros(count, 35, 9, dtype=dtype).transpose(1, 2)
        with Given(shim, out, a, b) as handles:
            call(shim.aoti_torch_cpu_bmm_out, *handles)
        near(out, torch.bmm(a.double(), b.double()).to(dtype))


def test_products_on_threads(shim: ctypes.CDLL) -> None:
    """Large enough to be shared out: the same bits as one row alone."""
    a, b = random(300, 257), random(257, 301, seed=1)
    one, all_rows = torch.zeros(1, 301), torch.zeros(300, 301)
    for rows, out in ((a[7:8], one), (a, all_rows)):
        with Given(shim, out, rows, b) as handles:
            call(shim.aoti_torch_cpu_mm_out, *handles)
    assert torch.equal(one[0], all_rows[7])
    near(all_rows, (a.double() @ b.double()).float(), 257)
    many, others, out = random(40, 60, 70), random(40, 70, 50, seed=1), torch.zeros(40, 60, 50)
    with Given(shim, out, many, others) as handles:
        call(shim.aoti_torch_cpu_bmm_out, *handles)
    near(out, torch.bmm(many.double(), others.double()).float(), 70)


def test_threads_live_on_from_operator_to_operator(shim: ctypes.CDLL) -> None:
    """Whatever an operator needs of them: to end and start some takes longer than an operator."""
    b, out = random(256, 256, seed=1), torch.zeros(256, 256)

    def multiply(rows: int) -> None:
        with Given(shim, out[:rows], random(rows, 256), b) as handles:
            call(shim.aoti_torch_cpu_mm_out, *handles)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        multiply(256)
        before = set(Path("/proc/self/task").iterdir())
        for _ in range(3):
            multiply(64)  # worth 2 threads
            multiply(256)
        assert before <= set(Path("/proc/self/task").iterdir())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [64, 257])
def test_rows_do_not_depend_on_their_batch(shim: ctypes.CDLL, dtype: torch.dtype, depth: int) -> None:
    """The same bits for a row alone, in a few and in many, however the factors lie; also by odd numbers of elements."""
    a, b = random(70, depth, dtype=dtype), random(depth, 101, dtype=dtype, seed=1)
    after_one = torch.cat([a[:, :1], a], 1)[:, 1:]
    before_one = torch.cat([a, a[:, :1]], 1)[:, :-1]
    wanted = None
    for one in (a, LAYOUTS["columns"](a), after_one, before_one):
        for other in (b, LAYOUTS["columns"](b), LAYOUTS["steps"](b)):
            for rows in (70, 1, 7, 12, 13):
                out = torch.zeros(rows, 101, dtype=dtype)
                with Given(shim, out, one[:rows], other) as handles:
                    call(shim.aoti_torch_cpu_mm_out, *handles)
                wanted = out if wanted is None else wanted
                assert torch.equal(out, wanted[:rows]), (rows, one.stride(), other.stride())
    assert wanted is not None
    near(wanted, (a.double() @ b.double()).to(dtype), depth)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("shape", [(6, 5), (5,), (1, 5), (6, 1), (1,)])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (2, 3), (1, 0)])
def test_addmm(shim: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, ...], beta: int, alpha: int) -> None:
    a, b, c = random(6, 8, dtype=dtype), random(8, 5, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    out = torch.zeros(6, 5, dtype=dtype)
    with Given(shim, out, c, a, b) as handles:
        call(shim.aoti_torch_cpu_addmm_out, *handles, c_double(beta), c_double(alpha))
    near(out, torch.addmm(c.double(), a.double(), b.double(), beta=beta, alpha=alpha).to(dtype))
    batch, other = torch.stack([a, a + 1]), torch.stack([b, b])
    sums = torch.zeros(2, 6, 5, dtype=dtype)
    with Given(shim, sums, c.expand(2, 6, 5), batch, other) as handles:
        call(shim.aoti_torch_cpu_baddbmm_out, *handles, c_double(beta), c_double(alpha))
    near(sums, torch.baddbmm(c.double(), batch.double(), other.double(), beta=beta, alpha=alpha).to(dtype))


def test_nan_and_infinity(shim: ctypes.CDLL) -> None:
    """They go where eager's go, and with beta = 0 those of the input nowhere."""
    a, b, c = random(3, 4), random(4, 2, seed=1), torch.full((3, 2), math.nan)
    a[0, 0], a[1, 1], b[1, 0] = math.nan, math.inf, 0
    out = torch.zeros(3, 2)
    with Given(shim, out, c, a, b) as handles:
        call(shim.aoti_torch_cpu_addmm_out, *handles, c_double(0), c_double(1))
        near(out, torch.addmm(c, a, b, beta=0))
        call(shim.aoti_torch_cpu_addmm_out, *handles, c_double(1), c_double(1))
    assert out.isnan().all()


def test_sums_into_themselves(shim: ctypes.CDLL) -> None:
    """addmm with its result in the place of its first argument."""
    a, b, c = random(30, 8), random(8, 50, seed=1), random(30, 50, seed=2)
    wanted = torch.addmm(c.double(), a.double(), b.double()).float()
    with Given(shim, c, c, a, b) as handles:
        call(shim.aoti_torch_cpu_addmm_out, *handles, c_double(1), c_double(1))
    near(c, wanted)


def test_products_that_are_refused(shim: ctypes.CDLL) -> None:
    def mm(out: Tensor, a: Tensor, b: Tensor) -> str:
        with Given(shim, out, a, b) as handles:
            return refused(shim, shim.aoti_torch_cpu_mm_out, *handles)

    x = torch.zeros(4, 4)
    assert mm(x, torch.zeros(4, 3), x.clone()) == "`mm` of shapes that do not fit: 3 and 4"
    assert mm(torch.zeros(4, 5), x, x) == "`mm` of shapes that do not fit: 5 and 4"
    assert mm(x, x.clone(), x.double()) == "`mm` of float32 and float64"
    assert mm(x, torch.zeros(1, 4, 4), x) == "`mm` of a tensor of 3 axes, not 2"
    assert mm(x, x, x.clone()) == "`mm` into one of its factors"
    for dtype in (torch.bool, torch.complex64):
        y = torch.zeros(4, 4, dtype=dtype)
        assert mm(y, y.clone(), y.clone()) == f"mctl's shim has no `mm` of {str(dtype).removeprefix('torch.')}"
    whole = torch.zeros(4, 4, dtype=torch.int64)
    with Given(shim, whole, whole, whole.clone(), whole.clone()) as handles:
        words = refused(shim, shim.aoti_torch_cpu_addmm_out, *handles, c_double(0.5), c_double(1))
    assert words == "`addmm` of integers with the factor 0.5"


def test_sizes_beyond_memory(shim: ctypes.CDLL) -> None:
    """A factor that is one element, over and over."""
    huge = torch.zeros(1, 1).expand(2**20, 2**40)
    with Given(shim, torch.zeros(2**20, 1), huge, huge[:1].T) as handles:
        words = refused(shim, shim.aoti_torch_cpu_mm_out, *handles)
    assert words.startswith("there is no memory for")


# --- attention ----------------------------------------------------------------------------------------------------

FLASH = "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"


def attention(
    shim: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> list[Tensor]:
    with Given(shim, q, k, v, mask) as (hq, hk, hv, hmask):
        results = c_void_p(), c_void_p()
        where = None if hmask is None else byref(hmask)
        factor = None if scale is None else byref(c_double(scale))
        call(getattr(shim, FLASH), hq, hk, hv, c_double(0), int(causal), where, factor, *map(byref, results))
    return [result_of(shim, result) for result in results]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("b", "h", "rows", "keys", "depth"),
    [(1, 1, 1, 1, 1), (2, 3, 9, 9, 8), (1, 2, 60, 100, 33), (2, 1, 5, 70, 64), (3, 4, 130, 20, 16)],
)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "mask of rows", "scale"])
def test_attention(
    shim: ctypes.CDLL, dtype: torch.dtype, b: int, h: int, rows: int, keys: int, depth: int, kind: str
) -> None:
    q = random(b, rows, h, depth, dtype=dtype).transpose(1, 2)
    k, v = (
        random(b, h, keys, depth, dtype=dtype, seed=1),
        random(b, h, depth, keys, dtype=dtype, seed=2).transpose(2, 3),
    )
    mask = {"mask": random(b, 1, rows, keys, dtype=dtype), "mask of rows": random(rows, 1, dtype=dtype)}.get(kind)
    scale = 0.3 if kind == "scale" else None
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # torch's own reads values along their last axis; in float64, so that its rounding of narrow numbers does not count
    exact = (q.double(), k.double(), v.double().contiguous(), 0.0, kind == "causal")
    wanted = op(*exact, attn_mask=None if mask is None else mask.double(), scale=scale)
    got = attention(shim, q, k, v, mask, kind == "causal", scale)
    for mine, torchs in zip(got, wanted, strict=True):
        assert mine.stride() == torchs.stride() or 1 in torchs.shape
        near(mine, torchs.to(mine.dtype))


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_attention_of_groups(shim: ctypes.CDLL, heads: int) -> None:
    """Queries of several heads look at one of keys and values; the result lies in memory as the queries do."""
    rows = random(2, 5, 6, 4).transpose(1, 2)
    k, v = random(2, heads, 7, 4, seed=1), random(2, heads, 7, 4, seed=2)
    for q in (rows, rows.contiguous(), random(2, 6, 5, 8)[..., :4], rows[:1].expand(2, 6, 5, 4)):
        wanted = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        got = attention(shim, q, k, v, None, False, None)
        for mine, torchs in zip(got, wanted, strict=True):
            near(mine, torchs)
            assert mine.stride() == torchs.stride()


@pytest.mark.parametrize("keys", [4, 40])
def test_attention_that_looks_at_nothing(shim: ctypes.CDLL, keys: int) -> None:
    q = random(1, 2, keys, 8)
    mask = torch.zeros(keys, keys)
    mask[1] = -math.inf
    mask[2, :3] = -math.inf
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    near(attention(shim, q, q, q, mask, False, None)[0], wanted)
    q[0, 0, 0, 0] = math.nan
    wanted = torch.softmax(q @ q.transpose(2, 3), -1) @ q
    assert torch.equal(attention(shim, q, q, q, None, False, None)[0].isnan(), wanted.isnan())


def test_attention_that_is_refused(shim: ctypes.CDLL) -> None:
    q = random(1, 2, 4, 8)
    results = c_void_p(), c_void_p()

    def flash(k: Tensor, mask: Tensor | None, dropout: float) -> str:
        with Given(shim, q, k, k, mask) as (hq, hk, hv, hmask):
            where = None if hmask is None else byref(hmask)
            return refused(
                shim, getattr(shim, FLASH), hq, hk, hv, c_double(dropout), 0, where, None, *map(byref, results)
            )

    assert "with dropout" in flash(q, None, 0.5)
    assert "shapes do not fit" in flash(random(1, 3, 4, 8), None, 0)
    assert "of float32 and float64" in flash(q.double(), None, 0)
    assert "of float32 and bool" in flash(q, torch.zeros(4, 4, dtype=torch.bool), 0)
    assert "axis 1 has the size 3, not 4" in flash(q, torch.zeros(4, 3), 0)


# --- convolution --------------------------------------------------------------------------------------------------


def convolve(
    shim: ctypes.CDLL, x: Tensor, w: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool = False, output_padding: list[int] | None = None, groups: int = 1,
    fail: bool = False,
) -> Tensor | str:  # fmt: skip
    lists = [(numbers(*list_), c_int64(len(list_))) for list_ in (stride, padding, dilation, output_padding or [0])]
    result = c_void_p()
    with Given(shim, x, w, bias) as (hx, hw, hbias):
        words: list[object] = [hx, hw, None if hbias is None else byref(hbias)]
        for list_ in lists[:3]:
            words += list_
        words += [int(transposed), *lists[3], c_int64(groups), byref(result)]
        if fail:
            return refused(shim, shim.aoti_torch_cpu_convolution, *words)
        call(shim.aoti_torch_cpu_convolution, *words)
    return result_of(shim, result)


PLAIN = {"stride": [1], "padding": [0], "dilation": [1]}
TURNED = PLAIN | {"transposed": True, "output_padding": [0]}
CONVOLUTIONS = [
    ((2, 4, 9), (8, 4, 3), PLAIN),
    ((1, 1, 1), (1, 1, 1), PLAIN),
    ((0, 4, 9), (8, 4, 3), PLAIN),
    ((3, 4, 50), (6, 2, 5), {"stride": [2], "padding": [3], "dilation": [2], "groups": 2}),
    ((2, 4, 9, 11), (8, 4, 3, 3), {"stride": [1, 2], "padding": [1, 0], "dilation": [2, 1]}),
    ((2, 6, 9, 11), (6, 1, 3, 3), PLAIN | {"padding": [1], "groups": 6}),
    ((1, 20, 9, 11), (35, 20, 3, 3), PLAIN | {"padding": [1, 1]}),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 1), {"stride": [2, 1, 1], "padding": [1, 0, 2], "dilation": [1, 2, 1]}),
    ((2, 4, 9), (4, 3, 4), TURNED | {"stride": [2], "padding": [1], "output_padding": [1]}),
    (
        (2, 4, 5, 6), (4, 3, 3, 2),
        TURNED | {"stride": [3, 2], "padding": [1, 0], "dilation": [2, 1], "output_padding": [2, 1], "groups": 2},
    ),
    ((1, 2, 3, 4, 5), (2, 3, 2, 2, 2), TURNED | {"stride": [2]}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("sizes", "kernel", "options"), CONVOLUTIONS)
def test_convolution(
    shim: ctypes.CDLL, dtype: torch.dtype, sizes: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, object]
) -> None:
    x, w = random(*sizes, dtype=dtype), random(*kernel, dtype=dtype, seed=1)
    transposed, groups = bool(options.get("transposed")), int(options.get("groups", 1))  # type: ignore[call-overload]
    bias = random(kernel[1] * groups if transposed else kernel[0], dtype=dtype, seed=2)
    arguments = (
        options["stride"],
        options["padding"],
        options["dilation"],
        transposed,
        options.get("output_padding", [0]),
        groups,
    )
    for given in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
        for added in (bias, None):
            wanted = torch.ops.aten.convolution(
                given.double(), w.double(), None if added is None else added.double(), *arguments
            )
            got = convolve(shim, given, w, added, **options)  # type: ignore[arg-type]
            near(got, wanted.to(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_format_of_a_convolution(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Compiled code knows the strides beforehand."""
    x, w = random(2, 4, 9, 11, dtype=dtype), random(8, 4, 3, 3, dtype=dtype)
    last = torch.channels_last
    for one, other in ((x, w), (x.to(memory_format=last), w), (x, w.to(memory_format=last)), (x[:, :, :3, :3], w)):
        got = convolve(shim, one, other, None, [1, 1], [0, 0], [1, 1])
        assert isinstance(got, Tensor)
        assert got.stride() == torch.conv2d(one, other).stride()
    x, w = (
        random(2, 4, 5, 6, 7, dtype=dtype).to(memory_format=torch.channels_last_3d),
        random(8, 4, 3, 3, 3, dtype=dtype),
    )
    got = convolve(shim, x, w, None, [2], [0], [1])
    assert isinstance(got, Tensor)
    assert got.stride() == torch.conv3d(x, w, stride=2).stride()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stride": [0]}, "`convolution` with the stride 0"),
        ({"stride": [1, 1]}, "`convolution` with the stride -1"),
        ({"padding": [2**62]}, "`convolution` with the padding 4611686018427387904"),
        ({"dilation": [2**62]}, "`convolution` with the dilation 4611686018427387904"),
        ({"groups": 3}, "`convolution` with the number of groups 3"),
        ({"groups": 0}, "`convolution` with the number of groups 0"),
        ({"dilation": [9]}, "`convolution` whose output would be of the size 0"),
        ({"padding": [2**29]}, "there is no memory for a tensor"),
    ],
)  # fmt: skip
def test_convolutions_that_are_refused(shim: ctypes.CDLL, options: dict[str, object], words: str) -> None:
    given = {"stride": [1], "padding": [0], "dilation": [1], **options}
    x = torch.zeros(1, 1, 9).expand(2000, 4, 9)
    text = convolve(shim, x, torch.zeros(4, 4, 3), None, **given, fail=True)  # type: ignore[arg-type]
    assert words in str(text)
    plain = {"stride": [1], "padding": [0], "dilation": [1], "fail": True}
    assert "the number of channels 4" in str(convolve(shim, x, torch.zeros(8, 2, 3), None, **plain))  # type: ignore[arg-type]
    whole = torch.zeros(4, 4, 3, dtype=torch.int64)
    assert "no `convolution` of int64" in str(convolve(shim, whole, whole, None, **plain))  # type: ignore[arg-type]


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(shim: ctypes.CDLL, dtype: torch.dtype, descending: bool) -> None:
    """Stable, so that the order of equal ones is eager's too; with eager's strides."""
    x = random(4, 60, 3, dtype=dtype)
    if dtype.is_floating_point:
        x[:, 5:9] = math.nan
        x[:, 20:25] = -math.inf
    for given in (x, x.permute(2, 0, 1), x[:, ::2], x[:, :1], x[:0], x[0, :, 0], x[:1].expand(4, 60, 3)):
        for axis in range(-1, given.dim() - 1):
            yes = c_int32(1)
            values, indices = made(
                shim, "aoti_torch_cpu_sort_stable", [given], byref(yes), c_int64(axis), int(descending), count=2
            )
            wanted = torch.sort(given, stable=True, dim=axis, descending=descending)
            assert torch.equal(indices, wanted.indices)
            near(values, wanted.values)
            assert values.stride() == wanted.values.stride() or not values.numel()
    assert "axis 3 of a tensor that has 3" in refusal(
        shim, "aoti_torch_cpu_sort_stable", [x], None, c_int64(3), 0, count=2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("largest", [False, True])
def test_topk_and_kthvalue(shim: ctypes.CDLL, dtype: torch.dtype, largest: bool) -> None:
    x = (torch.stack([torch.randperm(60, generator=torch.Generator().manual_seed(i)) for i in range(8)]) - 30).to(dtype)
    if dtype.is_floating_point:
        x[:, 7] = math.nan
    for given, axis in ((x, 1), (x.T, 0), (x[:, ::2], -1)):
        for k in (0, 1, 7, 30):
            got = made(shim, "aoti_torch_cpu_topk", [given], c_int64(k), c_int64(axis), int(largest), 1, count=2)
            wanted = torch.topk(given, k, axis, largest)
            near(got[0], wanted.values)
            assert torch.equal(got[1], wanted.indices) and got[0].stride() == wanted.values.stride()
            if k:
                for keep in (False, True):
                    got = made(shim, "aoti_torch_cpu_kthvalue", [given], c_int64(k), c_int64(axis), int(keep), count=2)
                    assert torch.equal(got[1], torch.kthvalue(given, k, axis, keep).indices)
    wide = torch.stack([torch.randperm(1000, generator=torch.Generator().manual_seed(i)) for i in range(3)]).float()
    got = made(shim, "aoti_torch_cpu_topk", [wide], c_int64(9), c_int64(1), int(largest), 1, count=2)  # few of many
    assert torch.equal(got[1], torch.topk(wide, 9, 1, largest).indices)
    assert "`topk` of 61 out of 60" in refusal(shim, "aoti_torch_cpu_topk", [x], c_int64(61), c_int64(1), 1, 1, count=2)
    one = made(shim, "aoti_torch_cpu_topk", [x[0, 0]], c_int64(1), c_int64(0), 1, 1, count=2)
    assert one[0].shape == () and one[1] == 0


# --- along an axis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_cumulative(shim: ctypes.CDLL, dtype: torch.dtype, name: str) -> None:
    x = random(3, 17, 4, dtype=dtype)
    for given in (x, x.permute(2, 0, 1), x[:, ::3], x[:, :0], x[0, 0, 0]):
        for axis in range(max(given.dim(), 1)):
            (got,) = made(shim, f"aoti_torch_cpu_{name}", [given], c_int64(axis), None)
            wanted = getattr(torch, name)(given, axis)
            near(got, wanted)
            assert got.stride() == wanted.stride()
    (got,) = made(shim, f"aoti_torch_cpu_{name}", [x], c_int64(1), byref(c_int32(NUMBERS[torch.float64])))
    near(got, getattr(torch, name)(x, 1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include", [False, True])
def test_scatter_reduce(shim: ctypes.CDLL, dtype: torch.dtype, reduce: str, include: bool) -> None:
    x, source = random(5, 6, 4, dtype=dtype) // 8, random(5, 9, 4, dtype=dtype, seed=1) // 8
    if dtype.is_floating_point:
        source[0, 0, 0] = math.nan
    for axis in (0, 1, -1):
        size = x.shape[axis]
        index = torch.randint(0, size, (3, 6, 4), generator=torch.Generator().manual_seed(3))
        turned = index.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        swapped = x.permute(1, 0, 2).clone().permute(1, 0, 2)
        for given, out, kind in ((index, x.clone(), torch.int64), (turned, swapped, torch.int32)):
            with Given(shim, out, x, given.to(kind), source) as (ho, hx, hi, hs):
                call(
                    shim.aoti_torch_cpu_scatter_reduce_two_out,
                    ho, hx, c_int64(axis), hi, hs, c_char_p(reduce.encode()), int(include),
                )  # fmt: skip
            near(out, x.scatter_reduce(axis, index, source, reduce, include_self=include))


def test_scatter(shim: ctypes.CDLL) -> None:
    x, source, index = random(5, 6), random(5, 6, seed=1), torch.tensor([[0, 3], [5, 1], [2, 2]])
    out = torch.zeros(5, 6)
    with Given(shim, out, x, index, source) as (ho, hx, hi, hs):
        call(shim.aoti_torch_cpu_scatter_src_out, ho, hx, c_int64(1), hi, hs)
        assert torch.equal(out, x.scatter(1, index, source))
        call(shim.aoti_torch_cpu_scatter_value_out, ho, hx, c_int64(1), hi, c_double(2.5))
        assert torch.equal(out, x.scatter(1, index, 2.5))
    refusals = {
        "to index 6 of an axis of the size 6": index + 6,
        "to index -9 of": index - 9,
        "by an index of float64": index.double(),
    }
    for words, wrong in refusals.items():
        with Given(shim, out, x, wrong, source) as (ho, hx, hi, hs):
            assert words in refused(shim, shim.aoti_torch_cpu_scatter_src_out, ho, hx, c_int64(1), hi, hs)
    with Given(shim, out, x, torch.zeros(6, 2, dtype=torch.int64), source) as (ho, hx, hi, hs):
        assert "more than there are" in refused(shim, shim.aoti_torch_cpu_scatter_src_out, ho, hx, c_int64(1), hi, hs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(shim: ctypes.CDLL, dtype: torch.dtype, accumulate: bool) -> None:
    x = random(4, 5, 6, dtype=dtype)
    one, two = torch.tensor([[0, -1, 2], [1, 1, 3]]), torch.tensor([[1], [3]])
    if not accumulate:
        one = torch.tensor([[0, -1, 2], [1, 1, 0]])  # no place twice: which comes last is not said
    for indices in ([one], [one, two], [None, two], [one, None, two], [None, one, two.int()], [two[:0]]):
        wanted_of = x[tuple(slice(None) if i is None else i.long() for i in indices)]
        for values in (random(*wanted_of.shape, dtype=dtype, seed=4), random(1, dtype=dtype, seed=5)):
            out = torch.zeros(4, 6, 5, dtype=dtype).transpose(1, 2)
            with Given(shim, out, x, values, *indices) as (ho, hx, hv, *hi):
                listed = (c_void_p * len(hi))(*hi)
                call(shim.aoti_torch_index_put_out, ho, hx, listed, len(hi), hv, accumulate)
            longs = [None if i is None else i.long() for i in indices]
            near(out, torch.ops.aten.index_put(x, longs, values, accumulate))
    with Given(shim, x, x, x[0], torch.tensor([4])) as (ho, hx, hv, hi):
        words = refused(shim, shim.aoti_torch_index_put_out, ho, hx, (c_void_p * 1)(hi), 1, hv, accumulate)
    assert words == "index 4 is out of bounds for axis 0 of the size 4"


# --- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_lstm(shim: ctypes.CDLL, dtype: torch.dtype, reverse: bool, biases: bool) -> None:
    """By torch's own module, in float64; backwards it is that module's second direction."""
    for steps, batch, inputs, size in ((5, 3, 7, 20), (1, 1, 1, 1), (4, 20, 33, 34)):
        module = torch.nn.LSTM(inputs, size, bias=biases, bidirectional=True).to(dtype)
        suffix = "_l0_reverse" if reverse else "_l0"
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                parameter.copy_(random(*parameter.shape, seed=index) / 4)
            x = random(steps, batch, inputs, dtype=dtype).transpose(0, 1).contiguous().transpose(0, 1)
            hidden, cell = random(2, batch, size, dtype=dtype, seed=1), random(2, batch, size, dtype=dtype, seed=2)
            wanted, (last, last_cell) = module.double()(x.double(), (hidden.double(), cell.double()))
        which = int(reverse)
        own = [getattr(module, name + suffix).detach().to(dtype) if biases or "w" in name else None for name in names]
        weights = [own[0], own[1], *(value if value is not None else torch.zeros(1, dtype=dtype) for value in own[2:])]
        got = made(
            shim, "aoti_torch_cpu_mkldnn_rnn_layer",
            [x, *weights, hidden[which : which + 1], cell[which : which + 1]],
            int(reverse), None, c_int64(0), c_int64(2), c_int64(size), c_int64(1), int(biases), 0, 0, 0, count=4,
        )  # fmt: skip
        near(got[0], wanted[..., size:].to(dtype) if reverse else wanted[..., :size].to(dtype), 16)
        near(got[1], last[which : which + 1].to(dtype), 16)
        near(got[2], last_cell[which : which + 1].to(dtype), 16)


def test_recurrent_layers_that_are_refused(shim: ctypes.CDLL) -> None:
    x = torch.zeros(2, 3, 4)
    rest = (0, None, c_int64(0), c_int64(3), c_int64(4), c_int64(1), 1, 0, 0, 0)
    words = refusal(shim, "aoti_torch_cpu_mkldnn_rnn_layer", [x] * 7, *rest, count=4)
    assert "one layer of an LSTM in one direction only" in words
    lstm = (0, None, c_int64(0), c_int64(2), c_int64(4), c_int64(1), 0, 0, 0, 0)
    weights = [torch.zeros(16, 4), torch.zeros(16, 4), x, x, torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)]
    assert "shapes that do not fit" in refusal(shim, "aoti_torch_cpu_mkldnn_rnn_layer", [x, *weights], *lstm, count=4)


def embedding_bag(
    shim: ctypes.CDLL, weight: Tensor, rows: Tensor, bags: Tensor, factors: Tensor | None, mode: int, last: bool,
    padding: int,
) -> Tensor:  # fmt: skip
    with Given(shim, weight, rows, bags, factors) as (hw, hi, ho, hf):
        results = [c_void_p() for _ in range(4)]
        where = None if hf is None else byref(hf)
        call(
            shim.aoti_torch_cpu__embedding_bag,
            hw, hi, ho, 0, c_int64(mode), 0, where, int(last), c_int64(padding), *map(byref, results),
        )  # fmt: skip
        sums, *_ = (result_of(shim, result) for result in results)
    return sums


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_embedding_bag(shim: ctypes.CDLL, dtype: torch.dtype, mode: int, layout: str) -> None:
    weight = LAYOUTS[layout](random(20, 85, dtype=dtype))
    indices = torch.randint(0, 20, (30,), generator=torch.Generator().manual_seed(0))
    for kind in (torch.int64, torch.int32):
        for offsets, last, padding in (
            ([0, 4, 4, 17], False, -1),
            ([0, 3, 30], True, 7),
            ([0], False, 7),
            ([], False, -1),
        ):
            bags, rows = torch.tensor(offsets, dtype=kind), indices.to(kind) if offsets else indices[:0].to(kind)
            factors = random(len(rows), dtype=dtype) if mode == 0 and kind == torch.int32 else None
            wanted = torch.ops.aten._embedding_bag(
                weight.double().contiguous(), rows, bags, False, mode, False,
                None if factors is None else factors.double(), last, padding,
            )  # fmt: skip
            near(embedding_bag(shim, weight, rows, bags, factors, mode, last, padding), wanted[0].to(dtype), 30)


def test_embedding_bags_that_are_refused(shim: ctypes.CDLL) -> None:
    def bag(indices: list[int], offsets: list[int]) -> str:
        tensors = [torch.zeros(20, 3), torch.tensor(indices), torch.tensor(offsets)]
        rest = (0, c_int64(0), 0, None, 0, c_int64(-1))
        return refusal(shim, "aoti_torch_cpu__embedding_bag", tensors, *rest, count=4)

    assert "of row 20 of 20" in bag([1, 20], [0])
    assert "of row -1 of 20" in bag([1, -1], [0])
    assert "the offset 1 at 0" in bag([1, 2], [1])
    assert "the offset 3 at 1" in bag([1, 2], [0, 3])


@pytest.mark.parametrize("dtype", FLOATS)
def test_pools(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    images = random(2, 3, 20, 17, dtype=dtype)
    for x in (images, images.to(memory_format=torch.channels_last), images[0], images[:0], images[:, :, ::2]):
        (got,) = made(shim, "aoti_torch_cpu__adaptive_avg_pool2d", [x], numbers(3, 2), c_int64(2))
        wanted = torch.ops.aten._adaptive_avg_pool2d(x, (3, 2))
        near(got, torch.ops.aten._adaptive_avg_pool2d(x.double(), (3, 2)).to(dtype), 50)
        assert got.stride() == wanted.stride()
        for stride, padding, ceil, include, divisor in (
            ([2, 3], 3, 0, 1, None),
            ([], 0, 1, 0, None),
            ([3], 2, 1, 1, 5),
        ):
            (got,) = made(
                shim, "aoti_torch_cpu_avg_pool2d", [x], numbers(7, 6), c_int64(2), numbers(*stride),
                c_int64(len(stride)), numbers(padding), c_int64(1), ceil, include,
                None if divisor is None else byref(c_int64(divisor)),
            )  # fmt: skip
            arguments = (7, 6), stride, padding, bool(ceil), bool(include), divisor
            near(got, torch.ops.aten.avg_pool2d(x.double(), *arguments).to(dtype), 50)
            assert got.stride() == torch.ops.aten.avg_pool2d(x, *arguments).stride()
    huge = numbers(2**62), c_int64(1), None, c_int64(0), None, c_int64(0), 0, 0, None
    words = refusal(shim, "aoti_torch_cpu_avg_pool2d", [images], *huge)
    assert words == "`avg_pool2d` with the kernel size 4611686018427387904"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("right", [False, True])
def test_search(shim: ctypes.CDLL, dtype: torch.dtype, right: bool) -> None:
    x, rows = random(3, 30, dtype=dtype), random(3, 9, dtype=dtype, seed=1).sort(-1).values
    if dtype.is_floating_point:
        x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[1, :9] = rows[1]
    for values, sorted_ in (
        (x, rows),
        (x, rows[0]),
        (x.T, rows[0]),
        (x[:, ::2], rows),
        (x, rows[:, :0]),
        (x[0, 0], rows[0]),
    ):
        for narrow in (False, True):
            wanted = torch.searchsorted(sorted_.contiguous(), values.contiguous(), out_int32=narrow, right=right)
            options = int(narrow), int(right), None, None
            (got,) = made(shim, "aoti_torch_cpu_searchsorted_Tensor", [sorted_, values], *options)
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
            if sorted_.dim() == 1:
                (got,) = made(shim, "aoti_torch_cpu_bucketize_Tensor", [values, sorted_], int(narrow), int(right))
                assert torch.equal(got, wanted)
    words = refusal(shim, "aoti_torch_cpu_searchsorted_Tensor", [rows[:2], x], 0, 0, None, None)
    assert "does not fit" in words


@pytest.fixture(params=[4, 8, 16])
def narrower(request: pytest.FixtureRequest, shim: ctypes.CDLL) -> Iterator[None]:
    """The kernels for CPUs with vectors of so many floats, and without products of bfloat16."""
    shim.mctl_shim_limit_vectors(request.param)
    yield
    shim.mctl_shim_limit_vectors(32)


def test_narrower_vectors(shim: ctypes.CDLL, narrower: None) -> None:
    for dtype in (*FLOATS, torch.int64):
        for m, k, n in ((1, 5, 3), (5, 43, 50), (13, 40, 50), (64, 7, 33)):
            for layout in ("rows", "columns"):
                a, b = random(m, k, dtype=dtype), LAYOUTS[layout](random(k, n, dtype=dtype, seed=1))
                out = torch.zeros(m, n, dtype=dtype)
                with Given(shim, out, a, b) as handles:
                    call(shim.aoti_torch_cpu_mm_out, *handles)
                near(out, (a.double() @ b.double()).to(dtype), k)
    table, rows, bags = random(9, 75), torch.arange(40) % 9, torch.tensor([0, 3])
    wanted = torch.nn.functional.embedding_bag(rows, table.double(), bags, mode="sum").float()
    near(embedding_bag(shim, table, rows, bags, None, 0, False, -1), wanted, 40)
    q = random(2, 3, 60, 33)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True)
    near(attention(shim, q, q, q, None, True, None)[0], wanted.float())
