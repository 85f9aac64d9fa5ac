"""Wav2Vec2: samples of sound to a letter for every frame.

mctl export wav2vec2.py --dim batch=1:8 --dim samples=800:16000@sound:1
"""

import torch
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Wav2Vec2Config(
            vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            conv_dim=[32] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        )  # fmt: skip
        self.inner = Wav2Vec2ForCTC(config)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.inner(sound).logits


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"sound": torch.randn(2, 4000)}
