"""Sends sixteen photos at once, and compares with the model that sees one after the other."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch
from model import Classifier
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import MobileNet_V3_Large_Weights

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"
photos = sorted(Path("photos").glob("*.png"))


def classify(photo: Path) -> dict:
    """The answer for one photo."""
    url = f"{SERVER}/predictions/micro_batching"
    answer = session.post(url, data=photo.read_bytes(), timeout=60)
    answer.raise_for_status()
    return answer.json()


with ThreadPoolExecutor(len(photos)) as pool:
    answers = list(pool.map(classify, photos))
assert max(answer["piece"] for answer in answers) > 0, "there was no batch to cut"

model = Classifier().eval()
model.load_state_dict(load_file("classifier.safetensors"))
# What the handler does with photos: how torchvision's models were trained.
prepare = MobileNet_V3_Large_Weights.IMAGENET1K_V1.transforms()
classes = set()
for photo, answer in zip(photos, answers, strict=True):
    with torch.inference_mode():
        scores = model(prepare(Image.open(photo))[None]).softmax(dim=1)[0]
    [(best, probability)] = answer["best"].items()
    assert int(best) == scores.argmax().item(), (photo, answer)
    assert abs(probability - scores.max().item()) < 1e-4, (photo, answer)
    classes.add(best)
print(f"{len(photos)} photos, {len(classes)} classes, each as the model says by itself")
assert len(classes) > 1
