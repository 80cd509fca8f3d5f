"""Asks for greetings, and what happens if the other model is slow or must not be called."""

import os

import requests

SERVER = os.environ["SERVER"]
TOKEN = os.environ["TS_INFERENCE_TOKEN"]


def greet(text: str, token: str, **headers: str) -> requests.Response:
    """The answer of the model that calls another one."""
    headers |= {"authorization": f"Bearer {token}", "content-type": "text/plain; charset=utf-8"}
    url = f"{SERVER}/predictions/greeter"
    return requests.post(url, data=text.encode(), headers=headers, timeout=30)


for text, greeting in (
    ("the weather is fine", "Good day!"),
    ("le temps est un peu gris", "Bonjour !"),
    ("das Wetter ist schön", "Guten Tag!"),
):
    answer = greet(text, TOKEN)
    assert (answer.status_code, answer.text) == (200, greeting), answer.text
    print(f"{text}: {answer.text}")

late = greet("the weather is fine", TOKEN, **{"x-slow-s": "3"})
print(f"a slow model: {late.status_code}")
assert late.status_code == 504, late.text
assert late.elapsed.total_seconds() < 2.5, late.elapsed

stranger = greet("the weather is fine", "not-the-token")
print(f"a caller without the token: {stranger.status_code}")
assert stranger.status_code in (400, 401, 403), stranger.text
