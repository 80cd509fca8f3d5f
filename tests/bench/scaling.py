"""How fast workers come, with and without the zygote.

Each round starts a server of each kind for each model, registers it with one worker, scales to
four, lets them serve, and kills one of them. What is shown are medians over the rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from models import WORK, classifier, example_model, pack, workers
from pools import replaced
from programs import ROOT, Server, answer, load, memory_mb

WORKERS = 4
# No-op models, with the modules that they import.
NOOPS = {"no-op": "", "no-op with torch": "import torch\n"}


def noop_archive(server: Server, name: str, imports: str) -> tuple[str, str]:
    """Packs the no-op handler behind these imports; returns the model's name and the archive's."""
    handler = server.store.parent / "noop.py"
    handler.write_text(imports + (ROOT / "tests/bench/noop.py").read_text())
    return name, pack(server.store, name, workers(1, "process"), "--handler", handler)


def scaled(server: Server, model: str, count: int) -> float:
    """Seconds until so many workers are ready."""
    began = time.monotonic()
    wanted = f"min_worker={count}&max_worker={count}&synchronous=true"
    answer(f"{server.management}/models/{model}?{wanted}", method="PUT")
    return time.monotonic() - began


def measured(kind: str, zygote: bool) -> dict[str, float]:
    """One server, one model, from its registration to a replaced worker."""
    with Server(WORK / "scaling", [f"zygote={str(zygote).lower()}"]) as server:
        if kind in NOOPS:
            model, archive = noop_archive(server, "noop", NOOPS[kind])
        else:
            model, archive = classifier(server.store, 1, "process")
        first = server.register(archive, model)
        known = server.hosts(model)
        alone = sum(memory_mb(pid)["pss"] for pid in server.family()[1:])
        took = scaled(server, model, WORKERS)
        private = statistics.mean(map(private_mb, server.hosts(model) - known))
        # One that has answered nothing would be started again after a pause.
        photo = example_model() / "chelsea.png"
        load(f"{server.inference}/predictions/{model}", 2 * WORKERS, 0.5, "--body-file", photo)
        return {
            "first worker, s": first,
            f"1 to {WORKERS} workers, s": took,
            "killed worker replaced, s": replaced(server, model),
            "one worker and all it needs, MB": alone,
            "private to each further worker, MB": private,
        }


def private_mb(pid: int) -> float:
    """Memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def scaling(options: argparse.Namespace) -> dict:
    """Prints a table for each model."""
    data = {}
    for kind in (*NOOPS, "classifier"):
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(options.scalings):
            print(f"  {kind}: round {number + 1} of {options.scalings}", file=sys.stderr)
            for zygote in (True, False) if number % 2 == 0 else (False, True):
                found[zygote].append(measured(kind, zygote))
        print(f"\n{kind + ', process':36}{'forked':>10}{'executed':>10}")
        for key in found[True][0]:
            medians = [
                statistics.median(row[key] for row in found[zygote]) for zygote in (True, False)
            ]
            print(f"  {key:34}" + "".join(f"{median:>10.3g}" for median in medians))
        data[kind] = {"forked": found[True], "executed": found[False]}
    return data
