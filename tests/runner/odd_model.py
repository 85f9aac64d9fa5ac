"""Outputs that are inputs, constants, state or one another, whole or in part; a scalar, ids with a range, bfloat16."""

import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("fixed", torch.arange(3.0))
        self.embedding = nn.Embedding(10, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        scaled = self.embedding(ids) * scale
        return {
            "same": x,
            "same_again": x,
            "turned": x.t(),
            "column": x[:, 1],
            "fixed": self.fixed,
            "calls": self.calls,
            "calls_again": self.calls,
            "scaled": scaled,
            "scaled_again": scaled,
            "scaled_turned": scaled.t(),
            "scaled_columns": scaled[:, 1:],
            "half": (x * 2).bfloat16(),
        }


model = Odd


def example_inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 3), "ids": torch.tensor([1, 5, 9, 0]), "scale": torch.tensor(2.0)}
