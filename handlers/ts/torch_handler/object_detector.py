"""The default handler for object detection."""

from typing import Any

import torch
from torchvision import transforms

from ts.handler_utils.timer import timed
from ts.torch_handler.image_classifier import in_colour
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import map_class_to_label


class ObjectDetector(VisionHandler):
    """Answers each image with what it shows: `{label: [x1, y1, x2, y2], "score": probability}` of
    each object, in pixels of the image, for scores of `threshold` and more.

    The model answers a dict of `boxes`, `labels` and `scores` for each image, as those of
    torchvision do.
    """

    threshold = 0.5
    # Detectors scale and normalise for themselves.
    image_processing = transforms.Compose([transforms.Lambda(in_colour), transforms.ToTensor()])

    @timed
    def preprocess(self, data: Any) -> Any:
        """A batch of images: one tensor if they have one size, else a list of them."""
        images = self._images(data)
        if len({image.shape for image in images}) == 1:
            return torch.stack(images).to(self.device)
        return [image.to(self.device) for image in images]

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Images to boxes, labels and scores."""
        scripted = isinstance(self.model, torch.jit.ScriptModule)
        images = list(data) if scripted else data
        with torch.inference_mode():
            answered = self.model(images, *args, **kwargs)
        # Detectors of torchvision answer their losses too once they are scripted.
        return answered[1] if scripted and isinstance(answered, tuple) else answered

    @timed
    def postprocess(self, data: Any) -> list[list[dict[str, Any]]]:
        """Boxes, labels and scores to a list of objects for each image."""
        return [self._objects(found) for found in data]

    def _objects(self, found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        sure = found["scores"] >= self.threshold
        boxes, labels, scores = (found[key][sure].tolist() for key in ("boxes", "labels", "scores"))
        named = map_class_to_label(
            [[box] for box in boxes], self.mapping, [[label] for label in labels]
        )
        return [one | {"score": score} for one, score in zip(named, scores, strict=True)]
