"""Graph attention: softmax over each node's edges.

mctl export graph_attention.py --batch-dim none --dim nodes=2:50@x:0 --dim edges=1:200@edges:1 --range edges=0:nodes-1
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(8, 16), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        nodes, (source, target) = self.project(x), edges
        scores = F.leaky_relu(self.score(torch.cat([nodes[source], nodes[target]], 1))).squeeze(1)
        largest = torch.full((x.shape[0],), -torch.inf).scatter_reduce(0, target, scores, "amax")
        weights = (scores - largest[target]).exp()
        total = torch.zeros(x.shape[0]).index_add(0, target, weights)
        shares = weights / total[target]
        return torch.zeros_like(nodes).index_add(0, target, nodes[source] * shares.unsqueeze(1)).relu()


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(7, 8), "edges": torch.randint(0, 7, (2, 11))}
