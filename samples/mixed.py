"""All kinds of arguments: a dict, a keyword, a constant; two outputs of different rank, one of them twice as long.

mctl export samples/mixed.py --dim batch=1:16 --dim seq=2:64@batch.ids:1,batch.mask:1 \
    --pad batch.ids=0 --pad batch.mask=0 --embed-onnx
"""

import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.score = nn.Linear(16, 1)

    def forward(
        self, batch: dict[str, torch.Tensor], *, scale: torch.Tensor, repeats: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.embedding(batch["ids"]) * batch["mask"].unsqueeze(-1) * scale.reshape(-1, 1, 1)
        twice = torch.stack([vectors, vectors.flip(-1)], dim=2).flatten(1, 2) * repeats  # [batch, 2*seq, 16]
        return twice, self.score(twice.sum(dim=1)).squeeze(-1)


model = Mixed


def example_inputs() -> dict[str, object]:
    ids = torch.tensor([[5, 9, 17, 0], [99, 3, 0, 0], [1, 2, 3, 4]])
    return {
        "batch": {"ids": ids, "mask": (ids != 0).float()},
        "scale": torch.tensor([0.5, 1.0, 2.0]),
        "repeats": 2,
    }
