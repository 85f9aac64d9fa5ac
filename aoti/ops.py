"""mctl's own operators, as torch's compiler sees them: what they take, the shapes they give, and their C functions.

Their code is in `kernels/`; it is compiled into each variant that uses it. Nothing runs them outside a variant.
"""

from enum import IntEnum

import torch
from torch import Tensor
from torch._ops import OpOverload


class Activation(IntEnum):
    """What a linear layer or a convolution ends with; the numbers are those of kernels/activation.h."""

    NONE = 0
    RELU = 1
    GELU = 2  # by the error function
    GELU_TANH = 3
    SILU = 4
    TANH = 5
    SIGMOID = 6


_LIBRARY = torch.library.Library("mctl", "DEF")


def _define(name: str, schema: str) -> OpOverload:
    _LIBRARY.define(name + schema)
    return getattr(torch.ops.mctl, name).default


# act(x @ weight.T + bias + residual): x [..., k] to [..., n]; `packed` is pack_linear(weight, float32 or bfloat16)
linear = _define("mctl_linear", "(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int n, int act) -> Tensor")
# act(conv2d(x) + bias + residual): x [b, c, h, w] to [b, n, ...], channels last in memory; `packed` is
# pack_conv2d(weight, groups, float32 or bfloat16)
conv2d = _define(
    "mctl_conv2d",
    "(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int n, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, int groups, int act) -> Tensor",
)
# softmax(scale * q @ k.T + mask) @ v: q [b, h, l, e], k [b, h, s, e], v [b, h, s, d] to [b, h, l, d]
attention = _define("mctl_attention", "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, int causal) -> Tensor")

# keys and values to their slots in kv, then softmax(scale * q @ keys.T) @ values for each token over those of its
# request up to itself: kernels/paged_attention.cc says what the tensors are
paged_attention = _define(
    "mctl_paged_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor slots, Tensor tables, Tensor lengths, Tensor ends, "
    "Tensor? sinks, int layer, float scale, int window, float softcap) -> Tensor",
)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, n: int, act: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    n: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
) -> Tensor:
    height, width = (
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(2)
    )
    return x.new_empty(x.shape[0], height, width, n).permute(0, 3, 1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: int) -> Tensor:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


for _name, _fake in (
    ("linear", _linear),
    ("conv2d", _conv2d),
    ("attention", _attention),
    ("paged_attention", _paged_attention),
):
    torch.library.register_fake(f"mctl::mctl_{_name}", _fake, lib=_LIBRARY)

_T, _T_OR_NULL, _LIST = "AtenTensorHandle", "AtenTensorHandle*", "const int64_t*"
_DECLARATIONS = {
    linear: ("mctl_linear", [_T, _T, _T_OR_NULL, _T_OR_NULL, "int64_t", "int64_t"]),
    conv2d: (
        "mctl_conv2d",
        [_T, _T, _T_OR_NULL, _T_OR_NULL, "int64_t", *[_LIST, "int64_t"] * 4, "int64_t", "int64_t"],
    ),
    attention: ("mctl_attention", [_T, _T, _T, _T_OR_NULL, "double", "int32_t"]),
    paged_attention: (
        "mctl_paged_attention",
        [*[_T] * 8, _T_OR_NULL, "int64_t", "double", "int64_t", "double"],
    ),
}
# Their declarations, for torch_private.c_functions.
C_SHIMS = {
    op: [f"AOTITorchError aoti_torch_cpu_{name}({', '.join([*arguments, _T_OR_NULL])});"]
    for op, (name, arguments) in _DECLARATIONS.items()
}
