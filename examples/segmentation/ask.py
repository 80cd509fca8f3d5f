"""Asks for the class of each pixel, and compares with the same model without a server."""

import os
from pathlib import Path

import numpy as np
import requests
import torch
from model import CLASSES, Segmenter
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import MobileNet_V3_Large_Weights

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"

answer = session.post(
    f"{SERVER}/predictions/segmentation", data=Path("image.png").read_bytes(), timeout=60
)
answer.raise_for_status()
mask = np.array(answer.json())
print("rows, columns, and class with its probability:", mask.shape)
assert mask.shape == (224, 224, 2)

model = Segmenter().eval()
model.load_state_dict(load_file("segmenter.safetensors"))
# What the handler does with images: how torchvision's models were trained.
prepare = MobileNet_V3_Large_Weights.IMAGENET1K_V1.transforms()
image = prepare(Image.open("image.png"))
with torch.inference_mode():
    expected = model(image[None])["out"].softmax(dim=1)[0].max(dim=0)
same = mask[..., 0] == expected.indices.numpy()
print("pixels of each class:", np.bincount(expected.indices.flatten(), minlength=CLASSES))
# Threads may add in another order, which changes a pixel whose classes are equally probable.
assert same.mean() > 0.999
assert np.allclose(mask[..., 1], expected.values.numpy(), atol=1e-4)
