"""Faults of bounds (kind K6): memory, descriptors, disk and sockets, each by its entry."""

import gzip
import json
import os
import signal
import socket
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from harness import (
    LIMIT,
    SCRIPTED,
    SOAK,
    archive,
    at_once,
    can_run,
    descriptors,
    resident,
    threads,
    wait_until,
    write_files,
    write_model,
)

MIB = 1 << 20
ECHO = """
def handle(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]
"""


@pytest.fixture(scope="module")
def server(server):
    server.serve_echo("echo")
    server.serve("python", ECHO)
    return server


def connect(server):
    host, port = server.inference.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT)


def head(*lines, model="echo"):
    return "\r\n".join([f"POST /predictions/{model} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


def all_of(connection):
    """What comes until the server closes; that it breaks off is as good."""
    answer = b""
    try:
        while part := connection.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    return answer


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length",
    ["2147483648", "4294967297", "9223372036854775808", "9" * 20, "-1", "+5", "0x10", "5, 6", ""],
)
def test_a_length_that_is_none_or_too_large_is_refused_at_once_rs_03(server, length):
    with connect(server) as connection:
        connection.sendall(head(f"content-length: {length}") + b"hello")
        assert status_of(connection.recv(1 << 16)) in {400, 413}
    assert server.predict("echo", b"alive").text == "alive"


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 5", "content-length: 6"),
        ("content-length: 5", "transfer-encoding: chunked"),
        ("transfer-encoding: gzip",),
        ("transfer-encoding: chunked, chunked",),
    ],
)
def test_two_lengths_are_none_rs_03(server, lines):
    with connect(server) as connection:
        connection.sendall(head("connection: close", *lines) + b"5\r\nhello\r\n0\r\n\r\n")
        # One answer at most to whatever this is: a second would be somebody else's request.
        assert all_of(connection).count(b"HTTP/1.1") == 1
    assert server.predict("echo", b"alive").text == "alive"


def test_memory_is_not_set_aside_on_a_clients_word_rs_03(start):
    server = start([f"max_request_size={4 << 30}"])
    server.serve_echo("echo")
    base = resident(server.pid)
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(connect(server))
            connection.sendall(head(f"content-length: {3 << 30}") + bytes(1024))
        assert server.predict("echo", b"alive").text == "alive"
        assert resident(server.pid) - base < 16 * MIB
    assert server.predict("echo", b"alive").text == "alive"


def bombs():
    deflate = zlib.compressobj(9)
    zeros = bytes(MIB)
    flat = b"".join(deflate.compress(zeros) for _ in range(256)) + deflate.flush()
    zipped = gzip.compress(bytes(16 * MIB))
    return {
        "deflate": (flat, 413),
        "gzip": (zipped, 413),
        "gzip, gzip": (gzip.compress(zipped), 415),
        "br": (zipped, 400),
        "gzip;cut": (zipped[: len(zipped) // 2], 413),
        "gzip;short": (gzip.compress(bytes(MIB))[:-9], 400),
    }


@pytest.mark.parametrize("coding", bombs())
def test_a_bomb_costs_nothing_and_reaches_nobody_rs_05(server, coding):
    body, status = bombs()[coding]
    headers = {"content-encoding": coding.partition(";")[0]}
    for model in ("echo", "python"):
        base = resident(server.pid)
        answers = at_once([lambda m=model: server.predict(m, body, headers=headers)] * 8, 4)
        assert {answer.status_code for answer in answers} == {status}
        # Four at a time, each within `max_request_size`; a buffer that grows is there twice.
        assert resident(server.pid) - base < 4 * 2 * 7 * MIB


def test_memory_goes_with_bytes_and_not_with_chunks_rs_06(server):
    count = 100_000 * SOAK
    base = resident(server.pid)
    with connect(server) as connection:
        connection.sendall(head("transfer-encoding: chunked", "connection: close"))
        for _ in range(count // 1000):
            connection.sendall(b"1\r\nx\r\n" * 1000)
        connection.sendall(b"0\r\n\r\n")
        answer = all_of(connection)
    assert status_of(answer) == 200
    assert answer.endswith(b"\r\n\r\n" + b"x" * count)
    assert resident(server.pid) - base < 8 * MIB + 4 * count


@pytest.mark.parametrize("part", ["extension", "trailer", "head"])
def test_what_has_no_end_is_not_kept_rs_06(server, part):
    base = resident(server.pid)
    begun = {
        "extension": head("transfer-encoding: chunked") + b"1;x=",
        "trailer": head("transfer-encoding: chunked") + b"1\r\nx\r\n0\r\n",
        "head": b"GET /ping HTTP/1.1\r\nhost: x\r\n",
    }[part]
    line = b"x" * 1000 if part == "extension" else b"x-more: " + b"y" * 990 + b"\r\n"
    cut_off = False
    with connect(server) as connection:
        connection.sendall(begun)
        try:
            for _ in range(64):
                connection.sendall(line * 1000)
        except (BrokenPipeError, ConnectionResetError):
            cut_off = True
        # What a body may have beside its bytes is thrown away as it comes, until the body has
        # brought none for a minute.
        assert cut_off or part != "head"
        assert resident(server.pid) - base < 16 * MIB
        assert server.predict("echo", b"alive").text == "alive"


def test_clients_that_drip_hold_up_nobody_rs_06(server):
    with ExitStack() as stack:
        dripping = [stack.enter_context(connect(server)) for _ in range(400)]
        request = head("content-length: 100")
        for moment in range(5):
            for number, connection in enumerate(dripping):
                # Half of them in the head, half in the body.
                whole = request if number % 2 else request[: len(request) - 4]
                connection.sendall(whole if moment == 0 else b"x")
            answers = at_once([lambda: server.predict("echo", b"good")] * 20, 8)
            assert {answer.text for answer in answers} == {"good"}
            assert max(answer.elapsed.total_seconds() for answer in answers) < 5


# --- what stays ----------------------------------------------------------------------------------


def test_models_that_come_and_go_leave_nothing_rs_10_rs_11(start, tmp_path):
    server = start()
    write_files(tmp_path, {"handler.py": SCRIPTED, "weights.bin": os.urandom(8 * MIB)})
    write_files(tmp_path, {"bad.py": ECHO + "raise ValueError('no')\n"})
    flags = ("--version", "1.0", "--extra-files", tmp_path / "weights.bin")
    archive(server.store, "--model-name", "good", "--handler", tmp_path / "handler.py", *flags)
    archive(server.store, "--model-name", "bad", "--handler", tmp_path / "bad.py", *flags)
    archive(
        server.store, "--model-name", "next", "--handler", tmp_path / "handler.py",
        "--version", "2.0", "--extra-files", tmp_path / "weights.bin",
    )  # fmt: skip

    def cycle():
        assert server.register("good.mar", model_name="m").status_code == 200
        assert server.run("result = ['x']", "m").text == "x"
        assert server.register("bad.mar").status_code == 500
        # Swaps to a second version and removes the first.
        assert server.register("next.mar", model_name="m").status_code == 200
        assert len(server.work_folders()) == 2
        assert server.manage("PUT", "/models/m/2.0/set-default").status_code == 200
        assert server.manage("DELETE", "/models/m/1.0").status_code == 200
        assert server.run("result = ['x']", "m").text == "x"
        assert server.manage("DELETE", "/models/m").status_code == 200
        assert server.work_folders() == []

    for _ in range(2):
        cycle()
    base = resident(server.pid)
    before = descriptors(server.pid), threads(server.pid)
    for _ in range(4 * SOAK):
        cycle()
    wait_until("the hosts have ended", lambda: server.hosts() == [], 5)
    wait_until(
        "descriptors and threads are those of before",
        lambda: descriptors(server.pid) <= before[0] and threads(server.pid) <= before[1] + 1,
        15,
    )
    assert resident(server.pid) - base < max(2 * MIB, base // 20), "memory stays with models gone"


def test_what_is_unpacked_goes_with_a_killed_server_rs_11(start, tmp_path):
    server = start()
    write_files(tmp_path, {"handler.py": SCRIPTED})
    flags = ("--version", "1.0", "--handler", tmp_path / "handler.py")
    archive(server.store, "--model-name", "m", *flags)
    assert server.register("m.mar").status_code == 200
    [left] = server.work_folders()
    server.kill()
    again = start(folder=server.folder)
    wait_until("it is swept", lambda: not Path(left).exists())
    assert again.work_folders() == []


SMALL_SHM = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=65536 none /dev/shm && exec "$@"',
    "sh",
)


@pytest.mark.skipif(not can_run(*SMALL_SHM), reason="this machine does not permit namespaces")
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_large_bodies_need_no_room_in_dev_shm_rs_12(start, isolation):
    server = start([f"worker_isolation={isolation}"], prefix=SMALL_SHM)
    size = os.statvfs(f"/proc/{server.pid}/root/dev/shm")
    assert size.f_blocks * size.f_frsize == 65536
    server.serve("python", ECHO)
    body = os.urandom(6 * MIB)
    for answer in at_once([lambda: server.predict("python", body)] * 6, 3):
        assert (answer.status_code, answer.content == body) == (200, True)
    segments = sorted(os.listdir(f"/proc/{server.pid}/root/dev/shm"))
    [worker] = server.worker_pids("python")
    os.kill(worker, signal.SIGKILL)
    wait_until("another serves", lambda: server.worker_pids("python") not in ([worker], [None]))
    assert server.predict("python", body).content == body
    assert sorted(os.listdir(f"/proc/{server.pid}/root/dev/shm")) == segments == []


def test_probes_cost_nothing_and_no_call_of_a_worker_rs_13(server):
    counted = """
class Counts:
    def initialize(self, context):
        self.calls = 0

    def handle(self, data, context):
        self.calls += 1
        return [str(self.calls)] * len(data)
"""
    server.serve("counts", counted)
    assert server.predict("counts", b"x").text == "1"

    def probe(kept):
        with requests.Session() as session:
            session.trust_env = False
            for number in range(250 * SOAK):
                url = (
                    f"{server.inference}/ping"
                    if number % 2
                    else f"{server.management}/v1/models/counts"
                )
                headers = {} if kept else {"connection": "close"}
                answer = session.get(url, headers=headers, timeout=LIMIT)
                assert answer.status_code == 200, answer.text

    def probes():
        at_once([lambda: probe(True), lambda: probe(False)] * 2)

    probes()
    base, before = resident(server.pid), descriptors(server.pid)
    probes()
    wait_until("descriptors are given back", lambda: descriptors(server.pid) <= before + 4, 5)
    assert resident(server.pid) - base < 4 * MIB
    assert server.predict("counts", b"x").text == "2"


# --- small limits --------------------------------------------------------------------------------

FEW_FILES = ("prlimit", "--nofile=128:128")


@pytest.mark.skipif(not can_run(*FEW_FILES), reason="there is no prlimit here")
def test_with_few_descriptors_old_connections_work_and_none_is_lost_rs_14(start):
    server = start(prefix=FEW_FILES)
    server.serve("python", ECHO)
    write_model(server.store, "bad", "raise ValueError('no')\n")

    def kinds():
        """What the descriptors of the server are, and how many of each."""
        found = {}
        for entry in Path(f"/proc/{server.pid}/fd").iterdir():
            try:
                kind = os.readlink(entry).partition(":")[0]
            except FileNotFoundError:
                continue
            found[kind] = found.get(kind, 0) + 1
        return found

    def mixed(number):
        if number % 50 == 0:
            assert server.register("bad", model_name=f"bad-{number}").status_code == 500
        if number % 10 == 0:
            with connect(server) as dropped:
                dropped.sendall(head("content-length: 1000", model="python") + b"x")
        assert server.predict("absent", b"x").status_code == 404
        assert server.predict("python", b"x").text == "x"

    for number in range(20):
        mixed(number)
    server.session.close()
    wait_until("connections are closed", lambda: kinds().get("socket", 0) < 40)
    before = kinds()
    for number in range(100 * SOAK):
        mixed(number)
    server.session.close()

    def as_before():
        now = kinds()
        return all(now.get(kind, 0) <= count + 2 for kind, count in before.items()) and (
            set(now) <= set(before)
        )

    wait_until(f"its descriptors are again {before}", as_before, 10)

    # More connections than it can have: those that it has go on, a worker that is lost comes back,
    # and the others are refused until there is room.
    assert server.predict("python", b"x").text == "x"
    [worker] = server.worker_pids("python")
    with ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(connect(server))
        wait_until("it has all that it takes", lambda: kinds()["socket"] >= 60)

        def refused():
            with connect(server) as another:
                another.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
                return b" 503 " in all_of(another)

        wait_until("another is refused", refused, 5)
        for _ in range(20):
            assert server.predict("python", b"old").text == "old"
        os.kill(worker, signal.SIGKILL)
        wait_until("it is replaced", lambda: server.worker_pids("python") not in ([worker], [None]))
        assert server.predict("python", b"old").text == "old"
        assert "Too many open files" not in server.output
    with requests.Session() as fresh:
        fresh.trust_env = False
        url = f"{server.inference}/predictions/python"
        wait_until(
            "there is room again", lambda: fresh.post(url, b"new", timeout=LIMIT).text == "new"
        )
    wait_until(f"its descriptors are again {before}", as_before, 20)


LITTLE_DATA = ("prlimit", f"--data={512 * MIB}")


@pytest.mark.skipif(not can_run(*LITTLE_DATA), reason="there is no prlimit here")
def test_many_large_bodies_are_refused_where_memory_is_small(start):
    """The budget for bodies is a share of what the process may have: 503, and it lives."""
    server = start(
        [f"max_request_size={64 * MIB}", f"max_response_size={64 * MIB}"], prefix=LITTLE_DATA
    )
    server.serve_echo("echo")
    body = os.urandom(48 * MIB)
    answers = at_once([lambda: server.predict("echo", body)] * 40, 20)
    statuses = {answer.status_code for answer in answers}
    assert statuses <= {200, 503} and 200 in statuses, statuses
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["x-refusal-reason"] in {"body-memory", "queue-full"}
    assert 503 in statuses, "forty times 48 MiB do not fit into 512 MiB"
    assert server.predict("echo", b"alive").text == "alive"


LITTLE_MEMORY = ("prlimit", f"--as={2 << 30}")


@pytest.mark.skipif(not can_run(*LITTLE_MEMORY), reason="there is no prlimit here")
def test_a_server_with_little_memory_serves_and_refuses_what_is_too_large(start):
    """The echo backend: its hosts inherit the limit, which torch and Python do not fit in."""
    server = start(
        [f"max_request_size={64 * MIB}", "max_response_size=67108864"], prefix=LITTLE_MEMORY
    )
    server.serve_echo("echo")
    body = os.urandom(16 * MIB)
    for answer in at_once([lambda: server.predict("echo", body)] * 8 * SOAK, 4):
        assert (answer.status_code, answer.content == body) == (200, True)
    assert server.predict("echo", bytes(64 * MIB + 1)).status_code == 413
    told = json.loads(server.manage("GET", "/models").text)
    assert [model["modelName"] for model in told["models"]] == ["echo"]
