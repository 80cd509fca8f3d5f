"""What handlers of images share: from request to a batch of tensors."""

import base64
import io
from abc import ABC
from typing import Any

import torch
from PIL import Image

from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler, value_of
from ts.torch_handler.formats import needed


class VisionHandler(BaseHandler, ABC):
    """A subclass sets `image_processing`: from a PIL image to a tensor."""

    image_processing: Any

    def initialize(self, context: Any) -> None:
        """Also lifts Pillow's limit on pixels where the server does not want it."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Any) -> torch.Tensor:
        """A batch from encoded images (bytes, or base64 text) or nested lists of numbers."""
        return torch.stack(self._images(data)).to(self.device)

    def _images(self, data: Any) -> list[torch.Tensor]:
        return [self._image(value_of(row)) for row in data]

    def _image(self, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            value = base64.b64decode(value)
        if isinstance(value, bytes | bytearray):
            # Not converted: a subclass may want one channel, or four.
            image = Image.open(io.BytesIO(value))
            return self.image_processing(image)  # type: ignore[no-any-return]
        return torch.tensor(value, dtype=torch.float32)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> list[Any]:
        """Integrated gradients of the prediction for `target`."""
        attr = needed("captum.attr", "explaining a prediction")
        attribute = attr.IntegratedGradients(self.model).attribute
        return attribute(tensor_data, target=target, n_steps=15).tolist()  # type: ignore[no-any-return]
