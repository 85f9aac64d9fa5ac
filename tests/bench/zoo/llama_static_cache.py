"""One step of a Llama with a static cache: the model's state.

mctl export llama_static_cache.py --batch-dim none
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)
        self.cache = StaticCache(config=config, max_cache_len=64)
        self.cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        made = self.inner(
            input_ids=input_ids,
            past_key_values=self.cache,
            cache_position=cache_position,
            position_ids=cache_position.unsqueeze(0),
            use_cache=True,
        )
        return made.logits


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[7]]), "cache_position": torch.tensor([3])}
