"""Asks for the label of sentences that the model was not trained on."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"


def classify(text: str) -> dict[str, float]:
    """The probabilities of the labels."""
    answer = session.post(
        f"{SERVER}/predictions/text_classification",
        data=text.encode(),
        headers={"content-type": "text/plain; charset=utf-8"},
        timeout=60,
    )
    answer.raise_for_status()
    return answer.json()


held_out = json.loads(Path("held_out.json").read_text(encoding="utf-8"))
with ThreadPoolExecutor(8) as pool:
    answers = list(pool.map(classify, (text for text, _ in held_out)))
right = sum(
    (answer["praise"] > 0.5) == label for answer, (_, label) in zip(answers, held_out, strict=True)
)
print(f"{right} of {len(held_out)} sentences are right")
assert right >= 0.95 * len(held_out)

for text in (
    "What a lovely train",
    "The hotel was not lovely at all",
    "I found the meal rather awful.",
):
    label, probability = max(classify(text).items(), key=lambda named: named[1])
    print(f"{label:9} {probability:4.0%}  {text}")
assert abs(sum(classify("anything else").values()) - 1) < 1e-5
