"""Asks what is where in an image, and compares with the same model without a server."""

import json
import os
from pathlib import Path

import requests
import torch
from model import OBJECTS, Detector
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.functional import to_tensor

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"
names = json.loads(Path("index_to_name.json").read_text(encoding="utf-8"))

answer = session.post(
    f"{SERVER}/predictions/detection", data=Path("image.png").read_bytes(), timeout=60
)
answer.raise_for_status()
found = answer.json()
assert len(found) == OBJECTS

model = Detector().eval()
model.load_state_dict(load_file("detector.safetensors"))
with torch.inference_mode():
    [expected] = model([to_tensor(Image.open("image.png"))])

fields = (expected[key] for key in ("boxes", "labels", "scores"))
for one, box, label, score in zip(found, *fields, strict=True):
    name = names[str(label.item())]
    print(f"{name:8} {one['score']:.3f}", [round(corner) for corner in one[name]])
    torch.testing.assert_close(torch.tensor(one[name]), box, atol=0.1, rtol=0)
    torch.testing.assert_close(torch.tensor(one["score"]), score, atol=1e-3, rtol=0)
