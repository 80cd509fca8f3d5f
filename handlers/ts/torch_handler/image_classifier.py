"""The default handler for image classification."""

from typing import Any

import torch
from PIL import Image
from torchvision import transforms

from ts.handler_utils.timer import timed
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import map_class_to_label


def in_colour(image: Image.Image) -> Image.Image:
    """Three channels, which the normalisation below needs; most images have them already."""
    return image if image.mode == "RGB" else image.convert("RGB")


class ImageClassifier(VisionHandler):
    """Answers each image with its most probable labels and their probabilities."""

    topk = 5
    # How models of torchvision were trained on ImageNet.
    image_processing = transforms.Compose(
        [
            transforms.Lambda(in_colour),
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def set_max_result_classes(self, topk: int) -> None:
        """Sets how many labels are answered."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """How many labels are answered."""
        return self.topk

    @timed
    def postprocess(self, data: torch.Tensor) -> list[dict[str, Any]]:
        """Scores to `{label: probability}`, the most probable first."""
        probabilities, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
