"""What handlers of images share: from request to a batch of tensors."""

import base64
import io
import warnings
from abc import ABC
from typing import Any

import torch
from PIL import Image

from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler


class VisionHandler(BaseHandler, ABC):
    """A subclass sets `image_processing`: from a PIL image to a tensor."""

    image_processing: Any

    def initialize(self, context: Any) -> None:
        """Also reads whether Pillow's limit on pixels holds."""
        super().initialize(context)
        self._limit_pixels = context.system_properties.get("limit_max_image_pixels", True)

    @timed
    def preprocess(self, data: Any) -> torch.Tensor:
        """A batch from encoded images (bytes, or base64 text) or nested lists of numbers."""
        images = [self._image(_value(row)) for row in data]
        return torch.stack(images).to(self.device)

    def _image(self, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            value = base64.b64decode(value)
        if isinstance(value, bytes | bytearray):
            return self.image_processing(self._decode(value))  # type: ignore[no-any-return]
        return torch.tensor(value, dtype=torch.float32)

    def _decode(self, encoded: bytes | bytearray) -> Image.Image:
        image = Image.open(io.BytesIO(encoded))
        limit = Image.MAX_IMAGE_PIXELS
        # Pillow itself only warns up to twice its limit. Its limit is the process's, workers are
        # threads of one process, so it is applied here.
        if getattr(self, "_limit_pixels", True) and limit and image.width * image.height > limit:
            raise Image.DecompressionBombError(
                f"image of {image.width} by {image.height} pixels exceeds the limit of {limit}; "
                "`limit_max_image_pixels=false` lifts it"
            )
        return image.convert("RGB") if image.mode == "P" else _loaded(image)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> list[Any]:
        """Integrated gradients of the prediction for `target`."""
        try:
            from captum.attr import IntegratedGradients
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "explanations need the package `captum`", name=missing.name
            ) from missing
        return IntegratedGradients(self.model).attribute(tensor_data, target=target, n_steps=15).tolist()
