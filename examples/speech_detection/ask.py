"""Asks where there is speech: of a whole recording, and of two streams at the same time."""

import io
import os
import wave
from pathlib import Path

import requests

SERVER = os.environ["SERVER"]
session = requests.Session()
session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"
recording = Path("recording.wav").read_bytes()
# A second of silence, two of a tone, ten of speech, two of noise, one of silence.
SPEECH = (3.0, 13.0)

answer = session.post(f"{SERVER}/predictions/speech_detection", data=recording, timeout=60)
answer.raise_for_status()
found = answer.json()
for part in found:
    print(f"speech from {part['start']:4.1f} s to {part['end']:4.1f} s")
assert found
assert all(SPEECH[0] <= part["start"] < part["end"] <= SPEECH[1] for part in found)
assert sum(part["end"] - part["start"] for part in found) > 5

refused = session.post(f"{SERVER}/predictions/speech_detection", data=b"no sound", timeout=60)
assert refused.status_code == 400, refused.text


def pieces(sound: bytes, seconds: float) -> list[bytes]:
    """A recording as WAV files of so many seconds."""
    files = []
    with wave.open(io.BytesIO(sound)) as whole:
        while frames := whole.readframes(int(seconds * whole.getframerate())):
            buffer = io.BytesIO()
            with wave.open(buffer, "wb") as piece:
                piece.setparams(whole.getparams())
                piece.writeframes(frames)
            files.append(buffer.getvalue())
    return files


# One stream is a second behind the other: each has to be remembered by itself.
PIECE = 0.512  # seconds: 16 chunks of 512 samples
heard: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
parts = pieces(recording, PIECE)
for number in range(len(parts) + 2):
    for stream, at in (("first", number), ("second", number - 2)):
        if 0 <= at < len(parts):
            headers = {"ts_request_sequence_id": stream}
            if at == 0:
                headers["ts_request_sequence_start"] = "true"
            if at == len(parts) - 1:
                headers["ts_request_sequence_end"] = "true"
            answer = session.post(
                f"{SERVER}/predictions/speech_stream", data=parts[at], headers=headers, timeout=60
            )
            answer.raise_for_status()
            heard[stream] += answer.json()
print("heard in pieces:", *(f"{kind} {at:.1f} s" for e in heard["first"] for kind, at in e.items()))
assert heard["first"] == heard["second"]
assert abs(heard["first"][0]["start"] - found[0]["start"]) < 0.1
assert abs(heard["first"][-1]["end"] - found[-1]["end"]) < 0.1
