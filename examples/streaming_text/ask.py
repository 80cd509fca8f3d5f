"""Reads the same answer as a chunked body and as Server-Sent Events."""

import os

import requests

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"


def ask(prompt: bytes, **headers: str) -> requests.Response:
    """An answer that has begun."""
    url = f"{SERVER}/predictions/streaming_text"
    answer = session.post(url, data=prompt, headers=headers, stream=True, timeout=30)
    answer.raise_for_status()
    return answer


chunked = ask(b"Twinkle")
assert chunked.headers["transfer-encoding"] == "chunked"
text = ""
for part in chunked.iter_content(chunk_size=None):
    text += part.decode()  # a program for people would show each part as it comes
print(f"Twinkle{text}", end="")
assert text.endswith("in the sky.\n")

# An event is lines with a name before a colon, and ends with an empty line.
events = ask(b"Twinkle", accept="text/event-stream")
assert events.headers["content-type"].startswith("text/event-stream")
*parts, last = events.content.decode().removesuffix("\n\n").split("\n\n")
assert last == "event: end\ndata: [DONE]", last
written = ["\n".join(line.removeprefix("data: ") for line in part.split("\n")) for part in parts]
print(f"the same in {len(written)} events")
assert len(written) == len(text) and "".join(written) == text

assert ask(b"Up above").text == " the world so high,\nLike a diamond in the sky.\n"
