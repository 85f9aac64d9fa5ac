"""Weights in the order in which the kernels read them: panels of 32 outputs (kernels/product.h says why)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # outputs
VECTOR = 16  # of them, at most
DEPTHWISE = 16  # channels, at least, for a way of their own


def pack_linear(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, k] to [ceil(n / 32), k, 32], outputs filled up with zeros; in bfloat16 to [ceil(n / 32), ceil(k / 2), 32, 2]:
    inputs in pairs.
    """
    group = 2 if dtype is torch.bfloat16 else 1
    n, k = weight.shape
    panels, groups = -(-n // PANEL), -(-k // group)
    filled = pad(weight.to(dtype), (0, groups * group - k, 0, panels * PANEL - n))
    if group == 1:
        return filled.view(panels, PANEL, k).transpose(1, 2).contiguous()
    return filled.view(panels, PANEL, groups, group).transpose(1, 2).contiguous()


def join_groups(weight: Tensor, groups: int) -> tuple[Tensor, int]:
    """A convolution of few outputs in each group as one of fewer groups with zeros in their weights, as many as a
    vector has room for: it takes the same products and fewer stores. Depthwise ones stay as pack_conv2d wants them.
    An infinity in a group's input is NaN in those that it is joined with.
    """
    n, c, kh, kw = weight.shape
    if c == 1 and n == groups >= DEPTHWISE:
        return weight, groups
    outputs = n // groups
    count = max(
        count for count in range(1, groups + 1) if groups % count == 0 and count * outputs <= max(VECTOR, outputs)
    )
    joined = weight.new_zeros(groups // count, count, outputs, count, c, kh, kw)
    for i in range(count):
        joined[:, i, :, i] = weight.reshape(groups // count, count, outputs, c, kh, kw)[:, i]
    return joined.view(n, count * c, kh, kw), groups // count


def as_phases(weight: Tensor, stride: tuple[int, int], groups: int) -> Tensor:
    """The weight [c, n / groups, kh, kw] of a transposed convolution as [n, sh * sw, c / groups, kh / sh, kw / sw] with
    sizes rounded up: that of a convolution which makes, of each pixel, the sh x sw pixels in its place.

    Output s * u + r is the sum of weight[s * j + r] * x[u - j] over j.
    """
    c, n, kh, kw = weight.shape
    sh, sw = stride
    filled = pad(weight, (0, -kw % sw, 0, -kh % sh))
    split = filled.reshape(groups, c // groups, n, -(-kh // sh), sh, -(-kw // sw), sw)
    turned = split.flip(3, 5).permute(0, 2, 4, 6, 1, 3, 5)
    return turned.reshape(groups * n, sh * sw, *turned.shape[4:])


def pack_conv2d(weight: Tensor, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, c / groups, kh, kw] to [groups, ceil(n / groups / 32), kh * kw * c / groups, 32], channels innermost; in
    bfloat16 as pack_linear has it, the channels of each tap in pairs. Depthwise weights (c = n = groups, 16 or more)
    become [1, 1, kh * kw, ceil(n / 32) * 32], always float32.
    """
    n, c, kh, kw = weight.shape
    if c == 1 and n == groups >= DEPTHWISE:
        taps = weight.view(n, kh * kw).t().contiguous()
        return pad(taps, (0, -n % PANEL)).view(1, 1, kh * kw, -1)
    pixels = weight.permute(0, 2, 3, 1)
    if dtype is torch.bfloat16:
        pixels = pad(pixels, (0, c % 2))
    rows = pixels.reshape(groups, n // groups, -1)
    return torch.stack([pack_linear(group, dtype) for group in rows])
