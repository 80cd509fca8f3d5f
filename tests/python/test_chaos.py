"""Bad days: a server under steady load while a seeded sequence of faults hits its models.

`CHAOS_SECONDS` is how long (120 unless set; `make chaos` takes 600), `CHAOS_SEED` repeats a
sequence.
"""

import os
import random
import time
from typing import Any

import pytest
import requests
from days import CALM, HIT, OBEYS, Day, Faults, table, watch, workers_of
from harness import (
    at_once,
    descriptors,
    is_running,
    processes_of,
    resident,
    threads,
    wait_until,
    write_model,
)

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 120)
SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))

# Megabytes and counts by which the server may have grown; most is what allocators keep.
MORE_MEMORY = 48 << 20
MORE_DESCRIPTORS = 8
MORE_THREADS = 4


def repair(day: Day, stopped: list[int]) -> None:
    """Gives each model the workers that it had, in the place of those that stand still."""
    server = day.server

    def found_out() -> bool:
        # Only a call shows that a worker stands still.
        with requests.Session() as session:
            session.trust_env = False
            at_once([lambda m=model: day.ask(session, m) for model in HIT for _ in range(4)])
        return not any(map(is_running, stopped))

    wait_until("workers that stood still have ended", found_out)
    for model in HIT:
        workers = workers_of(model)
        how = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
        answer = server.manage("PUT", f"/models/{model}", params=how)
        # Those that are in their back-off come up later.
        assert answer.status_code in {200, 206, 500, 507}, answer.text
    server.manage("DELETE", "/models/side")
    for model in (*HIT, "calm"):
        server.wait_for_workers(model)


def ordinary_calls(day: Day) -> None:
    """Every model answers every call, and keeps its workers."""

    def generations() -> dict[str, list[tuple[Any, ...]]]:
        return {
            model: [
                (worker["pid"], worker["generation"])
                for worker in day.server.describe(model)["workers"]
            ]
            for model in (*HIT, "calm")
        }

    before = generations()
    with requests.Session() as session:
        session.trust_env = False
        for model in (*HIT, "calm"):
            for padding in (0, 100_000):
                call = lambda m=model, p=padding: day.ask(session, m, "echo", p, also=set())  # noqa: E731
                at_once([call] * 20, callers=10)
    assert day.wrong == []
    assert generations() == before, "workers are not restarted without a cause"


@pytest.mark.seconds(SECONDS + 420)
def test_a_bad_day_ends_well(start, capsys):
    with capsys.disabled():
        print(f"\nchaos for {SECONDS:g} s; CHAOS_SEED={SEED} repeats it", flush=True)
    config = [
        "max_response_size=2000000",
        "max_request_size=2000000",
        "log_filter=warn,MODEL_LOG=off",
    ]
    server = start([*config, "unregister_model_timeout=20"])
    server.serve("calm", OBEYS, config=CALM)
    for model, yaml in HIT.items():
        if model == "echo":
            server.serve_echo(model, yaml)
        else:
            server.serve(model, OBEYS, config=yaml)
    write_model(server.store, "side", OBEYS)
    write_model(server.store, "bad", "raise ValueError('no model')\n")

    day, chance = Day(server), random.Random(SEED)
    ordinary_calls(day)
    server.session.close()
    before = {"threads": threads(server.pid), "descriptors": descriptors(server.pid)}
    memory = resident(server.pid)

    faults = Faults(day, chance)
    sizes = random.Random(SEED + 1)
    for model in HIT:
        for number in range(2):
            call = lambda session, m=model: day.ask(  # noqa: E731
                session, m, padding=sizes.choice([0, 1000, 100_000])
            )
            day.client(f"client {number} of {model}", call, 0.05)
    day.client("client of calm", lambda session: day.ask(session, "calm", also=set()), 0.05)
    day.client("probes", watch(day), 0.3)
    ends = time.monotonic() + SECONDS
    try:
        while time.monotonic() < ends and not day.wrong:
            faults.hit()
            assert server.process.poll() is None, "the server ended"
            day.over.wait(chance.uniform(0.05, 0.8))
    finally:
        day.end()
        faults.finish()
        report = table(day)
        with capsys.disabled():
            print(report, flush=True)
    assert day.wrong == [], f"CHAOS_SEED={SEED}\n{report}"
    for model in HIT:
        assert day.heard[model, "200"], f"CHAOS_SEED={SEED}: {model} never answered\n{report}"

    repair(day, faults.stopped)
    ordinary_calls(day)
    for model in (*HIT, "calm"):
        assert server.describe(model)["jobQueueStatus"]["pendingRequests"] == 0
    hosts = {pid for model in (*HIT, "calm") for pid in server.worker_pids(model)}
    # A process for each worker, but one for all of `shared` and, as is its default, of `echo`.
    assert len(hosts) == 2 + 2 + 1 + 1 + 1
    # The hosts and at most one helper of the server; neither zombies nor strays of its handlers.
    wait_until(
        "only the hosts are left",
        lambda: hosts <= (left := processes_of(server)) and len(left - hosts - {server.pid}) <= 1,
    )
    assert sorted(server.models()) == sorted([*HIT, "calm"])
    assert len(server.work_folders()) == 0, "models that are folders are not unpacked"
    server.session.close()
    wait_until(
        f"threads are again {before['threads']}",
        lambda: threads(server.pid) <= before["threads"] + MORE_THREADS,
    )
    wait_until(
        f"descriptors are again {before['descriptors']}",
        lambda: descriptors(server.pid) <= before["descriptors"] + MORE_DESCRIPTORS,
    )
    grown = resident(server.pid) - memory
    assert grown < MORE_MEMORY, f"CHAOS_SEED={SEED}: the server has grown by {grown >> 20} MiB"
    server.stop()
    assert processes_of(server) == set()
    with capsys.disabled():
        print(f"memory of the server: {memory >> 20} MiB, then {grown >> 10} KiB more")
