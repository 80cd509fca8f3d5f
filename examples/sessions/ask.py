"""Sends the readings of four sensors at the same time, each in a session of its own."""

import os
import statistics
from concurrent.futures import ThreadPoolExecutor

import requests

SERVER = os.environ["SERVER"]
READINGS = {
    "cellar": [12.0, 12.1, 11.9, 12.0, 12.2, 11.8, 12.1, 12.0],
    "oven": [180.0, 184.0, 176.0, 181.0, 179.0, 182.0, 260.0, 180.0],
    "garden": [3.0, 4.5, 6.0, 5.5, 7.0, 8.0, 6.5, 5.0],
    "freezer": [-18.0, -18.2, -17.9, -18.1, -18.0, -18.1, -17.9, 4.0],
}


def send(session: requests.Session, sensor: str, body: str, **marks: str) -> requests.Response:
    """One reading; the header makes it part of a sequence."""
    session.headers["authorization"] = f"Bearer {os.environ['TS_INFERENCE_TOKEN']}"
    headers = {"ts_request_sequence_id": sensor}
    headers |= {f"ts_request_sequence_{name}": value for name, value in marks.items()}
    url = f"{SERVER}/predictions/sessions"
    return session.post(url, data=body, headers=headers, timeout=30)


def follow(sensor: str) -> list[float]:
    """Sends all readings of a sensor; those that were out of the ordinary."""
    unusual = []
    readings = READINGS[sensor]
    with requests.Session() as session:
        for number, reading in enumerate(readings):
            marks = {"start": "true"} if number == 0 else {}
            if number == len(readings) - 1:
                marks["end"] = "true"
            answer = send(session, sensor, str(reading), **marks)
            answer.raise_for_status()
            told = answer.json()
            # Nothing of another sensor has come between.
            assert told["count"] == number + 1, told
            assert abs(told["mean"] - statistics.fmean(readings[: number + 1])) < 1e-6, told
            if told["unusual"]:
                unusual.append(reading)
    return unusual


with ThreadPoolExecutor(len(READINGS)) as pool:
    found = dict(zip(READINGS, pool.map(follow, READINGS), strict=True))
for sensor, unusual in found.items():
    print(f"{sensor:8} unusual: {unusual}")
assert found == {"cellar": [], "oven": [260.0], "garden": [], "freezer": [4.0]}

# A session that has ended is forgotten; what is no number fails, and the session goes on.
with requests.Session() as session:
    assert send(session, "oven", "20", start="true").json()["count"] == 1
    assert send(session, "oven", "hot").status_code == 400
    assert send(session, "oven", "22", end="true").json()["mean"] == 21
