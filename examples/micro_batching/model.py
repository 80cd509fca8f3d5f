"""MobileNetV3, a classifier of torchvision with 2.5 million parameters."""

import torch
from torch import nn
from torchvision.models import mobilenet_v3_small


class Classifier(nn.Module):
    """Scores of a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mobilenet_v3_small(weights=None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, 224, 224) to scores (batch, 1000)."""
        return self.network(images)
