#!/usr/bin/env python3
"""Measures the server beside what it is compared to, on this machine: `make bench`.

Each round runs every subject once, so that what else the machine does meets all of them alike;
ratios are taken within a round, and what is shown is their median. Nothing here passes or fails:
docs/benchmarks.md says how to read it. Writes `target/bench/results.json`.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable

from models import CLASSIFIER, WORK, classifier, echo_model, example_model, pack, workers
from pools import burn, kill
from programs import BINARIES, CORES, ROOT, Echo, PlainLoop, Server, benchmark, load, memory_mb
from rounds import Subject, latencies, loaded, run_rounds, summary, table
from scaling import scaling
from scheduler import scheduler
from slow_clients import slow_clients
from telemetry import telemetry

NOOP_BODY_BYTES = 100
NOOP_BATCH = 32
DEMO_WORKERS = 2


def noop(options: argparse.Namespace) -> dict:
    """A handler that does nothing, beside a bare echo server."""
    handler = ROOT / "tests/bench/noop.py"
    with Echo() as echo, Server(WORK / "noop", options.config) as server:
        urls = {"bare echo": (echo, echo.url)}

        def add(shown: str, model: str, archive: str) -> None:
            server.register(archive, model)
            urls[shown] = (server, f"{server.inference}/predictions/{model}")

        for batch in (1, NOOP_BATCH):
            model = f"echo_b{batch}"
            archive = echo_model(server.store, model, workers(2, "process", batch))
            add(f"echo backend, 2 workers, batch {batch}", model, archive)
        for isolation, batches in (("process", (1, NOOP_BATCH)), ("thread", (NOOP_BATCH,))):
            for count in (1, 2):
                for batch in batches:
                    model = f"noop_{isolation}_w{count}_b{batch}"
                    config = workers(count, isolation, batch)
                    archive = pack(server.store, model, config, "--handler", handler)
                    add(f"{isolation}, {count} worker(s), batch {batch}", model, archive)

        def subjects(connections: int, names: Iterable[str]) -> list[Subject]:
            body = ("--body-bytes", NOOP_BODY_BYTES)
            found = [Subject(name, loaded(*urls[name], connections, *body)) for name in names]
            run_rounds(found, options.rounds, options.seconds)
            return found

        title = f"No-op handler: {options.connections} connections, {NOOP_BODY_BYTES} byte bodies"
        many = table(title, subjects(options.connections, urls), "requests/s")
        lone = ["bare echo", *(name for name in urls if f"1 worker(s), batch {NOOP_BATCH}" in name)]
        return {"many": many, "lone": latencies("The same, 1 connection", subjects(1, lone))}


def queue(options: argparse.Namespace) -> dict:
    """The server's queue by itself on one core, as `crates/serving/benches/queue.rs` runs it."""
    data = benchmark("queue")
    print("\nQueue: requests pushed, taken, answered and awaited on one core")
    for kind in data:
        speed = summary(kind["per_second"])
        shown = f"{kind['callers']} caller(s), batches up to {kind['batch_size']}"
        print(f"  {shown:34}{speed['median']:.0f} requests/s ", end="")
        print(f"({speed['min']:.0f} to {speed['max']:.0f})")
    return {"loads": data}


def demo(options: argparse.Namespace) -> dict:
    """The example's classifier, beside the same work in plain Python."""
    made = example_model()
    model, photo = made / f"{CLASSIFIER}.pt", made / "chelsea.png"
    with (
        PlainLoop(model, photo, 1, DEMO_WORKERS) as threads,
        PlainLoop(model, photo, DEMO_WORKERS, 1) as processes,
        Server(WORK / "demo", options.config) as server,
    ):
        subjects = []
        for name, loop in (("2 threads", threads), ("2 processes", processes)):
            loop.run(2)
            subjects.append(Subject(f"plain Python, {name}", loop.run))
        for isolation in ("process", "thread"):
            name, archive = classifier(server.store, DEMO_WORKERS, isolation)
            server.register(archive, name)
            url = f"{server.inference}/predictions/{name}"
            measure = loaded(server, url, DEMO_WORKERS, "--body-file", photo)
            subjects.append(Subject(f"server, 2 workers, {isolation}", measure))
        run_rounds(subjects, options.rounds, options.seconds)
        title = f"Image classifier: {DEMO_WORKERS} connections, {photo.stat().st_size} byte photo"
        return table(title, subjects, "photos/s")


def start(options: argparse.Namespace) -> dict:
    """Start, registration and memory."""
    answered, idle = [], []
    for _ in range(options.starts):
        with Server(WORK / "start", options.config) as server:
            answered.append(server.answered_ms)
            # Until what happens beside the start has settled.
            time.sleep(0.3)
            idle.append(memory_mb(server.process.pid)["rss"])
    data = {"first_ping_ms": summary(answered), "idle_rss_mb": summary(idle)}
    print(f"\nStart: {options.starts} starts without models")
    for name, unit, digits in (("first_ping_ms", "ms", 1), ("idle_rss_mb", "MB", 1)):
        of = data[name]
        print(f"  {name:34}{of['median']:.{digits}f} ", end="")
        print(f"({of['min']:.{digits}f} to {of['max']:.{digits}f}) {unit}")

    print("\nModels: from the registration to ready workers, and memory of their hosts")
    for isolation, count in (("process", 1), ("process", 2), ("thread", 2)):
        with Server(WORK / "start", options.config) as server:
            name = f"noop_{isolation}"
            handler = ROOT / "tests/bench/noop.py"
            config = workers(count, isolation)
            archive = pack(server.store, name, config, "--handler", handler)
            registered(data, server, f"no-op, {count} worker(s), {isolation}", name, archive)
            name, archive = classifier(server.store, count, isolation)
            registered(data, server, f"classifier, {count} worker(s), {isolation}", name, archive)
    return data


def registered(data: dict, server: Server, shown: str, model: str, archive: str) -> None:
    """Registers a model and notes what that took, and the memory after its first requests."""
    seconds = server.register(archive, model)
    photo = example_model() / "chelsea.png"
    load(f"{server.inference}/predictions/{model}", 2, 3, "--body-file", photo)
    hosts = [memory_mb(pid) for pid in server.hosts(model)]
    memory = {kind: sum(host[kind] for host in hosts) for kind in ("rss", "pss")}
    data[shown] = {"ready_s": seconds, "hosts": len(hosts), "memory_mb": memory}
    print(f"  {shown:34}{seconds:.2f} s; {len(hosts)} host(s): ", end="")
    print(f"RSS {memory['rss']:.0f} MB, shared pages divided {memory['pss']:.0f} MB")


SECTIONS = {
    "noop": noop,
    "telemetry": telemetry,
    "queue": queue,
    "scheduler": scheduler,
    "burn": burn,
    "kill": kill,
    "slow_clients": slow_clients,
    "demo": demo,
    "start": start,
    "scaling": scaling,
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Measure the server beside its marks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2, help="of each subject in each round")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--scalings", type=int, default=2, help="of each model, of each kind")
    parser.add_argument("--connections", type=int, default=64, help="to the no-op handler")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.5 s, few starts")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run this part")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a line for the server's config.properties",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.starts, options.scalings = 2, 0.5, 3, 1
    for needed in ("torchserve", "torch-model-archiver", "ts-bench", "libts_plugin.so"):
        if not (BINARIES / needed).exists():
            sys.exit(f"{BINARIES / needed} is missing. Run `make build` first")

    WORK.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": CORES,
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "config": options.config,
    }
    print(f"{CORES} cores; load average {machine['load_before']:.2f} before the start")
    began = time.monotonic()
    results: dict[str, object] = {"machine": machine}
    for name in options.only or SECTIONS:
        results[name] = SECTIONS[name](options)
    target = WORK / "results.json"
    target.write_text(json.dumps(results, indent=1))
    print(f"\n{target} written, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
