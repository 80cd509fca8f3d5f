"""A classifier of digits that needs no training: a digit is the tenth of its image's brightness."""

import io

from PIL import Image

MODEL = """
import torch

class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.arange(10) / 10)

    def forward(self, images):
        brightness = images.mean(dim=(1, 2, 3)).unsqueeze(1)
        return -((brightness - self.levels) ** 2)
"""
HANDLER = """
from torchvision.transforms import ToTensor
from ts.torch_handler.vision_handler import VisionHandler

class DigitHandler(VisionHandler):
    image_processing = ToTensor()

    def postprocess(self, data):
        return data.argmax(1).tolist()

    def get_insights(self, tensor_data, raw_data, target=0):
        tensor_data = tensor_data.clone().requires_grad_()
        self.model(tensor_data)[:, target].sum().backward()
        return tensor_data.grad.tolist()
"""


def image(digit: int) -> bytes:
    """A picture that the classifier of digits takes for this one."""
    encoded = io.BytesIO()
    Image.new("L", (28, 28), round(digit * 25.5)).save(encoded, "PNG")
    return encoded.getvalue()
