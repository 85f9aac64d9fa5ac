"""Whisper's encoder: convolutions over a mel spectrogram, then attention.

mctl export whisper_encoder.py --dim batch=1:8
"""

import torch
from torch import nn
from transformers import WhisperConfig, WhisperModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = WhisperConfig(
            vocab_size=300, num_mel_bins=40, d_model=64, encoder_layers=2, encoder_attention_heads=4,
            encoder_ffn_dim=128, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=128,
            max_source_positions=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        self.inner = WhisperModel(config).encoder

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        return self.inner(mel).last_hidden_state


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"mel": torch.randn(2, 40, 200)}
