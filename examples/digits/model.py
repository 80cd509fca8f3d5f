"""The network: two convolutions and a linear layer, 21,000 parameters."""

import torch
from torch import nn


class Digits(nn.Module):
    """Scores of the ten digits, for images of one channel and 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (batch, 1, 8, 8) in 0..1 to scores (batch, 10)."""
        return self.layers(images)
