"""LRASPP on MobileNetV3, a segmenter of torchvision with 3.2 million parameters."""

import torch
from torch import nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

CLASSES = 4


class Segmenter(nn.Module):
    """Scores of the classes for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.network = lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=CLASSES
        )

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images (batch, 3, height, width) to `{"out": (batch, classes, height, width)}`."""
        return self.network(images)
