"""Faults of queues and batches (kind K7): whose answer is whose, and when, each by its entry."""

import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import LIMIT, SCRIPTED, SOAK, at_once, descriptors, wait_until

# Answers with how many requests it got, after a file of the test's has appeared.
WAITS = """
import os, time

class Waits:
    def initialize(self, context):
        self.batches = []

    def handle(self, data, context):
        texts = [bytes(row["body"]).decode() for row in data]
        if texts == ["batches"]:
            return [self.batches]
        print("runs " + " ".join(texts), flush=True)
        self.batches.append(texts)
        gate = next((text for text in texts if text.startswith("/")), None)
        while gate and not os.path.exists(gate):
            time.sleep(0.005)
        return [f"{text} of {len(texts)}" for text in texts]
"""


def waiting(server, model):
    return server.describe(model)["jobQueueStatus"]["pendingRequests"]


@pytest.fixture
def busy(server, tmp_path):
    """Makes the worker of a model busy until the returned call is made."""
    with ThreadPoolExecutor(64) as pool:
        gates = []

        def occupy(model):
            gate = tmp_path / f"gate-{len(gates)}"
            gates.append(gate)
            call = pool.submit(server.predict, model, str(gate))
            server.wait_for_output(f"runs {gate}")

            def release():
                gate.touch()
                return call.result()

            return release

        occupy.pool = pool
        yield occupy
        for gate in gates:
            gate.touch()


# --- BT-01 ---------------------------------------------------------------------------------------

RETURNS = {
    "fewer": "[0] * (len(data) - 1)",
    "more": "[0] * (len(data) + 1)",
    "none": "[]",
    "dict": "{'a': 1}",
    "nothing": "None",
    "generator": "(0 for _ in data)",
    "text": "'four'",
    "number": "4",
    "tuple": "tuple(range(len(data)))",
}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("callers", [1, 4])
def test_a_wrong_number_of_results_fails_its_callers_and_nobody_else_bt_01(
    server, returned, callers
):
    model = f"returns-{returned}-{callers}"
    source = f"""
def handle(data, context):
    if data is None:
        return None
    if any(bytes(row["body"]) == b"good" for row in data):
        return [b"good"] * len(data)
    return {RETURNS[returned]}
"""
    # Full when all callers are there, whatever the machine does.
    server.serve(
        model, source, config=f"batchSize: {callers}\nbatchGather: strict\nmaxBatchDelay: 20000\n"
    )
    before = server.worker_pids(model)
    answers = at_once([lambda: server.predict(model, b"x")] * callers)
    assert {answer.status_code for answer in answers} == {503}, [a.text for a in answers]
    good = at_once([lambda: server.predict(model, b"good")] * callers)
    assert [answer.text for answer in good] == ["good"] * callers
    assert server.worker_pids(model) == before, "the worker lives on"
    server.manage("DELETE", f"/models/{model}")


# --- waits ---------------------------------------------------------------------------------------


def test_the_delay_counts_from_the_arrival_bt_03(server):
    code = "import time; print('slow runs', flush=True); time.sleep(0.9); result = ['slow']"
    server.serve(
        "delayed", SCRIPTED, config="batchSize: 8\nbatchGather: fixed\nmaxBatchDelay: 1000\n"
    )
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(server.run, code, "delayed")
        server.wait_for_output("slow runs")
        # Due a second from now, and the worker is free before: the waits do not add up to 1.9 s.
        answer = server.run("result = [len(data)]", "delayed")
        assert answer.text == "1"
        assert 0.95 < answer.elapsed.total_seconds() < 1.7
        assert slow.result().text == "slow"
    # On an idle worker it is the delay alone.
    answer = server.run("result = [len(data)]", "delayed")
    assert 0.95 < answer.elapsed.total_seconds() < 1.7
    server.manage("DELETE", "/models/delayed")


def test_what_waits_already_goes_together_without_a_delay_bt_04(server, busy):
    server.serve("eager", WAITS, config="batchSize: 8\nmaxBatchDelay: 0\n")
    for count in (5, 20):
        release = busy("eager")
        calls = [busy.pool.submit(server.predict, "eager", b"x") for _ in range(count)]
        wait_until("all wait", lambda n=count: waiting(server, "eager") == n)
        release()
        assert {call.result().status_code for call in calls} == {200}
    batches = server.predict("eager", b"batches").json()
    assert [len(batch) for batch in batches] == [1, 5, 1, 8, 8, 4]
    server.manage("DELETE", "/models/eager")


def test_batches_have_the_size_that_was_asked_for_bt_05(server):
    server.serve(
        "sized",
        WAITS,
        config="batchSize: 4\nbatchGather: fixed\nmaxBatchDelay: 20000\n",
        initial_workers=3,
    )
    assert server.describe("sized")["batchSize"] == 4
    answers = at_once([lambda n=n: server.predict("sized", f"{n}") for n in range(1000)], 64)
    lengths = Counter()
    for number, answer in enumerate(answers):
        text, _, length = answer.text.partition(" of ")
        assert (answer.status_code, text) == (200, str(number))
        lengths[int(length)] += 1
    # As 64 callers are there until the last 64 requests, and those are a multiple of 4 too.
    assert lengths == {4: 1000}
    server.manage("DELETE", "/models/sized")
    answer = server.register("sized", batch_size=2, max_batch_delay=20000)
    assert answer.status_code == 200
    assert server.describe("sized")["batchSize"] == 2
    answers = at_once([lambda: server.predict("sized", b"x")] * 100, 16)
    assert {answer.text for answer in answers} == {"x of 2"}
    server.manage("DELETE", "/models/sized")


# --- overload ------------------------------------------------------------------------------------


def test_a_full_queue_is_told_from_a_missing_worker_bt_09(server, busy):
    server.serve("small", WAITS, config="jobQueueSize: 2\n")
    release = busy("small")
    queued = [busy.pool.submit(server.predict, "small", b"x") for _ in range(2)]
    wait_until("the queue is full", lambda: waiting(server, "small") == 2)
    assert server.describe("small")["jobQueueStatus"]["remainingCapacity"] == 0
    for path in ("/predictions/small", "/predictions/small/1.0", "/v1/models/small:predict"):
        answer = server.infer(path, b"x")
        assert (answer.status_code, answer.headers["x-refusal-reason"]) == (503, "queue-full")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["type"] == "ServiceUnavailableException"
    release()
    assert [call.result().text for call in queued] == ["x of 1"] * 2
    how = {"min_worker": 0, "max_worker": 0, "synchronous": "true"}
    assert server.manage("PUT", "/models/small", params=how).status_code == 200
    answer = server.predict("small", b"x")
    assert (answer.status_code, answer.headers["x-refusal-reason"]) == (503, "no-worker")
    server.manage("DELETE", "/models/small")


def request(model, body):
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(server):
    host, port = server.inference.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT)


def test_requests_of_callers_that_left_are_never_run_bt_10(server, busy):
    server.serve("left", WAITS, config="jobQueueSize: 100\n")
    release = busy("left")
    gone, stay = [], []
    server.session.close()
    before = descriptors(server.pid)
    for number in range(50):
        connection = connect(server)
        kind = stay if number % 10 == 0 else gone
        kind.append(connection)
        connection.sendall(
            request("left", f"{'stays' if kind is stay else 'left'}-{number}".encode())
        )
    wait_until("all wait", lambda: waiting(server, "left") == 50)
    for connection in gone:
        connection.close()
    # Those of the five that stay, and of the calls of this test.
    wait_until("the server has closed its ends", lambda: descriptors(server.pid) <= before + 10)
    release()
    assert server.predict("left", b"new").text == "new of 1"
    for connection in stay:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.close()
    [_occupied], *run = server.predict("left", b"batches").json()
    assert run == [[f"stays-{number}"] for number in range(0, 50, 10)] + [["new"]]
    server.manage("DELETE", "/models/left")


def test_no_place_in_the_queue_is_lost_by_those_who_leave_or_fail_bt_11(server, busy):
    size = 16
    config = f"jobQueueSize: {size}\nresponseTimeout: 5\n"
    server.serve("places", SCRIPTED, config=config, initial_workers=2)
    bodies = [
        b"result = ['fine']",
        b"raise ValueError",
        b"import time; time.sleep(0.02); result = ['slow']",
        b"result = []",
    ]

    def caller(seed):
        own = random.Random(seed)
        for _ in range(30 * SOAK):
            if own.random() < 0.5:
                with connect(server) as connection:
                    connection.sendall(request("places", own.choice(bodies)))
                    threading.Event().wait(own.choice([0, 0.001, 0.01]))
                    # Leaves.
            else:
                answer = server.run(own.choice(bodies).decode(), "places")
                assert answer.status_code in {200, 503}, answer.text

    at_once([lambda seed=seed: caller(seed) for seed in range(24)])
    wait_until("the queue is empty", lambda: waiting(server, "places") == 0)
    queue = server.describe("places")["jobQueueStatus"]
    assert queue["remainingCapacity"] == size
    server.manage("DELETE", "/models/places")

    # The same on one worker: exactly as many fit as it says.
    server.serve("exact", WAITS, config=config.replace("Timeout: 5", "Timeout: 60"))
    for _ in range(3):
        release = busy("exact")
        before = descriptors(server.pid)
        for _ in range(size):
            with connect(server) as connection:
                connection.sendall(request("exact", b"leaves"))
        wait_until("they have left", lambda n=before: descriptors(server.pid) <= n)
        release()
        wait_until("the queue is empty", lambda: waiting(server, "exact") == 0)
        release = busy("exact")
        calls = [busy.pool.submit(server.predict, "exact", b"x") for _ in range(size)]
        wait_until("all have their place", lambda: waiting(server, "exact") == size)
        answer = server.predict("exact", b"one too many")
        assert (answer.status_code, answer.headers["x-refusal-reason"]) == (503, "queue-full")
        release()
        assert [call.result().text for call in calls] == ["x of 1"] * size
        wait_until("the queue is empty", lambda: waiting(server, "exact") == 0)
    server.manage("DELETE", "/models/exact")
