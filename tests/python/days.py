"""Bad days: models that do as their requests say, clients that judge every answer, and a seeded
sequence of faults."""

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import requests
from harness import Server, at_once

# A request says what its handler is to do: `nonce verb padding`. The answer is the request.
OBEYS = """
import ctypes, os, subprocess, sys, time


class Obeys:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        bodies = [bytes(row["body"]) for row in data]
        for index, body in enumerate(bodies):
            verb = body.split(b" ", 2)[1].decode()
            if verb == "teapot":
                context.set_response_status(418, "Teapot", index)
            elif verb == "large":
                bodies[index] = body + bytes(4 << 20)
            elif verb == "fewer":
                return bodies[1:]
            elif verb != "echo":
                getattr(self, verb)()
        return bodies

    def doze(self):
        time.sleep(0.3)

    def hang(self):
        time.sleep(600)

    def freeze(self):
        # Keeps the interpreter's lock, so that no other thread of the process runs Python.
        ctypes.PyDLL(None).sleep(600)

    def fail(self):
        raise ValueError("asked to fail")

    def starve(self):
        raise MemoryError("asked to starve")

    def leave(self):
        sys.exit(1)

    def exit(self):
        os._exit(3)

    def crash(self):
        ctypes.string_at(0)

    def litter(self):
        subprocess.Popen(["sleep", "600"])

    def chatter(self):
        print("chatter " * 20000)
"""

# Whose workers are hit. `calm` is not: it has to answer as if nothing happened.
CONFIG = "responseTimeout: 2\nstartupTimeout: 30\njobQueueSize: 24\n"
HIT = {
    "alone": CONFIG + "minWorkers: 2\nmaxWorkers: 2\n",
    "batched": CONFIG + "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 8\nmaxBatchDelay: 20\n",
    "shared": CONFIG
    + "minWorkers: 3\nmaxWorkers: 3\nbatchSize: 8\nmaxBatchDelay: 5\nworkerIsolation: thread\n",
    "echo": CONFIG + "minWorkers: 2\nmaxWorkers: 2\n",
}
CALM = "minWorkers: 1\nmaxWorkers: 1\n"

# What a caller may hear besides its own answer when others do harm: a worker that died (500, or 507
# where the kernel may have killed it), a failed batch or a refusal (503).
HARM = {500, 503, 507}
# Verb → what it is answered with when no harm is done, if it is answered at all.
VERBS = {
    "echo": 200,
    "doze": 200,
    "litter": 200,
    "chatter": 200,
    "teapot": 418,
    "large": 507,
    "fewer": 503,
    "fail": 503,
    "leave": 503,
    "starve": 507,
    "hang": 500,
    "freeze": 500,
    "exit": 500,
    "crash": 500,
}
# The echo backend's words for them.
ECHO_FAULTS = {
    "teapot": "status=418",
    "fail": "raise",
    "starve": "out-of-memory",
    "hang": "hang",
    "exit": "panic",
    "crash": "abort",
}

# How long anything may take that is not to be measured but to end.
PATIENCE = 60.0


def workers_of(model: str) -> int:
    """How many workers a model has that nothing happens to."""
    return int(HIT[model].partition("minWorkers: ")[2][0])


class Day:
    """What is sent and what comes back; the first thing that is not allowed ends the day."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.over = threading.Event()
        self.wrong: list[str] = []
        self.heard: Counter[tuple[str, str]] = Counter()
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._nonces = itertools.count()
        self._clients: list[threading.Thread] = []

    def note(self, who: str, what: str) -> None:
        with self._lock:
            self.heard[who, what] += 1

    def accuse(self, text: str) -> None:
        self.wrong.append(text)

    def body(self, verb: str = "echo", padding: int = 0) -> bytes:
        """A request that no other is equal to; from 64 KiB on bodies travel another way."""
        return b"%d %s %s" % (next(self._nonces), verb.encode(), b"." * padding)

    def ask(
        self,
        session: requests.Session,
        model: str,
        verb: str = "echo",
        padding: int = 0,
        also: set[int] | None = None,
    ) -> None:
        """Sends one request and judges its answer."""
        body = self.body(verb, padding)
        headers = {"content-type": "application/octet-stream"}
        if model == "echo" and verb != "echo":
            headers["x-echo-fault"] = ECHO_FAULTS[verb]
        url = f"{self.server.inference}/predictions/{model}"
        try:
            answer = session.post(url, data=body, headers=headers, timeout=PATIENCE)
        except requests.RequestException as error:
            self.accuse(f"{model} {verb}: no answer: {error!r}")
            return
        expected = VERBS[verb]
        allowed = {expected} | (HARM if also is None else also)
        self.note(model.partition("-")[0], str(answer.status_code))
        if answer.status_code not in allowed:
            self.accuse(f"{model} {verb}: {answer.status_code} {answer.text[:200]}")
        elif answer.status_code in {200, 418} and answer.content != body:
            self.accuse(f"{model} {verb}: {answer.content[:60]!r} answers {body[:60]!r}")

    def client(self, name: str, call: Callable[[requests.Session], Any], pause: float) -> None:
        """Makes a call again and again until the day is over."""

        def run() -> None:
            with requests.Session() as session:
                session.trust_env = False
                while not self.over.wait(pause):
                    try:
                        call(session)
                    except Exception as error:
                        self.accuse(f"{name}: {error!r}")
                        return

        client = threading.Thread(target=run, name=name)
        client.start()
        self._clients.append(client)

    def end(self) -> None:
        self.over.set()
        for client in self._clients:
            client.join(2 * PATIENCE)
            if client.is_alive():
                self.accuse(f"{client.name} still waits for an answer")


class Faults:
    """What goes wrong on a bad day; each public method is a kind, picked at random."""

    def __init__(self, day: Day, chance: random.Random) -> None:
        self.day = day
        self.server = day.server
        self.chance = chance
        self.session = requests.Session()
        self.session.trust_env = False
        self.stopped: list[int] = []
        self.behind: list[threading.Thread] = []

    def kinds(self) -> list[str]:
        own = ("kinds", "hit", "finish")
        return [
            name
            for name in dir(self)
            if name[0] != "_" and name not in own and callable(getattr(self, name))
        ]

    def hit(self) -> None:
        kind = self.chance.choice(self.kinds())
        getattr(self, kind)()
        self.day.done[kind] += 1

    def finish(self) -> None:
        for thread in self.behind:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                self.day.accuse(f"{thread.name} still waits for an answer")
        self.session.close()

    def _model(self) -> str:
        return self.chance.choice(list(HIT))

    def _behind(self, call: Callable[[], None]) -> None:
        """Runs a call that may take long while other faults go on."""

        def run() -> None:
            try:
                call()
            except Exception as error:
                self.day.accuse(f"{name}: {error!r}")

        name = f"{call.__name__} of fault {self.day.done.total()}"
        thread = threading.Thread(target=run, name=name)
        thread.start()
        self.behind = [one for one in self.behind if one.is_alive()] + [thread]

    def _signal(self, number: signal.Signals) -> int | None:
        """Sends a signal to one worker's process, and returns its pid if it was there."""
        pids = [pid for pid in self.server.worker_pids(self._model()) if pid]
        if not pids:
            return None
        pid = self.chance.choice(pids)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    def _manage(self, method: str, path: str, allowed: set[int], **parameters: Any) -> int:
        url = self.server.management + path
        answer = requests.request(method, url, params=parameters, timeout=2 * PATIENCE)
        self.day.note("management", str(answer.status_code))
        if answer.status_code not in allowed:
            self.day.accuse(f"{method} {path} {parameters}: {answer.status_code} {answer.text}")
        return answer.status_code

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def segfault(self) -> None:
        self._signal(signal.SIGSEGV)

    def stop(self) -> None:
        """The response limit has to end a worker that stands still."""
        if pid := self._signal(signal.SIGSTOP):
            self.stopped.append(pid)

    def misbehave(self) -> None:
        """One request that asks for something bad, with harm to those that share its batch."""
        model = self._model()
        verbs = ECHO_FAULTS if model == "echo" else VERBS
        verb = self.chance.choice(sorted(verbs))

        def misbehave() -> None:
            with requests.Session() as session:
                session.trust_env = False
                self.day.ask(session, model, verb)

        self._behind(misbehave)

    def flood(self) -> None:
        """More callers at once than a queue has places."""
        model, verb = self._model(), self.chance.choice(["echo", "doze"])
        verb = "echo" if model == "echo" else verb

        def flood() -> None:
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))
                at_once([lambda: self.day.ask(session, model, verb)] * 64)

        self._behind(flood)

    def leavers(self) -> None:
        """Clients that leave: in the head, in the body, after it, while they wait."""
        for _ in range(self.chance.randrange(1, 8)):
            model = self._model()
            body = self.day.body("echo" if model == "echo" else "doze", 100_000)
            head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\n"
            whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            sent = whole[: self.chance.choice([10, len(head) + 40, 50_000, len(whole)])]
            with self._connection() as connection:
                connection.sendall(sent)
                self.day.over.wait(self.chance.choice([0, 0.01, 0.1]))

    def slow_client(self) -> None:
        """A client that takes its time is answered as any other."""
        model, pause = self._model(), self.chance.choice([0.01, 0.05])
        body = self.day.body(padding=400)
        head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

        def slow_client() -> None:
            with self._connection() as connection:
                for start in range(0, len(whole), 20):
                    connection.sendall(whole[start : start + 20])
                    time.sleep(pause)
                answer = b"".join(iter(lambda: connection.recv(7), b""))
            status = int(answer.split(b" ", 2)[1])
            self.day.note(model, str(status))
            if status not in HARM | {200} or (status == 200 and not answer.endswith(body)):
                self.day.accuse(f"{model}: a slow client got {answer[:300]!r}")

        self._behind(slow_client)

    def _connection(self) -> socket.socket:
        host, port = self.server.inference.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def nonsense(self) -> None:
        """What is no request, and a body that is too large."""
        with self._connection() as connection:
            connection.sendall(self.chance.randbytes(200) + b"\r\n\r\n")
        answer = self.session.post(f"{self.server.inference}/predictions/alone", bytes(3 << 20))
        self.day.note("too large", str(answer.status_code))
        if answer.status_code != 413:
            self.day.accuse(f"a body over the limit: {answer.status_code}")

    def scale(self) -> None:
        """Other numbers of workers, none too, and back; waiting for it or not."""
        model, synchronous = self._model(), self.chance.choice(["true", "false"])
        numbers = [self.chance.choice([0, 1, 2, 3, 4]), workers_of(model)]

        def scale() -> None:
            for number in numbers:
                how = {"min_worker": number, "max_worker": number, "synchronous": synchronous}
                # Workers that are in their back-off are told with 206, those that were hit while
                # they started with 500 or 507, and those that hang with 408 after their limit.
                self._manage("PUT", f"/models/{model}", {200, 202, 206, 408, 500, 507}, **how)
                self.day.over.wait(1)

        self._behind(scale)

    def side_model(self) -> None:
        """A model that comes and goes, and is asked all the while."""

        def side_model() -> None:
            known = {"url": "side", "initial_workers": 1}
            self._manage("POST", "/models", {200, 409}, **known)
            with requests.Session() as session:
                session.trust_env = False
                for _ in range(5):
                    self.day.ask(session, "side", also={404, 503})
            self._manage("DELETE", "/models/side", {200, 404})

        self._behind(side_model)

    def bad_model(self) -> None:
        """A model that cannot be loaded."""
        name = f"bad-{self.day.done.total()}"
        how = {"url": "bad", "initial_workers": 2, "model_name": name}
        self._behind(lambda: self._manage("POST", "/models", {500}, **how))


def watch(day: Day) -> Callable[[requests.Session], None]:
    """Asks what balancers, operators and scrapers ask; all of it is answered whatever happens."""
    server = day.server

    def look(session: requests.Session) -> None:
        for url, allowed in (
            (f"{server.inference}/ping", {200, 500}),
            (f"{server.management}/models", {200}),
            (f"{server.metrics_api}/metrics", {200}),
            *((f"{server.management}/models/{model}", {200}) for model in HIT),
        ):
            status = session.get(url, timeout=PATIENCE).status_code
            day.note("probes", str(status))
            if status not in allowed:
                day.accuse(f"{url}: {status}")

    return look


def table(day: Day) -> str:
    """What was done and what was heard."""
    faults = ", ".join(f"{name} {count}" for name, count in sorted(day.done.items()))
    lines = [f"{day.done.total()} faults: {faults}"]
    for who in sorted({who for who, _ in day.heard}):
        of = {what: count for (one, what), count in sorted(day.heard.items()) if one == who}
        told = ", ".join(f"{what}: {count}" for what, count in of.items())
        lines.append(f"  {who:<12}{sum(of.values()):>7} answers  {told}")
    return "\n".join([*lines, *(f"  WRONG {text}" for text in day.wrong[:20])])
