"""A tagger: embeddings, an LSTM both ways, a tag for every word.

mctl export lstm_tagger.py --dim batch=1:16 --dim words=1:40@words:1
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(words))[0]).log_softmax(-1)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"words": torch.randint(0, 500, (3, 11))}
