"""A voice activity net as silero's: short-time Fourier, convolutions, an LSTM cell whose state comes and goes.

mctl export voice_activity.py --dim batch=1:32
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        waves = torch.fft.rfft(torch.eye(256) * torch.hann_window(256)).T
        self.register_buffer("waves", torch.cat([waves.real, waves.imag])[:, None])
        self.encoder = nn.Sequential(
            nn.Conv1d(129, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)
        )
        self.cell = nn.LSTMCell(64, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, sound: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """`sound` is [batch, 576], `state` [batch, 2, 64]."""
        parts = F.conv1d(F.pad(sound[:, None], (0, 64), mode="reflect"), self.waves, stride=128)
        size = (parts[:, :129] ** 2 + parts[:, 129:] ** 2).sqrt()
        hidden, cell = self.cell(self.encoder(size).squeeze(-1), (state[:, 0], state[:, 1]))
        return {"speech": self.head(hidden.relu()).sigmoid(), "state": torch.stack([hidden, cell], 1)}


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"sound": torch.randn(3, 576), "state": torch.zeros(3, 2, 64)}
