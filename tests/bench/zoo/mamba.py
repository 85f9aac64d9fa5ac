"""A state-space layer: a scan over the sequence.

mctl export mamba.py --dim batch=1:8
"""

import torch
from torch import nn
from transformers import MambaConfig, MambaModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MambaModel(MambaConfig(vocab_size=300, hidden_size=32, state_size=8, num_hidden_layers=2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, use_cache=False).last_hidden_state


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 300, (3, 12))}
