"""Workers of a pool: what a second process brings a handler that computes, and what it costs when
one is killed."""

import argparse
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from models import WORK, pack, workers
from programs import ROOT, WARM_UP_S, Server, load
from rounds import Subject, loaded, run_rounds, summary, table

RATE = 300
RATE_CONNECTIONS = 32
# Under load, a worker being killed after a quarter of them.
SECONDS = 2


def burn(options: argparse.Namespace) -> dict:
    """A handler that computes in Python: one worker, and two of each kind."""
    handler = ROOT / "tests/bench/burn.py"
    with Server(WORK / "burn", options.config) as server:
        subjects = []
        for count, isolation in ((1, "process"), (2, "process"), (2, "thread")):
            model = f"burn_{isolation}_w{count}"
            archive = pack(server.store, model, workers(count, isolation), "--handler", handler)
            server.register(archive, model)
            measure = loaded(server, f"{server.inference}/predictions/{model}", 4)
            subjects.append(Subject(f"{count} worker(s), {isolation}", measure))
        run_rounds(subjects, options.rounds, options.seconds)
        return table("5 ms of Python for each request: 4 connections", subjects, "requests/s")


def kill(options: argparse.Namespace) -> dict:
    """One of two workers is killed under load."""
    print(f"\nOne of 2 workers killed while {RATE} requests a second arrive")
    data = {}
    with Server(WORK / "kill", options.config) as server:
        for name in ("noop", "burn"):
            handler = ROOT / f"tests/bench/{name}.py"
            archive = pack(server.store, name, workers(2, "process"), "--handler", handler)
            server.register(archive, name)
            rounds = [killed(server, name) for _ in range(options.rounds)]
            data[name] = {"rounds": rounds}
            failures = [counted["failures"] for counted in rounds]
            again = summary([counted["replaced_s"] for counted in rounds])
            worst = statistics.median(counted["max_ms"] for counted in rounds)
            print(f"  {name:34}failed: {failures} of {RATE * SECONDS} requests; ", end="")
            print(f"replaced after {again['median'] * 1000:.0f} ms ", end="")
            print(f"({again['min'] * 1000:.0f} to {again['max'] * 1000:.0f}); ", end="")
            print(f"slowest answer {worst:.1f} ms")
    return data


def killed(server: Server, model: str) -> dict:
    """What the load saw, and seconds until as many workers as before were ready."""
    url = f"{server.inference}/predictions/{model}"
    with ThreadPoolExecutor(1) as beside:
        counting = beside.submit(load, url, RATE_CONNECTIONS, SECONDS, "--rate", RATE)
        time.sleep(WARM_UP_S + SECONDS / 4)
        replaced_s = replaced(server, model)
        return counting.result() | {"replaced_s": replaced_s}


def replaced(server: Server, model: str) -> float:
    """Kills a worker; seconds until another is ready in its place."""
    known = server.hosts(model)
    victim = min(known)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while True:
        states = server.describe(model)["workers"]
        ready = {worker["pid"] for worker in states if worker["status"] == "READY"}
        if victim not in ready and len(ready) == len(known):
            return time.monotonic() - began
        time.sleep(0.002)
