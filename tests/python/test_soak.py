"""An hour of mixed traffic in which nothing may grow.

`SOAK_SECONDS` is how long it is measured: 40 unless set; `make soak` takes an hour, `make
soak-short` five minutes. Before that comes a warm-up, after which caches are full and allocators
have what they will need. `SOAK_SEED` repeats a sequence. What was measured is printed as a table
and written to `target/soak/results.json`.
"""

import json
import os
import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from days import CALM, CONFIG, HIT, OBEYS, PATIENCE, Day, Faults, table, watch
from growth import Verdict, judge
from harness import (
    TARGET,
    Server,
    archive,
    descriptors,
    processes_of,
    threads,
    wait_until,
    write_files,
    write_model,
)

SECONDS = float(os.environ.get("SOAK_SECONDS") or 40)
WARM_UP = max(15.0, min(SECONDS / 4, 120.0))
SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 32))
INTERVAL = min(1.0, SECONDS / 200)

MIB = 1 << 20
# What may be added to each kind of number however long it takes.
FLOORS = {"memory": 1.0, "descriptors": 2.0, "threads": 2.0, "processes": 2.0, "files": 2.0}
# The server's memory goes up in steps to what the worst moments took, since the allocator keeps
# that: until an hour has had them all, such a step is no leak.
SETTLED_AFTER = 1800
STEPS = 6.0
# Bodies of 256 KiB that are sent each second beside everything else.
LARGE_RATE = 40

STREAM = """
import time

from ts.handler_utils.utils import CallersLeftError
from ts.protocol.otf_message_handler import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    try:
        for part in range(20):
            texts = [b"part " * 200] * len(data)
            send_intermediate_predict_response(texts, context.request_ids, "ok", 200, context)
            time.sleep(0.005)
    except CallersLeftError:
        pass
    return [b"end"] * len(data)
"""

LEAKS = """
kept = []


def handle(data, context):
    if data is None:
        return None
    kept.extend(bytes(20_000) for _ in data)
    return [b"ok"] * len(data)
"""


class Samples:
    """What is measured of a server and of the hosts whose workers nothing happens to."""

    def __init__(self, server: Server, steady: list[str]) -> None:
        self.server = server
        self.hosts = {name: server.worker_pids(name) for name in steady}
        self.series: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._run, name="sampler")

    def __enter__(self) -> "Samples":
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._sampler.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            self.take()
            due = max(due + INTERVAL, time.monotonic())

    def take(self) -> None:
        self._of_process("server", self.server.pid)
        for name, pids in self.hosts.items():
            for number, pid in enumerate(pids):
                self._of_process(f"host {number} of {name}", pid)
        for pid in self.server.zygotes():
            self._of_process("zygote", pid)
        self.series["server", "processes"].append(len(processes_of(self.server)))
        files = sum(len(names) for _, _, names in os.walk(self.server.folder))
        self.series["server", "files"].append(files)

    def _of_process(self, who: str, pid: int) -> None:
        self.series[who, "memory"].append(private(pid) / MIB)
        self.series[who, "descriptors"].append(descriptors(pid))
        self.series[who, "threads"].append(threads(pid))

    def verdicts(self) -> dict[tuple[str, str], Verdict]:
        return {key: judge(values, floor(*key)) for key, values in self.series.items()}


def floor(who: str, what: str) -> float:
    settles = (who, what) == ("server", "memory") and SECONDS < SETTLED_AFTER
    return STEPS if settles else FLOORS[what]


def private(pid: int) -> int:
    """Bytes that a process shares with no other: what is shared moves when others come and go."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


class Hours(Faults):
    """What happens in an hour besides faults."""

    def streams(self) -> None:
        """Clients that read a reply in parts to its end, or leave in its midst."""
        whole = self.chance.random() < 0.5

        def streams() -> None:
            url = f"{self.server.inference}/predictions/stream"
            with requests.post(url, b"x", stream=True, timeout=PATIENCE) as answer:
                self.day.note("stream", str(answer.status_code))
                if answer.status_code != 200:
                    self.day.accuse(f"stream: {answer.status_code} {answer.text}")
                elif whole and not answer.content.endswith(b"end"):
                    self.day.accuse(f"stream: its end is {answer.content[-60:]!r}")
                elif not whole:
                    next(answer.iter_content(100))

        self._behind(streams)

    def forms(self) -> None:
        """Bodies of other types, compressed ones too; the handler echoes the field `body`."""
        body = self.day.body(padding=500)
        url = f"{self.server.inference}/predictions/calm"
        for options in (
            {"files": {"body": ("name", body, "image/png")}},
            {"data": {"body": body}},
            {"data": body, "headers": {"content-type": "text/plain", "accept-encoding": "zstd"}},
            {"data": body, "headers": {"accept": "text/event-stream"}},
            {"params": {"body": body.decode()}},
        ):
            answer = self.session.post(url, timeout=PATIENCE, **options)
            self.day.note("forms", str(answer.status_code))

    def impatient(self) -> None:
        """A limit that is over before the answer."""
        headers = {"x-request-timeout-ms": "20", "content-type": "application/octet-stream"}
        url = f"{self.server.inference}/predictions/alone"
        answer = self.session.post(url, self.day.body("doze"), headers=headers, timeout=PATIENCE)
        self.day.note("impatient", str(answer.status_code))

    def named(self) -> None:
        """Requests that their clients name, each another name."""
        url = f"{self.server.inference}/predictions/calm"
        for _ in range(20):
            headers = {"x-request-id": f"soak-{self.chance.getrandbits(64)}"}
            headers["content-type"] = "application/octet-stream"
            answer = self.session.post(url, self.day.body(), headers=headers, timeout=PATIENCE)
            if answer.headers.get("x-request-id") != headers["x-request-id"]:
                self.day.accuse(f"its id is {answer.headers.get('x-request-id')}")

    def unknown(self) -> None:
        """Errors of callers, with names that never come again."""
        name = f"absent-{self.chance.getrandbits(64)}"
        for method, url, allowed in (
            ("POST", f"{self.server.inference}/predictions/{name}", {404}),
            ("GET", f"{self.server.inference}/{name}", {404}),
            ("GET", f"{self.server.management}/models/{name}", {404}),
            ("POST", f"{self.server.management}/models?url={name}.mar", {400, 404}),
            ("GET", f"{self.server.metrics_api}/metrics?name[]={name}", {200}),
            ("GET", f"{self.server.management}/openapi.json", {200}),
        ):
            answer = self.session.request(method, url, timeout=PATIENCE)
            self.day.note("unknown", str(answer.status_code))
            if answer.status_code not in allowed:
                self.day.accuse(f"{method} {url}: {answer.status_code} {answer.text[:200]}")

    def swap(self) -> None:
        """A second version takes the place of the first, of a model with another name each time."""

        def swap() -> None:
            name = f"swap-{number}"
            for url in ("first.mar", "second.mar"):
                known = {"url": url, "initial_workers": 1, "model_name": name}
                self._manage("POST", "/models", {200}, **known)
            self._manage("PUT", f"/models/{name}/2.0/set-default", {200})
            self._manage("DELETE", f"/models/{name}/1.0", {200})
            with requests.Session() as session:
                session.trust_env = False
                self.day.ask(session, name)
            self._manage("DELETE", f"/models/{name}", {200})

        number = self.chance.getrandbits(64)
        self._behind(swap)


def renewals(server: Server, day: Day) -> Callable[[requests.Session], None]:
    """Renews the token of a server that wants one, and uses it; old ones are refused."""
    file = server.folder / "key_file.json"

    def renew(session: requests.Session) -> None:
        keys = json.loads(file.read_text())
        bearer = {"Authorization": f"Bearer {keys['API']['key']}"}
        url = f"{server.management}/token?type=inference"
        statuses = [session.get(url, headers=bearer, timeout=PATIENCE).status_code]
        keys = {"old": keys, "new": json.loads(file.read_text())}
        for age in ("old", "new"):
            bearer = {"Authorization": f"Bearer {keys[age]['inference']['key']}"}
            url = f"{server.inference}/predictions/echo"
            statuses.append(session.post(url, b"x", headers=bearer, timeout=PATIENCE).status_code)
        day.note("tokens", str(statuses))
        if statuses != [200, 400, 200]:
            day.accuse(f"a token was renewed, an old and a new one used: {statuses}")

    return renew


def large_bodies(server: Server, folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Sends bodies of 256 KiB at a steady rate, in a process of its own."""
    body = folder / "large"
    body.write_bytes(bytes(256 << 10))
    command = [TARGET / "ts-bench", "load", "--url", f"{server.inference}/predictions/large"]
    command += ["--body-file", body, "--connections", "4", "--rate", str(LARGE_RATE), "--json"]
    command += ["--seconds", str(seconds), "--warm-up", "1"]
    return subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def report(day: Day, verdicts: dict[tuple[str, str], Verdict]) -> str:
    """What was measured, one line a number."""
    head = f"{'':32}{'first':>9}{'last':>9}{'rise':>9}{'noise':>9}{'allowed':>9}"
    lines = [table(day), head]
    for (who, what), verdict in verdicts.items():
        of = (verdict.first, verdict.last, verdict.rise, verdict.noise, verdict.allowed)
        numbers = "".join(f"{value:>9.2f}" for value in of)
        lines.append(f"{f'{what} of {who}':<32}{numbers}{'' if verdict.is_flat else '  GROWS'}")
    return "\n".join(lines)


def write_results(samples: Samples, verdicts: dict[tuple[str, str], Verdict]) -> Path:
    folder = TARGET.parent / "soak"
    folder.mkdir(exist_ok=True)
    file = folder / "results.json"
    told = {
        "seconds": SECONDS,
        "warmUpSeconds": WARM_UP,
        "intervalSeconds": INTERVAL,
        "seed": SEED,
        "numbers": [
            {
                "of": who,
                "what": what,
                "flat": verdict.is_flat,
                **vars(verdict),
                "values": samples.series[who, what],
            }
            for (who, what), verdict in verdicts.items()
        ],
    }
    file.write_text(json.dumps(told))
    return file


def prepare(server: Server, folder: Path) -> None:
    """The models of the hour."""
    server.serve("calm", OBEYS, config=CALM)
    server.serve("stream", STREAM)
    server.serve_echo("large", CALM)
    for model, yaml in HIT.items():
        if model == "echo":
            server.serve_echo(model, yaml)
        else:
            server.serve(model, OBEYS, config=yaml)
    write_model(server.store, "side", OBEYS)
    write_model(server.store, "bad", "raise ValueError('no model')\n")
    write_files(folder, {"handler.py": OBEYS, "config.yaml": CONFIG})
    for name, version in (("first", "1.0"), ("second", "2.0")):
        flags = ("--model-name", name, "--version", version, "--handler", folder / "handler.py")
        archive(server.store, *flags, "--config-file", folder / "config.yaml")


def guarded(start, tmp_path: Path) -> Server:
    """A server that wants tokens."""
    server = start.make(["log_filter=warn"], folder=tmp_path / "guarded", args=["--models", "echo"])
    server.switches.remove("--disable-token-auth")
    write_model(server.store, "echo", {}, runtime="echo")
    return server.start()


@pytest.mark.seconds(WARM_UP + SECONDS + 420)
def test_nothing_grows_in_hours_of_traffic(start, tmp_path, capsys):
    with capsys.disabled():
        print(f"\nsoak for {SECONDS:g} s; SOAK_SEED={SEED} repeats it", flush=True)
    config = ["max_response_size=2000000", "max_request_size=2000000", "log_filter=warn"]
    server = start.make([*config, "unregister_model_timeout=20"], folder=tmp_path / "soak")
    # Changes of models are saved.
    server.switches.remove("--ncs")
    prepare(server.start(), tmp_path)
    wants_tokens = guarded(start, tmp_path)

    day, chance = Day(server), random.Random(SEED)
    hours, sizes = Hours(day, chance), random.Random(SEED + 1)
    samples = Samples(server, ["calm", "stream", "large"])
    large = large_bodies(server, tmp_path, WARM_UP + SECONDS)
    for model in HIT:
        call = lambda session, m=model: day.ask(  # noqa: E731
            session, m, padding=sizes.choice([0, 1000, 100_000, 500_000])
        )
        day.client(f"client of {model}", call, 0.05)
    day.client("client of calm", lambda session: day.ask(session, "calm", also=set()), 0.05)
    day.client("probes", watch(day), 0.3)
    day.client("tokens", renewals(wants_tokens, day), 0.3)

    def go_on(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not day.wrong:
            hours.hit()
            assert server.process.poll() is None, "the server ended"
            day.over.wait(chance.uniform(0.05, 0.4))

    try:
        go_on(WARM_UP)
        with samples:
            go_on(SECONDS)
    finally:
        day.end()
        hours.finish()
        told, errors = large.communicate(timeout=PATIENCE)
    assert day.wrong == [], f"SOAK_SEED={SEED}\n{table(day)}"
    assert large.returncode == 0 and json.loads(told)["failures"] == 0, errors or told
    verdicts = samples.verdicts()
    shown, file = report(day, verdicts), write_results(samples, verdicts)
    with capsys.disabled():
        print(f"{shown}\n{file}", flush=True)
    grown = [f"{what} of {who}" for (who, what), one in verdicts.items() if not one.is_flat]
    assert grown == [], f"SOAK_SEED={SEED}"
    server.stop()
    assert processes_of(server) == set()


def test_a_handler_that_keeps_what_it_gets_is_found_out(start):
    server = start()
    server.serve("leaks", LEAKS)
    server.serve("calm", OBEYS)
    day = Day(server)
    samples = Samples(server, ["leaks", "calm"])

    def leak(session: requests.Session) -> None:
        session.post(f"{server.inference}/predictions/leaks", b"x", timeout=PATIENCE)

    day.client("client of leaks", leak, 0.005)
    day.client("client of calm", lambda session: day.ask(session, "calm"), 0.005)
    try:
        with samples:
            wait_until(
                "there is enough to judge",
                lambda: (
                    len(samples.series) > 0
                    and all(len(values) >= 40 for values in samples.series.values())
                ),
            )
    finally:
        day.end()
    verdicts = samples.verdicts()
    assert not verdicts["host 0 of leaks", "memory"].is_flat, verdicts
    assert verdicts["host 0 of calm", "memory"].is_flat, verdicts
    assert verdicts["server", "descriptors"].is_flat, verdicts
