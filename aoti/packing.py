"""Weights in the order in which the kernels read them: panels of 32 outputs (kernels/product.h says why)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # outputs


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


def pack_conv2d(weight: Tensor, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, c / groups, kh, kw] to [groups, ceil(n / groups / 32), kh * kw * c / groups, 32], channels innermost; in
    bfloat16 as pack_linear has it. Depthwise weights (c = n = groups) are [1, 1, kh * kw, n], always float32.
    """
    n, c, kh, kw = weight.shape
    if c == 1 and n == groups > 1:
        return weight.view(n, kh * kw).t().contiguous().view(1, 1, kh * kw, n)
    rows = weight.permute(0, 2, 3, 1).reshape(groups, n // groups, kh * kw * c)
    return torch.stack([pack_linear(group, dtype) for group in rows])
