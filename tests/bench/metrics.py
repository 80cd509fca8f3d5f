"""What metrics cost: processor time of a request by mode, and the time of the page of many models.

    python tests/bench/metrics.py [--rounds 5] [--seconds 2] [--models 100]

The model runs on the echo backend, so the server's own time is what is measured.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from programs import Server, answer, load
from rounds import Subject, run_rounds, table

CONNECTIONS = 16

# No page of this many models may take longer under load.
PAGE_LIMIT_MS = 20


def write_echo_model(server: Server, name: str) -> None:
    """Puts a model for the echo backend into the store."""
    folder = server.store / name
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": name, "modelVersion": "1.0", "handler": "h.py"}
    manifest = {"runtime": "echo", "model": model}
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "h.py").write_text("")


def echoing(folder: Path, config: list[str], models: int = 1) -> Server:
    """A server with so many echo models, `m0` and so on."""
    server = Server(folder, config)
    for number in range(models):
        write_echo_model(server, f"m{number}")
        path = f"/models?url=m{number}&initial_workers=1&synchronous=true"
        answer(server.management + path, method="POST")
    return server


def per_request(server: Server, seconds: float) -> dict:
    """Requests a second, and what one costs the server itself."""
    before, _ = server.cpu_seconds()
    report = load(f"{server.inference}/predictions/m0", CONNECTIONS, seconds)
    used = server.cpu_seconds()[0] - before
    return {"per_second": report["per_second"], "server_us": used / report["requests"] * 1e6}


def modes(folder: Path, rounds: int, seconds: float) -> None:
    """Compares the modes of metrics, with and without what is logged of them."""
    unread = "info,ACCESS_LOG=off,TS_METRICS=off,MODEL_METRICS=off"
    with ExitStack() as stack:
        subjects = []
        for name, config in (
            ("prometheus, nothing logged", ["metrics_mode=prometheus", f"log_filter={unread}"]),
            ("log, not read", [f"log_filter={unread}"]),
            ("log", ["log_filter=info,ACCESS_LOG=off"]),
            ("log and Triton's names", ["log_filter=info,ACCESS_LOG=off", "triton_metrics=true"]),
            ("log and access log", []),
        ):
            server = stack.enter_context(echoing(folder / name.replace(" ", "-"), config))
            measure = lambda seconds, server=server: per_request(server, seconds)  # noqa: E731
            subjects.append(Subject(name, measure))
        run_rounds(subjects, rounds, seconds)
        table("Requests through the echo backend", subjects, "per second")


def page(folder: Path, models: int, seconds: float) -> None:
    """Times the page while one model of many is under load."""
    with echoing(folder / "page", ["metrics_mode=prometheus"], models) as server:
        metrics = next(
            line.partition("=")[2]
            for line in (folder / "page/config.properties").read_text().splitlines()
            if line.startswith("metrics_address=")
        )
        url = f"{server.inference}/predictions/m0"
        loading = threading.Thread(target=load, args=(url, CONNECTIONS, seconds))
        loading.start()
        taken = []
        while loading.is_alive():
            began = time.perf_counter()
            text = answer(f"{metrics}/metrics")
            taken.append((time.perf_counter() - began) * 1000)
            time.sleep(0.05)
        loading.join()
    median = statistics.median(taken)
    size = f"{len(text.splitlines())} lines, {len(text)} bytes"
    print(f"\nThe page of {models} models under load, {size}:")
    print(f"median {median:.1f} ms, longest {max(taken):.1f} ms of {len(taken)}")
    if median > PAGE_LIMIT_MS:
        raise SystemExit(f"the page takes {median:.1f} ms, more than {PAGE_LIMIT_MS} ms")


def main() -> None:
    """Measures both."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--models", type=int, default=100)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page(Path(folder), chosen.models, chosen.seconds * 2)
        modes(Path(folder), chosen.rounds, chosen.seconds)


if __name__ == "__main__":
    main()
