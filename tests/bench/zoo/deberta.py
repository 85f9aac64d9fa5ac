"""DeBERTa v2: attention that knows distances.

mctl export deberta.py --dim batch=1:16 --dim seq=2:64@input_ids:1,attention_mask:1
"""

import torch
from torch import nn
from transformers import DebertaV2Config, DebertaV2Model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = DebertaV2Model(
            DebertaV2Config(
                vocab_size=300,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                relative_attention=True,
                max_relative_positions=64,
                pos_att_type=["p2c", "c2p"],
                position_buckets=32,
            )
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        made = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return made.last_hidden_state


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 200, (3, 20))
    return {"input_ids": ids, "attention_mask": (torch.arange(20) < torch.tensor([[20], [7], [13]])).long()}
