"""Asks for digits that the network has not seen, and for an explanation."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from PIL import Image

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"
images = sorted(Path("held_out").glob("*.png"))


def classify(image: Path) -> str:
    """The most probable digit."""
    answer = session.post(f"{SERVER}/predictions/digits", data=image.read_bytes(), timeout=30)
    answer.raise_for_status()
    return max(answer.json().items(), key=lambda named: named[1])[0]


# Several at once: the server makes batches of them.
with ThreadPoolExecutor(8) as pool:
    right = sum(
        image.stem.endswith(digit)
        for image, digit in zip(images, pool.map(classify, images), strict=True)
    )
print(f"{right} of {len(images)} digits are right")
assert right >= 0.97 * len(images)

answer = session.post(f"{SERVER}/explanations/digits", data=images[0].read_bytes(), timeout=30)
answer.raise_for_status()
[importances] = answer.json()  # of the one channel
ink = Image.open(images[0]).load()
for y, row in enumerate(importances):
    print("  ", "".join(" -+"[(value > 0.01) * 2 or (value < -0.01)] for value in row))
    # Integrated gradients compare with a black image, so a black pixel explains nothing.
    assert all(value == 0 for x, value in enumerate(row) if ink[x, y] == 0)
assert any(value != 0 for row in importances for value in row)
