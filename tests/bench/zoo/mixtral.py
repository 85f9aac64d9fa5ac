"""A mixture of experts: each token goes to two of four.

mctl export mixtral.py --dim batch=1:8 --dim seq=1:32@input_ids:1
"""

import torch
from torch import nn
from transformers import MixtralConfig, MixtralModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
        )  # fmt: skip
        self.inner = MixtralModel(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, use_cache=False).last_hidden_state


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 300, (3, 12))}
