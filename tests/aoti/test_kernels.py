"""mctl's kernels beside torch in float64, for several instruction sets, over a host that is not torch."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mctl.aoti import kernel_library, packing
from mctl.aoti.ops import Activation
from mctl.bundle_format.errors import CompileError

from .kernels import MARCHES, Kernels, Refused, kernels_of

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
}
WEIGHTS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module", params=MARCHES)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return kernels_of(request.param, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(got: Tensor, wanted: Tensor, terms: int = 1) -> None:
    """Equal to a float64 reference, but for the rounding of a sum of that many terms of about 1."""
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7 * (terms + 4), equal_nan=True)


# m, k, n: each below, at and above the sizes that blocks, panels and vectors have
SHAPES = [
    *[(m, 19, 70) for m in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 25, 37)],
    *[(3, k, 33) for k in (1, 2, 63, 257)],
    *[(5, 7, n) for n in (1, 4, 15, 16, 17, 31, 32, 64, 96, 127, 129, 300)],
    (1, 300, 257),
    (50, 1024, 40),  # rows that collide in the cache
    (700, 100, 65),  # several chunks of rows
    (130, 130, 130),  # worth a second thread, shared by rows
    (40, 384, 384),  # shared by columns
]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear(kernels: Kernels, m: int, k: int, n: int) -> None:
    x, weight, bias, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
    product = x.double() @ weight.double().t()
    close(kernels.linear(x, weight), product, k)
    close(kernels.linear(x, weight, bias, residual), product + bias + residual, k)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear_in_bfloat16(kernels: Kernels, m: int, k: int, n: int) -> None:
    """Products of bfloat16 numbers are exact in float32: what is left is the rounding of k + 2 sums."""
    x, weight, bias, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
    narrow_x, narrow_weight = x.bfloat16().double(), weight.bfloat16().double()
    wanted = narrow_x @ narrow_weight.t() + bias + residual
    most = narrow_x.abs() @ narrow_weight.abs().t() + bias.abs() + residual.abs()
    got = kernels.linear(x, weight, bias, residual, dtype=torch.bfloat16)
    assert ((got - wanted).abs() <= (k + 2) * 2**-24 * most).all()


def test_numbers_become_bfloat16_as_torchs_do(kernels: Kernels) -> None:
    """Ones as weights: what comes out is the input, rounded. Instructions for bfloat16 may take denormals for 0."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()  # all that there are
    bits = halves.view(torch.int32)
    x = torch.cat([(bits + low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    for k in (1, 3):
        got = kernels.linear(F.pad(x.reshape(-1, 1), (k - 1, 0)), torch.ones(1, k), dtype=torch.bfloat16).flatten()
        wanted = x.bfloat16().float()
        small = x.abs() < 2**-126
        assert (got[small] - wanted[small]).abs().max() < 2**-126
        torch.testing.assert_close(got[~small], wanted[~small], rtol=0, atol=0, equal_nan=True)


@WEIGHTS
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype) -> None:
    """To the bit: a request's answer is the same whatever it is batched with, and on however many threads."""
    x, weight, bias = torch.randn(200, 384), torch.randn(100, 384), torch.randn(100)
    whole = kernels.linear(x, weight, bias, act=Activation.GELU, dtype=dtype)
    for rows in (1, 2, 5, 8, 12, 13, 64):
        assert torch.equal(kernels.linear(x[:rows], weight, bias, act=Activation.GELU, dtype=dtype), whole[:rows])


@pytest.mark.parametrize("act", list(Activation), ids=lambda act: act.name.lower())
def test_activations(kernels: Kernels, act: Activation) -> None:
    """The identity matrix as weights: what comes out is the activation of what goes in."""
    inf, tiny = float("inf"), 1e-42
    special = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), tiny, -tiny, 88.0, 89.0, -88.0, -104.0, 1e30, -1e30])
    spread = torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-20, 2, 500), -torch.logspace(-20, 2, 500)])
    x = torch.cat([special, spread]).reshape(-1, 1)
    got = kernels.linear(x, torch.ones(1, 1), act=act)
    wanted = ACTIVATIONS[act](x.double())
    as_float = ACTIVATIONS[act](x)
    if act is Activation.GELU:
        as_float[x == inf] = inf  # torch's own vectors give NaN there
    assert torch.equal(got.isnan(), as_float.isnan()) and torch.equal(got.isinf(), as_float.isinf())
    finite = as_float.isfinite()
    torch.testing.assert_close(got[finite].double(), wanted[finite], rtol=1e-6, atol=3e-7)


def test_tanh_of_small_numbers(kernels: Kernels) -> None:
    """To the relative precision of float32, where 1 - 2 / (e^2x + 1) has lost it."""
    x = torch.logspace(-12, 0.3, 400).reshape(-1, 1)
    got = kernels.linear(torch.cat([x, -x]), torch.ones(1, 1), act=Activation.TANH)
    torch.testing.assert_close(got.double(), torch.tanh(torch.cat([x, -x]).double()), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4, 5, 7),
        torch.randn(7),
        torch.randn(1, 1, 7),
        torch.randn(6, 9)[:, 1:8],  # rows with something between them
        torch.randn(4, 3, 7).transpose(0, 1),  # rows in another order
        torch.randn(7, 6).t(),  # columns with something between them
        torch.randn(5, 1).expand(5, 7),
        torch.randn(7).expand(5, 7),
        torch.randn(0, 7),
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.stride()}",
)
@WEIGHTS
def test_linear_takes_any_strides(kernels: Kernels, x: Tensor, dtype: torch.dtype) -> None:
    weight = torch.randn(10, 7)
    residual = torch.randn(10, *x.shape[:-1]).movedim(0, -1)
    got = kernels.linear(x, weight, None, residual, dtype=dtype)
    close(got, F.linear(x.to(dtype).double(), weight.to(dtype).double()) + residual, 7)
    assert got.is_contiguous()


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 11), (16, 3, 3, 3), {}),
    ((2, 3, 9, 11), (16, 3, 3, 3), {"padding": (1, 1)}),
    ((1, 5, 12, 7), (33, 5, 3, 2), {"stride": (2, 3), "padding": (2, 1)}),
    ((1, 5, 17, 19), (4, 5, 3, 3), {"dilation": (2, 3), "padding": (4, 0)}),
    ((1, 4, 11, 13), (8, 4, 2, 2), {"stride": (5, 4)}),  # pixels that nothing looks at
    ((3, 5, 9, 3), (20, 5, 3, 3), {"padding": (1, 1)}),  # rows of fewer outputs than a block has
    ((3, 40, 5, 6), (70, 40, 1, 1), {}),
    ((3, 40, 5, 6), (10, 40, 1, 1), {"stride": (2, 2)}),
    ((3, 41, 5, 6), (10, 41, 1, 1), {"stride": (2, 3), "padding": (1, 0)}),
    ((2, 6, 8, 8), (9, 2, 3, 3), {"groups": 3, "padding": (1, 1)}),
    ((2, 9, 8, 8), (40, 9, 3, 3), {"dilation": (1, 2), "padding": (1, 2)}),
    ((2, 9, 8, 8), (6, 3, 3, 3), {"groups": 3, "padding": (2, 2), "dilation": (2, 2)}),
    ((2, 6, 5, 5), (12, 1, 3, 3), {"groups": 6}),  # two outputs a channel
    ((1, 1, 1, 1), (1, 1, 1, 1), {}),
    ((1, 2, 4, 4), (3, 2, 3, 3), {"padding": (5, 5)}),  # outputs that see nothing but padding
    ((4, 32, 40, 40), (32, 32, 3, 3), {"padding": (1, 1)}),  # worth a second thread, shared by pixels
    ((1, 64, 6, 6), (128, 64, 3, 3), {"padding": (1, 1)}),  # by outputs
    ((1, 64, 60, 40), (8, 64, 3, 3), {"padding": (1, 1)}),  # several pieces of rows
    ((1, 700, 1, 200), (10, 700, 1, 3), {"padding": (0, 1)}),  # several pieces of one row
    ((1, 700, 2, 200), (10, 700, 1, 2), {}),
    ((2, 9, 40, 1), (16, 9, 7, 1), {"padding": (3, 0)}),  # a column, taken as a line
    ((1, 1, 90, 1), (33, 1, 16, 1), {"stride": (4, 3), "dilation": (2, 5)}),
    ((2, 20, 30, 1), (20, 1, 5, 1), {"groups": 20, "padding": (2, 0)}),
    ((2, 5, 9, 1), (8, 5, 3, 3), {"padding": (1, 1)}),  # a column that a kernel is wider than
    ((0, 3, 8, 8), (4, 3, 3, 3), {}),
    ((2, 3, 8, 8), (3, 1, 3, 3), {"groups": 3, "padding": (1, 1)}),  # depthwise, fewer channels than a vector has
    ((2, 37, 8, 9), (37, 1, 3, 3), {"groups": 37, "padding": (1, 1)}),
    ((2, 16, 9, 8), (16, 1, 5, 3), {"groups": 16, "stride": (2, 1), "dilation": (1, 2), "padding": (2, 2)}),
    ((1, 24, 20, 21), (24, 1, 5, 5), {"groups": 24, "stride": (2, 2), "padding": (2, 2)}),
    ((1, 18, 3, 2), (18, 1, 3, 3), {"groups": 18, "padding": (1, 1)}),  # no output sees all of its taps inside
    ((1, 20, 4, 4), (20, 1, 3, 3), {"groups": 20, "padding": (5, 4)}),
    ((1, 17, 9, 9), (17, 1, 2, 2), {"groups": 17, "stride": (3, 3)}),
    ((2, 64, 50, 50), (64, 1, 3, 3), {"groups": 64, "padding": (1, 1)}),  # worth a second thread
]


@pytest.mark.parametrize(("shape", "weight", "options"), CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@WEIGHTS
def test_conv2d(kernels: Kernels, shape: Any, weight: Any, options: Any, layout: Any, dtype: torch.dtype) -> None:
    """What lies around the input in memory is NaN: it must not be read."""
    size = 1 + 64 + torch.Size(shape).numel()
    x = torch.full((size + 64,), float("nan"))[65:size].view(shape)
    if layout is torch.channels_last:
        x = x.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    x, w = x.normal_(), torch.randn(weight)
    depthwise = weight[0] == shape[1] == options.get("groups", 1) >= packing.DEPTHWISE
    used = torch.float32 if depthwise else dtype
    wanted = F.conv2d(x.to(used).double(), w.to(used).double(), **options)
    terms = w[0].numel()
    got = kernels.conv2d(x, w, dtype=dtype, **options)
    close(got, wanted, terms)
    assert got.is_contiguous(memory_format=torch.channels_last)
    bias, residual = torch.randn(weight[0]), torch.randn(wanted.shape).contiguous(memory_format=layout)
    full = torch.relu(wanted + bias.double()[:, None, None] + residual)
    close(kernels.conv2d(x, w, bias, residual, act=Activation.RELU, dtype=dtype, **options), full, terms)


@pytest.mark.parametrize("groups", [1, 24])
@WEIGHTS
def test_conv2d_takes_any_strides(kernels: Kernels, groups: int, dtype: torch.dtype) -> None:
    whole, weight = torch.randn(2, 12, 13, 30), torch.randn(24, 24 // groups, 3, 3)
    for x in (
        whole.permute(0, 3, 1, 2)[:, 3:27],  # some channels of more
        whole.permute(0, 3, 1, 2)[:, :24, ::2, 1::3],
        torch.randn(2, 24, 12, 13).transpose(2, 3),
        torch.randn(1, 24, 1, 1).expand(2, 24, 5, 5),
        torch.randn(1, 1, 6, 5).expand(2, 24, 6, 5),
    ):
        used = torch.float32 if groups > 1 else dtype
        wanted = F.conv2d(x.to(used).double(), weight.to(used).double(), padding=1, groups=groups)
        residual = torch.randn(*wanted.shape, 2)[..., 0]
        got = kernels.conv2d(x, weight, None, residual, padding=(1, 1), groups=groups, dtype=dtype)
        close(got, wanted + residual, weight[0].numel())


@pytest.mark.parametrize(("channels", "n", "groups"), [(7, 16, 1), (32, 64, 1), (12, 24, 3), (64, 64, 64)])
@WEIGHTS
def test_an_image_does_not_depend_on_the_others(
    kernels: Kernels, channels: int, n: int, groups: int, dtype: torch.dtype
) -> None:
    """To the bit, and whatever the number of threads."""
    x = torch.randn(5, channels, 29, 31).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(n, channels // groups, 3, 3), torch.randn(n)
    options: dict[str, Any] = {"padding": (1, 1), "groups": groups, "act": Activation.SILU, "dtype": dtype}
    threads = torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)  # of torch and of the kernels: they share one OpenMP
            made.append(kernels.conv2d(x, weight, bias, **options))
            made.append(torch.cat([kernels.conv2d(image[None], weight, bias, **options) for image in x]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, made[0]) for other in made)


def test_threads_live_on_from_layer_to_layer(kernels: Kernels) -> None:
    """Whatever a layer needs of them: to end and start some takes longer than a layer."""
    weight, few, many = torch.randn(256, 256), torch.randn(8, 256), torch.randn(64, 256)  # worth 2 threads, and 4
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        kernels.linear(many, weight)
        before = set(Path("/proc/self/task").iterdir())
        for _ in range(3):
            kernels.linear(few, weight)
            kernels.linear(many, weight)
        assert before <= set(Path("/proc/self/task").iterdir())
    finally:
        torch.set_num_threads(threads)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    masks = [m if m.dtype == torch.bool else m.double() for m in (mask, allowed) if m is not None]
    joined = None
    for m in masks:
        bias = torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, float("-inf")) if m.dtype == torch.bool else m
        joined = bias if joined is None else joined + bias
    scores = q.double() @ k.double().transpose(2, 3) * 0.5
    return torch.nan_to_num((scores if joined is None else scores + joined).softmax(-1)) @ v.double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("b", "h", "l", "s", "e", "d"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 5, 5, 7, 7),
        (1, 2, 33, 47, 33, 20),
        (2, 2, 50, 31, 64, 80),
        (1, 1, 1, 300, 32, 32),
        (1, 1, 200, 130, 40, 40),  # fewer heads than threads
        (3, 4, 100, 100, 32, 32),
    ],
)
def test_attention(kernels: Kernels, b: int, h: int, l: int, s: int, e: int, d: int, causal: bool) -> None:  # noqa: E741
    q, k, v = torch.randn(b, h, l, e), torch.randn(b, h, s, e), torch.randn(b, h, s, d)
    got = kernels.attention(q, k, v, causal=causal)
    close(got, reference(q, k, v, None, causal), e + s)
    assert got.transpose(1, 2).is_contiguous()
    for mask in (
        torch.rand(b, h, l, s) > 0.3,
        torch.rand(b, 1, 1, s) > 0.3,
        torch.randn(1, 1, l, s),
        torch.randn(b, h, 1, s),
        torch.randn(s, l).t()[None, None],
        torch.zeros(b, 1, l, s, dtype=torch.bool),  # nothing is looked at: zeros, as torch gives
        torch.full((1, 1, 1, s), float("-inf")),
    ):
        close(kernels.attention(q, k, v, mask, causal=causal), reference(q, k, v, mask, causal), e + s)


def test_attention_of_scores_that_are_far_apart(kernels: Kernels) -> None:
    """The largest one takes all: e^(score - largest) is 1 there, however large it is and however scaling rounds it."""
    q = torch.linspace(1e4, 1e5, 97).reshape(1, 1, 97, 1)
    k, v = torch.linspace(-3e4, 3e4, 40).reshape(1, 1, 40, 1), torch.randn(1, 1, 40, 5)
    got = kernels.attention(q, k, v, scale=1 / 3)
    assert torch.equal(got, v[:, :, -1:].expand(1, 1, 97, 5))


def test_attention_takes_heads_where_a_linear_layer_left_them(kernels: Kernels) -> None:
    whole = torch.randn(2, 17, 3 * 4 * 8)
    q, k, v = (part.view(2, 17, 4, 8).transpose(1, 2) for part in whole.chunk(3, dim=2))
    close(kernels.attention(q, k, v), reference(q, k, v, None, False), 8)


def test_attention_takes_any_strides(kernels: Kernels) -> None:
    q, k, v = (torch.randn(2, 3, 10, size).transpose(2, 3) for size in (60, 21, 21))
    close(kernels.attention(q, k, v), reference(q, k, v, None, False), 31)
    repeated = torch.randn(1, 1, 1, 10).expand(2, 3, 60, 10)
    close(kernels.attention(repeated, k, v), reference(repeated, k, v, None, False), 31)


def test_what_torch_gives_for_a_row_that_looks_at_nothing() -> None:
    q = torch.randn(1, 1, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = F.scaled_dot_product_attention(q, q, q, torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    assert torch.equal(made, torch.zeros(1, 1, 4, 8))


@WEIGHTS
def test_a_nan_stays_where_it_is(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 41), torch.randn(50, 41)
    x[7, 3] = float("nan")
    x[8, 40] = float("inf")
    got = kernels.linear(x, weight, dtype=dtype)
    assert got.isnan().any(1).nonzero().flatten().tolist() == [7]
    assert got.isinf().all(1).nonzero().flatten().tolist() == [8]
    for groups in (1, 2, 32):
        image, kernel = torch.randn(1, 32, 9, 40), torch.randn(32, 32 // groups, 3, 3)
        image[0, 13, 8, 0], image[0, 4, 0, 39], image[0, 4, 3, 20] = float("nan"), float("inf"), float("nan")
        made = kernels.conv2d(image, kernel, padding=(2, 1), groups=groups, act=Activation.RELU, dtype=dtype)
        theirs = F.conv2d(image.double(), kernel.double(), padding=(2, 1), groups=groups).relu()
        assert torch.equal(made.isfinite(), theirs.isfinite()) and torch.equal(made.isinf(), theirs.isinf())
    q = torch.randn(1, 1, 60, 8)
    q[0, 0, 50, 0] = float("nan")
    assert kernels.attention(q, torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)).isnan().any(3).sum() == 1


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    for call in (
        lambda: kernels.linear(x.double(), weight),
        lambda: kernels.linear(torch.randn(3, 9), weight),
        lambda: kernels.linear(torch.randn(3, 9), weight, dtype=torch.bfloat16),
        lambda: kernels.linear(x, weight, dtype=torch.float64),
        lambda: kernels.linear(x, weight, torch.randn(5)),
        lambda: kernels.linear(x, weight, None, torch.randn(2, 4)),
        lambda: kernels.conv2d(torch.randn(1, 2, 4, 4), torch.randn(3, 2, 5, 5)),
        lambda: kernels.conv2d(torch.randn(1, 3, 4, 4), torch.randn(3, 2, 3, 3)),
        lambda: kernels.conv2d(torch.randn(1, 4, 4, 4), torch.randn(3, 2, 3, 3), dtype=torch.bfloat16),
        lambda: kernels.attention(torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)),
        lambda: kernels.attention(*[torch.randn(1, 2, 3, 4)] * 3, torch.randn(1, 1, 3, 2)),
    ):
        with pytest.raises(Refused):
            call()
    kernels.library.host_refuse(True)
    try:
        with pytest.raises(Refused):
            kernels.linear(x, weight)
    finally:
        kernels.library.host_refuse(False)


def test_a_compiler_that_is_too_old_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="refuses mctl's kernels") as caught:
        kernel_library.build(["g++"], "no-such-machine", tmp_path)
    assert "CXX" in (caught.value.hint or "")
    with pytest.raises(CompileError, match="cannot run `no-such-compiler`"):
        kernel_library.build(["no-such-compiler"], "native", tmp_path)
