"""Nothing grows and nothing stays: memory, descriptors, processes and the work folder."""

import contextlib
import os
import random
import socket
from collections import Counter
from pathlib import Path

from harness import SCRIPTED, Server, at_once, is_running, wait_until, write_model

MIB = 1 << 20
SUMS = """
def handle(data, context):
    return None if data is None else [sum(row["body"][::1024]) for row in data]
"""


def resident(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def descriptor_kinds(pid):
    """How many descriptors of each kind a process has."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry).split(":")[0])
    return Counter(links)


def test_memory_and_descriptors_are_flat_under_traffic_rs_08(start):
    server = start(["max_request_size=1048576", "log_filter=warn"])
    server.serve("sums", SUMS)
    server.serve("scripted")
    bodies = [random.Random(seed).randbytes(256 * 1024) for seed in range(4)]

    def caller(seed):
        for call in range(125):
            if call % 25 == 0:
                assert server.run("raise ValueError").status_code == 503
                assert server.predict("absent", b"x").status_code == 404
            body = bodies[(seed + call) % 4]
            assert server.predict("sums", body).text == str(sum(body[::1024]))

    def traffic():
        at_once([lambda seed=seed: caller(seed) for seed in range(4)])
        server.session.close()

    traffic()  # allocators and pools take what they keep
    [worker] = server.worker_pids("sums")
    base = {pid: resident(pid) for pid in (server.pid, worker)}
    files = descriptors(server.pid)
    for _ in range(3):
        traffic()
    # 1,500 requests, 375 MiB of bodies.
    for pid, before in base.items():
        assert resident(pid) - before < 4 * MIB, "memory grows with traffic"
    wait_until("descriptors are given back", lambda: descriptors(server.pid) <= files + 4, 5)


def test_registering_and_removing_leaves_nothing_rs_10_rs_11(start):
    server = start()
    write_model(server.store, "good", {"handler.py": SCRIPTED, "weights.bin": b"0" * MIB})
    write_model(server.store, "bad", "raise ValueError('no')\n")

    def cycle():
        assert server.register("good").status_code == 200
        assert server.register("good", model_name="other").status_code == 200
        assert server.register("bad").status_code == 500
        assert server.run("result = ['x']", "other").text == "x"
        for name in ("good", "other"):
            assert server.manage("DELETE", f"/models/{name}").status_code == 200

    cycle()
    files, threads = descriptors(server.pid), len(os.listdir(f"/proc/{server.pid}/task"))
    for _ in range(2):
        cycle()
    assert server.work_folders() == []
    wait_until("the hosts have ended", lambda: server.hosts() == [], 5)
    wait_until("descriptors are given back", lambda: descriptors(server.pid) <= files, 5)
    wait_until(
        "threads have ended", lambda: len(os.listdir(f"/proc/{server.pid}/task")) <= threads, 5
    )


class FewDescriptors(Server):
    """A server with few descriptors to spare."""

    def command(self, *more):
        return ["prlimit", "--nofile=128", *super().command(*more)]


def test_few_descriptors_are_enough_rs_14(start, monkeypatch):
    monkeypatch.setattr("conftest.Server", FewDescriptors)
    server = start()
    server.serve("scripted", SCRIPTED, initial_workers=2)
    write_model(server.store, "good", SCRIPTED)
    write_model(server.store, "bad", "raise ValueError('no')\n")
    host, port = server.inference.removeprefix("http://").split(":")

    def mixed(number):
        if number % 100 == 0:
            assert server.register("bad").status_code == 500
            assert server.register("good").status_code == 200
            assert server.manage("DELETE", "/models/good").status_code == 200
        if number % 10 == 0:
            # Leaves in the midst of its body.
            with socket.create_connection((host, int(port))) as leaver:
                leaver.sendall(b"POST /predictions/scripted HTTP/1.1\r\ncontent-length: 9\r\n\r\nx")
        assert server.run("result = ['x']").text == "x"

    def calls():
        for start_at in range(0, 400, 8):
            at_once([lambda number=start_at + more: mixed(number) for more in range(8)], callers=8)
        server.session.close()

    calls()
    kinds = descriptor_kinds(server.pid)
    calls()
    wait_until("descriptors are given back", lambda: descriptor_kinds(server.pid) <= kinds, 5)


def test_what_a_killed_server_left_goes_at_the_next_start_rs_11_rs_12(start):
    server = start()
    # Another server with the same temporary folder; its pid file is its own.
    other = start(env={"TEMP": server.temp})
    for one in (server, other):
        one.serve("m", {"handler.py": SCRIPTED})
        one.serve("packed", SCRIPTED)
    hosts = server.hosts()
    assert len(hosts) == 2
    left = set(server.temp.iterdir())
    segments = set(Path("/dev/shm").iterdir())
    server.run("result = ['x' * 1000000]", "m")
    server.kill()
    wait_until("its hosts are gone", lambda: not any(map(is_running, hosts)), 5)
    assert set(server.temp.iterdir()) >= left, "a killed server cannot clean up"
    assert set(Path("/dev/shm").iterdir()) <= segments

    again = start(folder=server.folder)
    again.wait_for_output("removed the temporary files of 1 servers")
    names = {path.name for path in server.temp.iterdir() if path.name.startswith("models-")}
    assert {name.split("-")[1] for name in names} == {str(again.pid), str(other.pid)}
    assert other.run("result = ['untouched']", "m").text == "untouched"
