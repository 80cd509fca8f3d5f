"""Nothing grows and nothing stays: memory, descriptors, and what a killed server left.

`test_faults_resources.py` has what models that come and go leave."""

import random
from pathlib import Path

from harness import SCRIPTED, SOAK, at_once, descriptors, is_running, resident, wait_until

MIB = 1 << 20
SUMS = """
def handle(data, context):
    return None if data is None else [sum(row["body"][::1024]) for row in data]
"""


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
    for _ in range(3 * SOAK):
        traffic()
    # 1,500 requests, 375 MiB of bodies; no more with any number of them.
    for pid, before in base.items():
        assert resident(pid) - before < 4 * MIB, "memory grows with traffic"
    wait_until("descriptors are given back", lambda: descriptors(server.pid) <= files + 4, 5)


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
