"""Writes random weights, and photos of several sizes that take a while to decode."""

from pathlib import Path

import torch
from model import Classifier
from PIL import Image
from safetensors.torch import save_file

torch.manual_seed(0)
network = Classifier()
# Without a training the batch norms do not know what to expect, and all photos look alike.
for module in network.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = None  # the average of all that is seen
with torch.no_grad():
    network(torch.nn.functional.interpolate(torch.randn(8, 3, 7, 7), 224, mode="bilinear"))
save_file(network.state_dict(), "classifier.safetensors")

Path("photos").mkdir()
for number in range(16):
    small = torch.randint(0, 256, (6, 8, 3), dtype=torch.uint8).numpy()
    size = (480 + 20 * number, 360)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(f"photos/{number:02}.png")
