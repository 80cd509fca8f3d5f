"""Writes weights and an image. The weights are random: replace them by trained ones."""

import torch
from model import Segmenter
from PIL import Image
from safetensors.torch import save_file

torch.manual_seed(0)
network = Segmenter()
# Without a training the batch norms do not know what to expect, and all pixels look alike.
for module in network.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = None  # the average of all that is seen
with torch.no_grad():
    network(torch.nn.functional.interpolate(torch.randn(8, 3, 7, 7), 224, mode="bilinear"))
save_file(network.state_dict(), "segmenter.safetensors")

circles = [Image.radial_gradient("L").resize((320, 240)) for _ in range(3)]
Image.merge("RGB", [circles[0], circles[1].rotate(90), circles[2].rotate(180)]).save("image.png")
