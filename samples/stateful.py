"""A running mean that changes with every call: state is recorded, and requests are never joined into batches.

mctl export samples/stateful.py --dim batch=1:8
"""

import torch
from torch import nn


class RunningMean(nn.Module):
    """Takes rows of 4 numbers; returns them relative to the mean of all rows so far, and how many those are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.total.add_(x.sum(dim=0))
        self.count.add_(x.shape[0])
        return {"centered": x - self.total / self.count, "count": self.count.clone()}


model = RunningMean


def example_inputs() -> tuple[torch.Tensor]:
    return (torch.randn(3, 4),)
