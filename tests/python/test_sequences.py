"""Requests that belong together, with Python handlers that keep state for them."""

import pytest
from harness import at_once, wait_until

# A running sum for each sequence, kept in the worker: only right if one worker has them all.
SUMS = """
class Sums:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        answers = []
        for index, row in enumerate(data):
            name = context.get_sequence_id(index)
            if context.get_request_header(index, "ts_request_sequence_start") == "true":
                self.sums.pop(name, None)
            self.sums[name] = self.sums.get(name, 0) + int(bytes(row["body"]))
            answers.append(str(self.sums[name]))
        return answers
"""
SEQUENCES = (
    "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nsequenceBatching: true\n"
    "sequenceMaxIdleMSec: 60000\nmaxNumSequence: 4\nmaxSequenceJobQueueSize: 10\n"
)

# Counts until its sequence is cancelled by a request whose body says so.
COUNTER = """
class Counter:
    def initialize(self, context):
        context.cache = {}
        self.cancelled = set()

    def handle(self, data, context):
        results, done = [], []
        for index, row in enumerate(data):
            request = context.request_ids[index]
            name = context.get_sequence_id(index)
            if request not in context.cache:
                context.cache[request] = bytes(row["body"]).decode()
                if context.cache[request] == "cancel":
                    self.cancelled.add(name)
                if context.cache[request] == "end":
                    context.set_response_header(index, "ts_request_sequence_end", name)
            one = context.cache[request] != "count"
            results.append("ok" if one else ".")
            done.append(lambda _, one=one, name=name: one or name in self.cancelled)
        context.stopping_criteria = done
        return results
"""


def send(server, model, name, body, **headers):
    headers = {"ts_request_sequence_id": name} | {
        f"ts_request_sequence_{key}": value for key, value in headers.items()
    }
    return server.infer(f"/predictions/{model}", body, headers=headers)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_two_sequences_keep_their_sums_in_two_workers(start, isolation):
    server = start()
    server.serve("sums", SUMS, config=SEQUENCES + f"workerIsolation: {isolation}\n")
    assert server.describe("sums")["stateful"] is True

    def sequence(name, step):
        def run():
            sums, total = [], 0
            for number in range(20):
                answer = send(server, "sums", name, str(step * number))
                assert answer.headers["ts_request_sequence_id"] == name
                total += step * number
                sums.append((answer.text, str(total)))
            return sums

        return run

    for sums in at_once([sequence("a", 1), sequence("b", 2), sequence("c", 3)]):
        assert all(told == total for told, total in sums), sums


def test_a_server_with_other_names_for_the_headers_tells_its_handlers(start):
    names = {"id": "x-session", "start": "x-first", "end": "x-last"}
    server = start([f"ts_header_key_sequence_{role}={name}" for role, name in names.items()])
    source = SUMS.replace('"ts_request_sequence_start"', "context.header_key_sequence_start")
    server.serve("sums", source, config=SEQUENCES)
    for body, start_again, total in [
        ("1", {}, "1"),
        ("2", {}, "3"),
        ("4", {"x-first": "true"}, "4"),
    ]:
        headers = {"x-session": "a"} | start_again
        answer = server.infer("/predictions/sums", body, headers=headers)
        assert (answer.text, answer.headers["x-session"]) == (total, "a")


def test_requests_of_one_sequence_run_in_order_however_many_come_at_once(start):
    server = start()
    server.serve("sums", SUMS, config=SEQUENCES)
    send(server, "sums", "a", "0")
    answers = at_once([lambda: send(server, "sums", "a", "1")] * 8)
    assert sorted(int(answer.text) for answer in answers) == list(range(1, 9))


def test_a_lost_worker_loses_its_sequences_and_answers_what_waits(start):
    server = start()
    server.serve(
        "sums",
        SUMS.replace(
            "answers = []",
            "answers = []\n        import os, time"
            "\n        if any(bytes(row['body']) == b'13' for row in data):"
            "\n            os._exit(3)",
        ),
        config=SEQUENCES.replace("2", "1", 2),
    )
    send(server, "sums", "a", "5")
    assert send(server, "sums", "a", "13").status_code == 500
    wait_until("a worker is back", lambda: send(server, "sums", "a", "2").status_code == 200)
    assert int(send(server, "sums", "a", "0").text) <= 8, "the sum began anew"


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_stream_is_cancelled_by_a_second_request_of_its_sequence(start, isolation):
    server = start()
    config = (
        "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\nsequenceBatching: true\n"
        "continuousBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 2\n"
        f"maxSequenceJobQueueSize: 4\nworkerIsolation: {isolation}\n"
    )
    server.serve("counter", COUNTER, config=config)
    refused = send(server, "counter", "a", "count")
    assert (refused.status_code, refused.headers["x-refusal-reason"]) == (503, "sequence-over")
    url = server.inference + "/predictions/counter"
    begun = {"ts_request_sequence_start": "true"}
    with server.session.post(url, data="count", headers=begun, stream=True, timeout=20) as stream:
        name = stream.headers["ts_request_sequence_id"]
        assert name.startswith("ts-seq-")
        parts = stream.iter_content(1)
        assert [next(parts) for _ in range(3)] == [b"."] * 3
        headers = {"ts_request_sequence_id": name}
        import requests

        cancelled = requests.post(url, data="cancel", headers=headers, timeout=20)
        assert (cancelled.status_code, cancelled.text) == (200, "ok")
        assert set(parts) <= {b"."}, "the stream has an end"
    assert send(server, "counter", name, "end").text == "ok"
    over = send(server, "counter", name, "count")
    assert (over.status_code, over.headers["x-refusal-reason"]) == (503, "sequence-over")


def test_the_cost_of_a_handler_is_known_from_its_warm_up(start):
    server = start()
    handler = """
import time

class Slow:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        time.sleep(0.03 + 0.001 * len(data))
        return ["x"] * len(data)
"""
    config = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nwarmup:\n  - file: handler.py\n"
    server.serve("slow", handler, config=config)
    told = server.manage("GET", "/models/slow/batching").json()
    assert 25_000 < told["cost"]["perBatchMicros"] < 90_000, told
    at_once([lambda: server.predict("slow", b"x")] * 16)
    told = server.manage("GET", "/models/slow/batching").json()
    assert sum(int(size) * count for size, count in told["batchesBySize"].items()) == 16
