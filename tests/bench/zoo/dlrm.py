"""DLRM: embedding bags of categories beside dense features, and their products.

mctl export dlrm.py --dim batch=1:64
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(4))
        self.below = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.above = nn.Sequential(nn.Linear(16 + 10, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """`categories` are [batch, 4, 3]."""
        below = self.below(dense)
        vectors = torch.stack([below, *(bag(categories[:, at]) for at, bag in enumerate(self.bags))], 1)
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.above(torch.cat([below, products], 1)).sigmoid()


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"dense": torch.randn(5, 13), "categories": torch.randint(0, 1000, (5, 4, 3))}
