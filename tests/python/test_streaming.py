"""Replies of a Python handler in parts, and callers that leave in the midst of one."""

import threading
import time

import pytest
import requests
from harness import at_once, wait_until

STREAM = """
import os
import signal
import threading
import time

from ts.handler_utils.utils import CallersLeftError
from ts.protocol.otf_message_handler import send_intermediate_predict_response


class Stream:
    def initialize(self, context):
        self.made = 0
        self.late = None

    def handle(self, data, context):
        asked = [bytes(row["body"]).decode().split() for row in data]
        parts = max(int(words[1]) for words in asked)
        pause = float(context.get_request_header(0, "x-pause") or 0)
        fault = context.get_request_header(0, "x-fault")
        for index in range(len(data)):
            context.set_response_status(201, "Streaming", index)
            context.set_response_header(index, "x-batch", str(len(data)))
        self.made = 0
        for part in range(parts - 1):
            ids = context.request_ids
            texts = [f"{part} {words[0]}\\n" for words in asked]
            if fault == str(part):
                raise ValueError("in the midst")
            if fault == f"kill {part}":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                send_intermediate_predict_response(texts, ids, "ok", 200, context)
            except CallersLeftError:
                print(f"stopped after {self.made} parts", context.all_have_left())
                raise
            self.made += 1
            time.sleep(pause)
        if context.get_request_header(0, "x-late"):
            self.late = dict(context.request_ids)
            threading.Timer(0.2, self.too_late, (context,)).start()
            twice = {0: self.late[0], 1: self.late[0]}
            send_intermediate_predict_response(["once ", "twice "], twice, "", 200, context)
            send_intermediate_predict_response(["?"], {0: "unknown"}, "", 200, context)
        return [f"{parts - 1} {words[0]}\\n" for words in asked]

    def too_late(self, context):
        for _ in range(3):
            send_intermediate_predict_response(["late"], self.late, "", 200, context)
        print("sent too late")
"""
ONE = "minWorkers: 1\nmaxWorkers: 1\n"
ISOLATIONS = ["process", "thread"]


@pytest.fixture(scope="module", params=ISOLATIONS)
def server(request, tmp_path_factory):
    from contextlib import ExitStack

    from conftest import Starter

    with ExitStack() as stack:
        server = Starter(lambda: tmp_path_factory.mktemp("server"), stack)()
        isolation = f"workerIsolation: {request.param}\n"
        server.serve("one", STREAM, config=ONE + isolation)
        batched = "batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 20000\n"
        server.serve("four", STREAM, config=ONE + isolation + batched)
        mixed = "batchSize: 4\nmaxBatchDelay: 5\njobQueueSize: 40\n"
        server.serve("mixed", STREAM, config=ONE + isolation + mixed)
        yield server


def whole(name, parts):
    return "".join(f"{part} {name}\n" for part in range(parts))


def test_each_part_is_a_chunk_under_the_head_of_the_first(server):
    begun = time.monotonic()
    answer = server.predict("one", b"x 3", headers={"x-pause": "0.3"}, stream=True)
    assert (answer.status_code, answer.reason) == (201, "Streaming")
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["ts_stream_next"] == "true"
    chunks = [(chunk, time.monotonic() - begun) for chunk in answer.iter_content(None)]
    assert [chunk for chunk, _ in chunks] == [b"0 x\n", b"1 x\n", b"2 x\n"]
    assert chunks[2][1] - chunks[0][1] > 0.4, "the first part waited for the last"


def test_a_reply_of_one_part_is_an_ordinary_one(server):
    answer = server.predict("one", b"x 1")
    assert answer.text == "0 x\n"
    assert "ts_stream_next" not in answer.headers
    assert answer.headers["content-length"] == "4"


def test_each_caller_of_a_batch_gets_its_own_parts(server):
    names = ["a", "b", "c", "d"]
    answers = at_once([lambda name=name: server.predict("four", f"{name} 20") for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert answer.headers["x-batch"] == "4"
        assert answer.text == whole(name, 20)


def test_what_comes_too_late_twice_or_for_nobody_is_dropped_with_one_warning_wk_14(server):
    before = server.worker_pids("one")
    answer = server.predict("one", b"x 2", headers={"x-late": "1"})
    assert answer.text == "0 x\nonce 1 x\n"
    server.wait_for_output("sent too late")
    assert server.predict("one", b"y 2").text == whole("y", 2)
    assert server.output.count("intermediate responses were dropped") == 1, "one in a batch"
    assert server.worker_pids("one") == before


def test_a_failure_after_the_first_part_breaks_the_body_off_gr_10(server):
    for fault in ("2", "kill 2"):
        answer = server.predict("one", b"x 5", headers={"x-fault": fault}, stream=True)
        assert answer.status_code == 201
        got = b""
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            for chunk in answer.iter_content(None):
                got += chunk
        assert got == b"0 x\n1 x\n"
        assert server.predict("one", b"y 3").text == whole("y", 3)
    assert "ts_streams_broken_total" in server.metrics()


def test_a_failure_before_the_first_part_is_an_ordinary_error(server):
    answer = server.predict("one", b"x 5", headers={"x-fault": "0"})
    assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")


def test_a_handler_stops_when_its_last_caller_has_left_gr_10(server):
    answer = server.predict("one", b"x 100", headers={"x-pause": "0.1"}, stream=True)
    chunks = answer.iter_content(None)
    assert [next(chunks) for _ in range(3)] == [b"0 x\n", b"1 x\n", b"2 x\n"]
    begun = time.monotonic()
    answer.close()
    assert server.predict("one", b"y 1").text == "0 y\n"
    assert time.monotonic() - begun < 1.5, "the other 97 parts were made"
    output = server.wait_for_output(" parts True")
    stopped = [line for line in output.splitlines() if "stopped after" in line]
    assert int(stopped[-1].split("after ")[1].split()[0]) <= 6, stopped
    assert "every caller of the batch has left" in output
    assert server.describe("one")["workers"][0]["generation"] <= 3


def test_cancelling_after_every_number_of_parts_leaves_everything_as_it_was_wk_13(server):
    before = server.worker_pids("mixed")

    def leave(after):
        answer = server.predict("mixed", b"leaver 20", headers={"x-pause": "0.002"}, stream=True)
        chunks = answer.iter_content(None)
        got = b"".join(next(chunks) for _ in range(after)) if after else b""
        assert whole("leaver", 20).startswith(got.decode())
        answer.close()

    def stay(number):
        assert server.predict("mixed", f"stayer{number} 20").text == whole(f"stayer{number}", 20)

    calls = [lambda k=k: leave(min(k, 10)) for k in range(21)]
    calls += [lambda k=k: stay(k) for k in range(21)]
    at_once(calls, callers=6)
    assert server.worker_pids("mixed") == before
    status = wait_until(
        "nothing waits any more",
        lambda: (s := server.describe("mixed")["jobQueueStatus"])["pendingRequests"] == 0 and s,
    )
    assert status["remainingCapacity"] == 40


def test_a_handler_can_ask_whether_its_callers_are_there(server):
    server.serve("asks", ASKS, config=ONE)
    leaver = threading.Thread(target=lambda: leave_after(server, "asks", 0.3))
    leaver.start()
    server.wait_for_output("the caller has left")
    leaver.join()


ASKS = """
import time


class Asks:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        for _ in range(200):
            if context.has_left(0) and context.all_have_left():
                print("the caller has left")
                break
            time.sleep(0.05)
        return ["done"]
"""


def leave_after(server, model, seconds):
    with pytest.raises(requests.exceptions.Timeout):
        requests.post(f"{server.inference}/predictions/{model}", b"x", timeout=seconds)


def test_no_context_is_a_clear_error(server):
    server.serve("scripted")
    code = """
from ts.handler_utils.utils import send_intermediate_predict_response
try:
    send_intermediate_predict_response(["x"], context.request_ids, "", 200)
except RuntimeError as error:
    result = [str(error)]
"""
    assert "need the context" in server.run(code).text
    server.manage("DELETE", "/models/scripted")
