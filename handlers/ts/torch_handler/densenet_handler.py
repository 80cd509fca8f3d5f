"""The handler that archives of TorchServe's first releases name or derive from."""

from typing import Any

import torch

from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.vision_handler import VisionHandler


class DenseNetHandler(VisionHandler):
    """Answers with the model's scores as they are: one tensor, so a batch of one.

    Subclasses override `preprocess`, which reads an image as `image_classifier` does, or
    `postprocess`.
    """

    image_processing = ImageClassifier.image_processing

    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """The scores, in a list."""
        return [data]
