"""Writes weights, names and an image. The weights are random: replace them by trained ones."""

import json
from pathlib import Path

import torch
from model import Detector
from PIL import Image, ImageDraw
from safetensors.torch import save_file

torch.manual_seed(0)
network = Detector()
# Without a training the batch norms do not know what to expect, and all objects look alike.
for module in network.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = None  # the average of all that is seen
with torch.no_grad():
    images = torch.nn.functional.interpolate(torch.randn(8, 3, 10, 10), 320, mode="bilinear")
    features = network.network.backbone(images)
    network.network.head(list(features.values()))
save_file(network.state_dict(), "detector.safetensors")
names = {"1": "circle", "2": "square", "3": "triangle"}
Path("index_to_name.json").write_text(json.dumps(names), encoding="utf-8")

image = Image.effect_noise((400, 300), 40).convert("RGB")
draw = ImageDraw.Draw(image)
draw.ellipse((40, 60, 160, 180), fill="red")
draw.rectangle((220, 120, 360, 260), fill="blue")
image.save("image.png")
