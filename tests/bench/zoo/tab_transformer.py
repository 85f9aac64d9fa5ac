"""TabTransformer: attention over columns of categories, numbers beside them.

mctl export tab_transformer.py --dim batch=1:64
"""

import torch
from torch import nn

COLUMNS = (7, 12, 3, 50, 9)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(count, 16) for count in COLUMNS)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Sequential(nn.Linear(16 * len(COLUMNS) + 6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        columns = torch.stack([embed(categories[:, at]) for at, embed in enumerate(self.embed)], 1)
        return self.head(torch.cat([self.encoder(columns).flatten(1), self.norm(numbers)], 1)).softmax(-1)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    categories = torch.stack([torch.randint(0, count, (4,)) for count in COLUMNS], 1)
    return {"categories": categories, "numbers": torch.randn(4, 6)}
