"""A detection head as in YOLO: boxes from distances over a grid, at three sizes.

mctl export yolo_head.py --dim batch=1:4 --dim h=64:320:32@image:2 --dim w=64:320:32@image:3
"""

import torch
from torch import nn


def conv(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (16, 24, 32)
        self.stem = nn.Sequential(conv(3, 8, 2), conv(8, 16, 2))
        self.stages = nn.ModuleList([conv(16, 16, 2), conv(16, 24, 2), conv(24, 32, 2)])
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 * 16 + 5, 1) for width in widths)
        self.register_buffer("bins", torch.arange(16.0))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x, boxes, scores = self.stem(image), [], []
        for level, (stage, head) in enumerate(zip(self.stages, self.heads, strict=True)):
            x = stage(x)
            stride = 8 << level
            made = head(x)
            rows, columns = torch.arange(made.shape[2]) + 0.5, torch.arange(made.shape[3]) + 0.5
            y, z = torch.meshgrid(rows, columns, indexing="ij")
            places = torch.stack([z, y]).flatten(1)
            distances = made[:, :64].unflatten(1, (4, 16)).flatten(3).softmax(2)
            left, right = (distances * self.bins[:, None]).sum(2).chunk(2, 1)
            boxes.append(torch.cat([places - left, places + right], 1) * stride)
            scores.append(made[:, 64:].flatten(2).sigmoid())
        return {"boxes": torch.cat(boxes, 2).transpose(1, 2), "scores": torch.cat(scores, 2).transpose(1, 2)}


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(2, 3, 96, 128)}
