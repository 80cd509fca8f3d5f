"""The default handler for semantic segmentation."""

from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers each image with the most probable class of each of its pixels.

    The model answers a dict, as those of torchvision do, whose `out` has the scores: images,
    classes, rows, columns. A result is a nested list: rows, columns, and the class's index and its
    probability. (TorchServe's documentation speaks of one-hot masks, its code answers this.)
    """

    image_processing = ImageClassifier.image_processing

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch of images to scores."""
        with torch.inference_mode():
            answered = self.model(data.to(self.device), *args, **kwargs)
        return answered["out"] if isinstance(answered, dict) else answered

    @timed
    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """Scores to `[class index, probability]` of each pixel."""
        probabilities, classes = torch.softmax(data, dim=1).max(dim=1)
        answers: list[Any] = torch.stack((classes.to(data.dtype), probabilities), dim=3).tolist()
        return answers
