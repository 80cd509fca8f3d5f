"""What the wait for company brings: `batchGather: auto` beside fixed delays.

On the echo backend, whose batches take exactly what they are told to; the queue of each model is
warmed up, so that it knows the cost from its first request on.
"""

import argparse
import statistics
from dataclasses import dataclass

from models import WORK, echo_model
from programs import Server
from rounds import Subject, latencies, loaded, run_rounds, table

# Cap of a wait under `auto`, in milliseconds; as of TorchServe where nothing else is said.
CAP_MS = 100


@dataclass
class Shape:
    """A kind of model: what a batch costs, and as many clients as one may hold."""

    name: str
    batch_micros: int
    item_micros: int
    batch_size: int
    delays_ms: tuple[int, ...]

    def add(self, server: Server, gather: str, delay_ms: int, beside: str = "") -> str:
        """Registers a model of this shape; returns its name."""
        name = f"{self.name}_{gather}_{delay_ms}{beside}"
        config = {
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": self.batch_size,
            "maxBatchDelay": delay_ms,
            "batchGather": gather,
            "warmup": [{"file": "model-config.yaml"}],
            "echo": {"batchMicros": self.batch_micros, "itemMicros": self.item_micros},
        }
        server.register(echo_model(server.store, name, config), name)
        return name


SHAPES = (
    Shape("overhead", 5000, 300, 16, (0, 1, 2, 5, 10)),
    Shape("compute", 500, 4000, 8, (0,)),
)
LONE_CAPS_MS = (0, 5, 100)


def scheduler(options: argparse.Namespace) -> dict:
    """Throughput with as many clients as a batch holds, and the latency of a lone one."""
    with Server(WORK / "scheduler", options.config) as server:
        data = {shape.name: together(options, server, shape) for shape in SHAPES}
        return data | {"lone": alone(options, server, SHAPES[0])}


def together(options: argparse.Namespace, server: Server, shape: Shape) -> dict:
    """`auto` beside each fixed delay; the mark is the best of them."""
    models = {f"fixed, {delay} ms": shape.add(server, "fixed", delay) for delay in shape.delays_ms}
    auto = f"auto, at most {CAP_MS} ms"
    models[auto] = shape.add(server, "auto", CAP_MS)
    subjects = [
        Subject(shown, loaded(server, predictions(server, model), shape.batch_size))
        for shown, model in models.items()
    ]
    run_rounds(subjects, options.rounds, options.seconds)
    *fixed, _ = subjects
    best = max(fixed, key=lambda subject: statistics.median(subject.values("per_second")))
    title = (
        f"Batches of {shape.batch_micros} µs and {shape.item_micros} µs for each item, "
        f"at most {shape.batch_size}: as many clients in a closed loop"
    )
    data = table(title, subjects, "requests/s", mark=best)
    for shown, model in models.items():
        data[shown]["batching"] = explained(server, shown, model)
    return data


def alone(options: argparse.Namespace, server: Server, shape: Shape) -> dict:
    """The latency of a client without company, which no cap of the wait should change."""
    cost_ms = (shape.batch_micros + shape.item_micros) / 1000
    subjects = []
    for cap in LONE_CAPS_MS:
        model = shape.add(server, "auto", cap, "_lone")
        subjects.append(
            Subject(f"auto, at most {cap} ms", loaded(server, predictions(server, model), 1))
        )
    run_rounds(subjects, options.rounds, options.seconds)
    return latencies(f"The same with one client: a batch costs {cost_ms} ms", subjects)


def predictions(server: Server, model: str) -> str:
    """Where the model's requests go."""
    return f"{server.inference}/predictions/{model}"


def explained(server: Server, shown: str, model: str) -> dict:
    """Prints what the queue did and believes."""
    told = server.batching(model)
    cost = told["cost"] or {"perBatchMicros": 0, "perItemMicros": 0}
    held_ms = told["heldMicros"] / max(told["holds"], 1) / 1000
    reasons = sorted(told["cutBecause"].items(), key=lambda item: -item[1])
    cuts = ", ".join(f"{why} {count / told['batches']:.0%}" for why, count in reasons if count)
    print(f"  {shown:34}mean batch {told['meanBatch']:.1f}; fitted: ", end="")
    print(f"{cost['perBatchMicros']:.0f} + {cost['perItemMicros']:.0f} n µs; ", end="")
    print(f"{told['holds']} waits of {held_ms:.2f} ms; cut because: {cuts}")
    return told
