"""SSDlite on MobileNetV3, a detector of torchvision with 2.3 million parameters."""

import torch
from torch import nn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

CLASSES = 4  # the first one is the background
OBJECTS = 5


class Detector(nn.Module):
    """The most probable objects of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=CLASSES, detections_per_img=OBJECTS
        )

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Images (3, height, width) of any sizes to `boxes`, `labels` and `scores` of each."""
        return self.network(list(images))
