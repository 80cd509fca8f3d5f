"""What clients that send one byte a second cost the others.

One server, loaded at an even rate that leaves it time, so that the times of its answers are its own
and not those of a queue; in every second round a hundred other clients drip the head or the body of
a request. The ratio of the times is taken within a round. The server closes a dripping connection
when its limit is over, and the client opens another one.
"""

import argparse
import contextlib
import socket
import statistics
import threading
from urllib.parse import urlsplit

from models import WORK, echo_model, workers
from programs import Server
from rounds import Subject, loaded, run_rounds, summary

CLIENTS = 100
CONNECTIONS = 8
REQUESTS_PER_S = 500
TARGET_RATIO = 1.1
HEAD = b"POST /predictions/echo HTTP/1.1\r\nhost: x\r\nx-slow: " + b"y" * 4000
BODY = b"POST /predictions/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n"


class Drip:
    """One slow client: it sends its request byte by byte, and begins again where it is cut off."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self.address = address
        # A head from its first byte; or a body, whose head comes in one go.
        self.whole, self.start = (HEAD, 1) if number % 2 else (BODY + bytes(4000), len(BODY))
        self.begun = 0
        self.open()

    def open(self) -> None:
        """Begins a request on a new connection."""
        self.socket = socket.create_connection(self.address)
        self.socket.setblocking(False)
        self.socket.send(self.whole[: self.start])
        self.sent = self.start
        self.begun += 1

    def send(self) -> None:
        """The next byte, on this connection or on a new one."""
        try:
            # An answer or the end: the server has had enough of it.
            self.socket.recv(1)
        except BlockingIOError:
            # Where it has been closed since, that shows at the next turn.
            with contextlib.suppress(OSError):
                self.socket.send(self.whole[self.sent : self.sent + 1])
                self.sent += 1
            return
        except OSError:
            pass
        self.socket.close()
        self.open()


class SlowClients:
    """A hundred of them, in a thread of their own. They leave with the `with` block."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port)
        self.leave = threading.Event()

    def __enter__(self) -> "SlowClients":
        self.clients = [Drip(self.address, number) for number in range(CLIENTS)]
        self.thread = threading.Thread(target=self.drip)
        self.thread.start()
        return self

    def drip(self) -> None:
        """One byte of each in every second, one client after the other."""
        while True:
            for client in self.clients:
                if self.leave.wait(1 / CLIENTS):
                    return
                client.send()

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join()
        for client in self.clients:
            client.socket.close()


def slow_clients(options: argparse.Namespace) -> dict:
    """Prints the times of other clients' requests with and without slow ones, and their ratio."""
    with Server(WORK / "slow_clients", options.config) as server:
        server.register(echo_model(server.store, "echo", workers(2, "process", 1)), "echo")
        url = f"{server.inference}/predictions/echo"
        alone = loaded(server, url, CONNECTIONS, "--rate", REQUESTS_PER_S)

        def beside(seconds: float) -> dict:
            with SlowClients(server.inference):
                return alone(seconds)

        subjects = [Subject("alone", alone), Subject(f"beside {CLIENTS} slow clients", beside)]
        # A p99 is few requests of each round: more rounds than elsewhere.
        run_rounds(subjects, 5 * options.rounds, options.seconds)
    print(f"\nSlow clients: {REQUESTS_PER_S} requests/s of others, {CONNECTIONS} connections")
    data = {}
    for key in ("p50_ms", "p99_ms"):
        without, with_them = (subject.values(key) for subject in subjects)
        ratios = [own / other for own, other in zip(with_them, without, strict=True)]
        ratio = summary(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        medians = [statistics.median(values) for values in (without, with_them)]
        data[key] = {"alone": medians[0], "beside": medians[1], "ratio": ratio}
        print(f"  {key:10}{medians[0]:.2f} alone, {medians[1]:.2f} beside them; ratio ", end="")
        print(f"{ratio['median']:.1%}, half of the rounds {low:.0%} to {high:.0%}")
    print(f"  the target for p99 is at most {TARGET_RATIO:.0%}")
    data["rounds"] = {subject.name: subject.rounds for subject in subjects}
    return data
