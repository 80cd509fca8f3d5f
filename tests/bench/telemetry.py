"""What it costs to tell of requests: an access log line, ids and metrics for each.

Only the log can be switched off. Two servers that differ in nothing else take turns, and the
difference of their processor time is its cost. Ids and metrics are what the calls that the server
makes cost by themselves (`server/benches/telemetry.rs`). The sum is set beside the processor time
of a request to a model that does nothing: where the processor is the limit, as here, its share is
the share of the throughput.
"""

import argparse
import statistics

from models import WORK, echo_model, workers
from programs import Server, benchmark
from rounds import Subject, loaded, run_rounds, summary, table

BATCH = 32
LOGS = {"no access log": ["log_filter=info,ACCESS_LOG=off"], "access log": []}
TARGET_SHARE = 0.05


def telemetry(options: argparse.Namespace) -> dict:
    """Prints the costs, and their share."""
    subjects, servers = [], []
    try:
        for shown, config in LOGS.items():
            server = Server(WORK / shown.replace(" ", "_"), [*config, *options.config])
            servers.append(server)
            server.register(echo_model(server.store, "echo", workers(2, "process", BATCH)), "echo")
            url = f"{server.inference}/predictions/echo"
            subjects.append(Subject(shown, loaded(server, url, options.connections)))
        # The difference is small: more rounds than elsewhere.
        run_rounds(subjects, 3 * options.rounds, options.seconds)
    finally:
        for server in servers:
            server.__exit__()
    data = table(
        f"Echo backend, batches up to {BATCH}: {options.connections} connections",
        subjects,
        "requests/s",
    )
    quiet, logged = (subject.values("server_us") for subject in subjects)
    alone = {key: [ns / 1000 for ns in values] for key, values in benchmark("telemetry").items()}
    costs = {
        "access log": summary([b - a for a, b in zip(quiet, logged, strict=True)]),
        "ids": summary(alone["ids_ns"]),
        "metrics": summary(alone["metrics_ns"]),
    }
    models = [subject.values("models_us") for subject in subjects]
    whole = statistics.median(logged) + statistics.median(models[1])
    share = sum(cost["median"] for cost in costs.values()) / whole
    for name, cost in costs.items():
        print(f"  {name:34}{cost['median']:.2f} us ({cost['min']:.2f} to {cost['max']:.2f})")
    print(f"  {'all of it':34}{share:.1%} of {whole:.1f} us; the target is {TARGET_SHARE:.0%}")
    return {"subjects": data, "costs_us": costs, "request_us": whole, "share": share}
