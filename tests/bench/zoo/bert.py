"""BERT: token vectors and the pooled one.

mctl export bert.py --dim batch=1:16 --dim seq=1:64@input_ids:1,attention_mask:1
"""

import torch
from torch import nn
from transformers import BertConfig, BertModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = BertModel(
            BertConfig(
                vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
            )
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return {"hidden": made.last_hidden_state, "pooled": made.pooler_output}


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 200, (3, 20))
    return {"input_ids": ids, "attention_mask": (torch.arange(20) < torch.tensor([[20], [7], [13]])).long()}
