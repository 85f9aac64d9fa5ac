"""The bytes of tensors in every layout that torch has for them, compared with Python's own packing."""

import struct

import pytest
import torch

from mctl.export.raw import bytes_of


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t(), struct.pack("<4h", 1, 3, 2, 4)),
        (torch.tensor(2.5), struct.pack("<f", 2.5)),
        (torch.arange(4, dtype=torch.float64).reshape(1, 4)[:, ::4], struct.pack("<d", 0)),
        (torch.arange(6, dtype=torch.float64).reshape(3, 2)[:, 1:], struct.pack("<3d", 1, 3, 5)),
        (torch.tensor([True, False]), b"\1\0"),
        (torch.tensor([1.0], dtype=torch.bfloat16).expand(2), b"\x80\x3f" * 2),
        (torch.empty(0, 3), b""),
        (torch.tensor([1.0], requires_grad=True), struct.pack("<f", 1)),
    ],
)
def test_row_major_little_endian(tensor: torch.Tensor, wanted: bytes) -> None:
    assert bytes(bytes_of(tensor)) == wanted
