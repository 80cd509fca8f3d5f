"""Asks for the vectors of sentences, and which two of them say the same."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import requests

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"

SENTENCES = [
    "A man is eating a piece of bread.",
    "Somebody has bread for lunch.",
    "The server answers many requests at once.",
    "Handling several calls in parallel is what this program does.",
    "It will rain tomorrow, and the day after.",
]


def embed(sentence: str) -> list[float]:
    """The vector of a sentence."""
    answer = session.post(
        f"{SERVER}/predictions/sentence_embeddings",
        data=sentence.encode(),
        headers={"content-type": "text/plain; charset=utf-8"},
        timeout=60,
    )
    answer.raise_for_status()
    return answer.json()


with ThreadPoolExecutor(len(SENTENCES)) as pool:
    vectors = np.array(list(pool.map(embed, SENTENCES)))
assert vectors.shape == (len(SENTENCES), 384)
assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)

alike = vectors @ vectors.T
for row, sentence in zip(alike, SENTENCES, strict=True):
    print(*(f"{value.round(2) + 0.0:5.2f}" for value in row), "", sentence)
others = alike - 2 * np.eye(len(SENTENCES))
assert others.argmax(axis=1).tolist()[:4] == [1, 0, 3, 2]
assert others[4].max() < 0.3 < others[0, 1]
# A batch or none, padded or not: the vector is that of the sentence.
assert np.allclose(vectors[0], embed(SENTENCES[0]), atol=1e-4)
