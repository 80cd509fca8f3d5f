"""Batches of a Python handler: their length, whose answer is whose, failures of single items."""

import pytest
from harness import at_once

BATCH = """
class Batch:
    def initialize(self, context):
        self.kept = {}

    def handle(self, data, context):
        answers = []
        for index, row in enumerate(data):
            text = bytes(row["body"]).decode()
            if text == "raise":
                raise ValueError("of one item")
            if text == "bad":
                context.set_response_status(400, "Bad", index)
                context.set_response_header(index, "x-why", "bad item")
            if text == "large":
                text = "x" * 5000
            answer = {"length": len(data), "text": text, "id": context.get_request_id(index)}
            answers.append(answer | {"path": context.get_request_header(index, "url_path")})
        return answers[: len(data) + self.wrong(data)]

    def wrong(self, data):
        return -1 if any(bytes(row["body"]) == b"fewer" for row in data) else 0
"""
# A batch is full when it has four, so four callers at once are one batch whatever the machine does.
FULL = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nbatchGather: strict\nmaxBatchDelay: 20000\n"
EARLY = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nbatchGather: fixed\nmaxBatchDelay: 30\n"


@pytest.fixture(scope="module")
def server(server):
    server.serve("full", BATCH, config=FULL)
    server.serve("early", BATCH, config=EARLY)
    return server


def batch(server, *texts):
    return at_once([lambda text=text: server.predict("full", text.encode()) for text in texts])


def test_fifty_callers_get_their_own_answers_from_full_batches(server):
    def call(number):
        return lambda: server.predict("early", f"number {number}")

    answers = at_once([call(number) for number in range(400)], callers=50)
    lengths = []
    for number, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["text"] == f"number {number}"
        assert told["id"] == answer.headers["x-request-id"]
        lengths.append(told["length"])
    assert max(lengths) <= 8
    assert lengths.count(8) > len(lengths) / 2, "callers that wait make full batches"
    assert len({answer.json()["id"] for answer in answers}) == 400


def test_each_item_of_a_batch_has_headers_of_its_own(server):
    paths = ["v1/chat", "v1/models", "", "a/b/c"]
    calls = [
        lambda path=path: server.infer(f"/predictions/full/1.0/{path}", b"x") for path in paths
    ]
    answers = [answer.json() for answer in at_once(calls)]
    assert [answer["path"] for answer in answers] == paths
    assert {answer["length"] for answer in answers} == {4}


def test_a_single_caller_waits_no_longer_than_the_delay(server):
    answer = server.predict("early", b"alone")
    assert answer.json()["length"] == 1
    assert 0.025 < answer.elapsed.total_seconds() < 2


def test_one_bad_item_has_a_status_of_its_own_bt_02(server):
    good, bad, *others = batch(server, "a", "bad", "c", "d")
    assert (bad.status_code, bad.reason, bad.headers["x-why"]) == (400, "Bad", "bad item")
    for answer, text in zip([good, *others], "acd", strict=True):
        assert (answer.status_code, answer.json()["text"]) == (200, text)
        assert answer.json()["length"] == 4
        assert "x-why" not in answer.headers
    answers = batch(server, "a", "b", "c", "d")
    assert [answer.status_code for answer in answers] == [200] * 4, "the status was of one batch"


def test_an_exception_fails_its_batch_and_no_other(server):
    before = server.worker_pids("full")
    for answer in batch(server, "a", "raise", "c", "d"):
        assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")
    for answer in batch(server, "a", "fewer", "c", "d"):
        assert answer.status_code == 503
        assert answer.json()["message"] == "number of batch response mismatched"
    server.wait_for_output("it returned 3 results for 4 requests")
    assert [answer.status_code for answer in batch(server, "a", "b", "c", "d")] == [200] * 4
    assert server.worker_pids("full") == before


def test_only_the_reply_that_is_too_large_fails_rs_02(start):
    server = start(["max_response_size=3000"])
    server.serve("full", BATCH, config=FULL)
    before = server.worker_pids("full")
    first, large, *others = batch(server, "a", "large", "c", "d")
    assert (large.status_code, "max_response_size" in large.json()["message"]) == (507, True)
    assert [answer.status_code for answer in (first, *others)] == [200] * 3
    assert server.worker_pids("full") == before
