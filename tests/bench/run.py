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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from programs import (
    BINARIES,
    CORES,
    EXAMPLE,
    PYTHON,
    ROOT,
    Echo,
    PlainLoop,
    Program,
    Server,
    environment,
    load,
    memory_mb,
)

WORK = BINARIES.parent / "bench"
NOOP_CONNECTIONS = 16
NOOP_BODY_BYTES = 100
DEMO_WORKERS = 2
CLASSIFIER = "efficientnet_lite0"


@dataclass
class Subject:
    """What is measured once in each round."""

    name: str
    measure: Callable[[float], dict]
    rounds: list[dict] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """One number of all rounds."""
        return [measured[key] for measured in self.rounds]


def run_rounds(subjects: list[Subject], rounds: int, seconds: float) -> None:
    """Every second round backwards, so that no subject always follows the same other."""
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            subject.rounds.append(subject.measure(seconds))


def summary(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(title: str, subjects: list[Subject], unit: str) -> dict:
    """Prints the subjects, each beside the first, and returns the same as data."""
    mark = subjects[0]
    print(f"\n{title}")
    print(f"  {'':34}{unit + ' (min to max)':>30}{'of first (min to max)':>26}", end="")
    print(f"{'p50 ms':>9}{'p99 ms':>9}{'CPU us: server':>16}{'models':>9}")
    data = {}
    for subject in subjects:
        speed = summary(subject.values("per_second"))
        pairs = zip(subject.values("per_second"), mark.values("per_second"), strict=True)
        ratio = summary([own / other for own, other in pairs])
        data[subject.name] = {"per_second": speed, "ratio": ratio, "rounds": subject.rounds}
        spread = f"{speed['median']:.1f} ({speed['min']:.0f} to {speed['max']:.0f})"
        share = f"{ratio['median']:.1%} ({ratio['min']:.0%} to {ratio['max']:.0%})"
        print(f"  {subject.name:34}{spread:>30}{share:>26}", end="")
        for key, width, digits in (
            ("p50_ms", 9, 2),
            ("p99_ms", 9, 2),
            ("server_us", 16, 1),
            ("models_us", 9, 1),
        ):
            known = all(key in measured for measured in subject.rounds)
            text = f"{statistics.median(subject.values(key)):.{digits}f}" if known else "-"
            print(f"{text:>{width}}", end="")
        failures = sum(measured.get("failures", 0) for measured in subject.rounds)
        print(f"  {failures} failures" if failures else "")
    return data


def loaded(program: Program, url: str, connections: int, *more: object) -> Callable:
    """A measurement: requests per second, latency, and processor time of each request."""

    def measure(seconds: float) -> dict:
        before = program.cpu_seconds()
        counted = load(url, connections, seconds, *more)
        used = [now - then for now, then in zip(program.cpu_seconds(), before, strict=True)]
        counted["server_us"], counted["models_us"] = (
            time / counted["replies"] * 1e6 for time in used
        )
        return counted

    return measure


def pack(store: Path, name: str, config: dict[str, object], *what: object) -> str:
    """Packs a model with this configuration; returns the archive's name."""
    yaml = store.parent / f"{name}.yaml"
    yaml.write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    command = [BINARIES / "torch-model-archiver", "--model-name", name, "--version", "1.0"]
    command += ["--config-file", yaml, "--export-path", store, *what]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    return f"{name}.mar"


def workers(count: int, isolation: str, batch_size: int = 1) -> dict[str, object]:
    """A model's configuration. A batch takes what waits: no delay."""
    return {
        "minWorkers": count,
        "maxWorkers": count,
        "batchSize": batch_size,
        "maxBatchDelay": 0,
        "workerIsolation": isolation,
    }


def echo_model(store: Path, name: str, config: dict[str, object]) -> str:
    """A model of the echo backend, which no archiver packs, as a folder."""
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "model-config.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in config.items())
    )
    model = {"modelName": name, "modelVersion": "1.0", "configFile": "model-config.yaml"}
    manifest = {"runtime": "echo", "model": model}
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    return name


def noop(options: argparse.Namespace) -> dict:
    """A handler that does nothing, beside a bare echo server."""
    with Echo() as echo, Server(WORK / "noop", options.config) as server:
        body = ("--body-bytes", NOOP_BODY_BYTES)
        subjects = [Subject("bare echo", loaded(echo, echo.url, NOOP_CONNECTIONS, *body))]

        def add(shown: str, model: str, archive: str) -> None:
            server.register(archive, model)
            url = f"{server.inference}/predictions/{model}"
            subjects.append(Subject(shown, loaded(server, url, NOOP_CONNECTIONS, *body)))

        for batch in (1, 16):
            model = f"echo_b{batch}"
            archive = echo_model(server.store, model, workers(2, "process", batch))
            add(f"echo backend, 2 workers, batch {batch}", model, archive)
        for isolation in ("process", "thread"):
            for count in (1, 2):
                for batch in (1, 16):
                    model = f"noop_{isolation}_w{count}_b{batch}"
                    config = workers(count, isolation, batch)
                    handler = ROOT / "tests/bench/noop.py"
                    archive = pack(server.store, model, config, "--handler", handler)
                    add(f"{isolation}, {count} worker(s), batch {batch}", model, archive)
        run_rounds(subjects, options.rounds, options.seconds)
        title = f"No-op handler: {NOOP_CONNECTIONS} connections, bodies of {NOOP_BODY_BYTES} bytes"
        return table(title, subjects, "requests/s")


def example_model() -> Path:
    """The folder with the example's network, names and photos, made once."""
    folder = WORK / "example"
    if not (folder / "coffee.png").exists():
        subprocess.run([PYTHON, EXAMPLE / "make_model.py", folder], check=True, env=environment())
    return folder


def classifier(store: Path, count: int, isolation: str) -> tuple[str, str]:
    """Packs the example; returns the model's name and the archive's."""
    made = example_model()
    name = f"{CLASSIFIER}_{isolation}"
    archive = pack(
        store,
        name,
        workers(count, isolation),
        *("--serialized-file", made / f"{CLASSIFIER}.pt", "--handler", EXAMPLE / "handler.py"),
        *("--extra-files", made / "index_to_name.json"),
    )
    return name, archive


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


SECTIONS = {"noop": noop, "demo": demo, "start": start}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Measure the server beside its marks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of each subject in each round")
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 s, 3 starts")
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
        options.rounds, options.seconds, options.starts = 2, 1, 3
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
