"""Failures of single requests, continuous batching, coroutines and micro-batches of handlers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from harness import at_once, wait_until

ONE = "minWorkers: 1\nmaxWorkers: 1\n"
FULL = ONE + "batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 20000\n"
ISOLATIONS = ["process", "thread"]

PICKY = """
from ts.service import PredictionException


class Picky:
    side_effect_free = True

    def initialize(self, context):
        self.calls = []

    def handle(self, data, context):
        texts = [bytes(row["body"]).decode() for row in data]
        print("called with", ",".join(texts))
        if "raise" in texts:
            raise ValueError("of one request")
        if "refuse" in texts:
            raise PredictionException("not this one", 422)
        if "memory" in texts and len(texts) > 1:
            raise MemoryError
        if "type" in texts:
            return [object() if text == "type" else text for text in texts]
        return [self.answer(text) for text in texts]

    def answer(self, text):
        if text == "item":
            return KeyError("of one item")
        if text == "refused item":
            return PredictionException("not this item", 418)
        return text
"""


@pytest.fixture(scope="module", params=ISOLATIONS)
def isolation(request):
    return f"workerIsolation: {request.param}\n"


@pytest.fixture(scope="module")
def server(isolation, tmp_path_factory):
    from contextlib import ExitStack

    from conftest import Starter

    with ExitStack() as stack:
        server = Starter(lambda: tmp_path_factory.mktemp("server"), stack)()
        server.serve("picky", PICKY, config=FULL + isolation)
        plain = PICKY.replace("side_effect_free", "_")
        server.serve("plain", plain, config=FULL + isolation)
        server.serve("told", plain, config=FULL + isolation + "isolateBadRequests: true\n")
        server.serve("not", PICKY, config=FULL + isolation + "isolateBadRequests: false\n")
        yield server


def batch(server, model, *texts):
    answers = at_once([lambda text=text: server.predict(model, text) for text in texts])
    return [(answer.status_code, answer.text) for answer in answers]


def calls_with(server, model, text):
    """How often the handler was called with a request, once all of its lines are there."""
    batch(server, model, "b", "c", "d", f"after {text}")
    lines = server.wait_for_output(f"after {text}").splitlines()
    called = [line for line in lines if "called with" in line and text in line]
    return len(called) - 1


def test_an_exception_in_place_of_a_result_fails_that_request_alone_bt_02(server):
    first, item, refused, last = batch(server, "plain", "a", "item", "refused item", "d")
    assert (first, last) == ((200, "a"), (200, "d"))
    assert item[0] == 503
    assert "Prediction failed" in item[1]
    assert refused[0] == 418
    assert "not this item" in refused[1]
    assert "of the batch failed" in server.wait_for_output("KeyError: 'of one item'")
    assert calls_with(server, "plain", "refused item") == 1


@pytest.mark.parametrize("model", ["picky", "told"])
def test_only_the_request_that_a_handler_raises_on_fails(server, model):
    for bad, status in (("raise", 503), ("refuse", 422)):
        for place in range(4):
            texts = [bad if index == place else f"text {index}" for index in range(4)]
            for text, answer in zip(texts, batch(server, model, *texts), strict=True):
                if text == bad:
                    assert answer[0] == status, answer
                else:
                    assert answer == (200, text)
    # Half a batch needs half the memory.
    answers = batch(server, model, "memory", "b", "c", "d")
    assert answers == [(200, text) for text in ("memory", "b", "c", "d")]


@pytest.mark.parametrize("model", ["plain", "not"])
def test_a_handler_that_does_not_say_it_is_free_of_side_effects_is_called_once(server, model):
    answers = batch(server, model, "a", "raise", "c", f"for {model}")
    assert [status for status, _ in answers] == [503] * 4
    assert calls_with(server, model, f"for {model}") == 1


def test_what_was_returned_and_cannot_be_sent_is_no_reason_to_call_again(server):
    answers = batch(server, "picky", "a", "type", "c", "for type")
    assert [status for status, _ in answers] == [503] * 4
    assert calls_with(server, "picky", "for type") == 1


CONTINUOUS = """
import time


class Continuous:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        time.sleep(0.02)
        for gone in set(context.cache) - set(context.request_ids.values()):
            print("forgets", context.cache.pop(gone)["name"])
        answers, criteria = [], []
        for index, row in enumerate(data):
            key = context.get_request_id(index)
            assert context.get_request_header(index, "x-mine") == "kept"
            if key not in context.cache:
                name, parts = bytes(row["body"]).decode().split()
                context.cache[key] = {"name": name, "parts": int(parts), "made": 0}
            else:
                assert row == {}, row
            state = context.cache[key]
            state["made"] += 1
            answers.append(f"{state['made'] - 1} {state['name']} {len(data)}\\n")
            criteria.append(self.criterion(state))
            context.set_response_header(index, "x-name", state["name"])
        context.stopping_criteria = criteria
        return answers

    def criterion(self, state):
        if state["parts"] == 0:
            return lambda answer: None
        return lambda answer: state["made"] >= state["parts"]
"""


def continuous(server, name, parts):
    return server.predict("continuous", f"{name} {parts}", headers={"x-mine": "kept"}, stream=True)


def parts_of(answer):
    return [tuple(line.split()) for line in answer.text.splitlines()]


def test_requests_join_and_leave_a_continuous_batch(server, isolation):
    config = ONE + isolation + "continuousBatching: true\nbatchSize: 3\nmaxBatchDelay: 0\n"
    server.serve("continuous", CONTINUOUS, config=config)
    assert server.describe("continuous")["continuousBatching"] is True
    first = continuous(server, "first", 30)
    assert first.headers["ts_stream_next"] == "true"
    assert first.headers["x-name"] == "first"
    short = continuous(server, "short", 3)
    assert [line[:2] for line in parts_of(short)] == [(str(part), "short") for part in range(3)]
    single = continuous(server, "single", 0)
    assert single.text.startswith("0 single")
    assert "ts_stream_next" not in single.headers
    lines = parts_of(first)
    assert [line[:2] for line in lines] == [(str(part), "first") for part in range(30)]
    assert {line[2] for line in lines} == {"1", "2"}

    answers = at_once([lambda n=n: continuous(server, f"n{n}", 5 + n % 4) for n in range(12)])
    for number, answer in enumerate(answers):
        lines = parts_of(answer)
        assert [line[:2] for line in lines] == [
            (str(part), f"n{number}") for part in range(5 + number % 4)
        ]
        assert all(1 <= int(line[2]) <= 3 for line in lines)

    leaver = continuous(server, "leaver", 1000)
    next(leaver.iter_content(None))
    leaver.close()
    server.wait_for_output("Connection to client got closed; Removing job: ")
    assert continuous(server, "next", 1).text == "0 next 1\n"
    server.wait_for_output("forgets leaver")
    server.manage("DELETE", "/models/continuous")


COROUTINE = """
import asyncio
import os
import signal
import threading
import time

from ts.handler_utils.utils import CallersLeftError, send_intermediate_predict_response
from ts.service import PredictionException


class Coroutine:
    def initialize(self, context):
        self.now = self.most = 0

    async def handle(self, data, context):
        text = bytes(data[0]["body"]).decode()
        key = context.get_request_id()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            answer = await self.answer(text, context)
        except asyncio.CancelledError:
            print("cancelled", text)
            raise
        finally:
            self.now -= 1
        assert context.get_request_id() == key
        context.set_response_header(0, "x-key", key)
        context.metrics.add_counter("Answered", 1, idx=0)
        return [answer]

    async def answer(self, text, context):
        if text == "most":
            return str(self.most)
        if text == "raise":
            raise ValueError("of one")
        if text == "refuse":
            raise PredictionException("no", 422)
        if text == "item":
            return KeyError("x")
        if text == "hang":
            await asyncio.sleep(1000)
        if text == "block":
            time.sleep(1000)
        if text == "exit":
            raise SystemExit(3)
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        name, _, parts = text.partition(" ")
        for part in range(int(parts or 1) - 1):
            chunk = [f"{part} {name}\\n"]
            try:
                send_intermediate_predict_response(chunk, context.request_ids, "", 200, context)
            except CallersLeftError:
                print("stopped", name)
                raise
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        return f"{int(parts or 1) - 1} {name}\\n"
"""


@pytest.fixture
def coroutine(server, isolation):
    server.serve(
        "coroutine",
        COROUTINE,
        config=ONE + isolation + "asyncCommunication: true\nresponseTimeout: 2\n",
    )
    yield lambda text, **options: server.predict("coroutine", text, **options)
    server.manage("DELETE", "/models/coroutine")


def test_a_coroutine_serves_many_requests_at_once(server, coroutine):
    begun = time.monotonic()
    answers = at_once([lambda n=n: coroutine(f"n{n}") for n in range(40)], callers=40)
    assert time.monotonic() - begun < 5
    for number, answer in enumerate(answers):
        assert answer.text == f"0 n{number}\n"
        assert answer.headers["x-key"] == answer.headers["x-request-id"]
    assert int(coroutine("most").text) > 10
    assert "Answered" in server.metrics()

    answers = at_once([lambda n=n: coroutine(f"s{n} 20") for n in range(10)], callers=10)
    for number, answer in enumerate(answers):
        assert answer.text == "".join(f"{part} s{number}\n" for part in range(20))
        assert answer.headers["ts_stream_next"] == "true"


def test_failures_of_a_coroutine_are_of_one_request(server, coroutine):
    expected = {"raise": 503, "refuse": 422, "item": 503, "exit": 503, "x": 200, "y": 200}
    answers = at_once([lambda text=text: coroutine(text) for text in expected])
    assert [answer.status_code for answer in answers] == list(expected.values())

    quick = [lambda n=n: coroutine(f"n{n}") for n in range(5)]
    hung, *others = at_once([lambda: coroutine("hang"), *quick])
    assert hung.status_code == 500
    assert "`responseTimeout` of 2 s" in hung.json()["message"]
    assert {answer.status_code for answer in others} == {200}
    server.wait_for_output("cancelled hang")
    assert server.describe("coroutine")["workers"][0]["generation"] == 1

    leaver = coroutine("leaver 200", stream=True)
    assert next(leaver.iter_content(None)) == b"0 leaver\n"
    leaver.close()
    server.wait_for_output("stopped leaver")


def test_the_end_of_the_worker_answers_what_a_coroutine_had(server, coroutine):
    for end in ("die", "block"):
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(broken(lambda: coroutine("x 100"))) for _ in range(4)]
            wait_until("the worker has all four", lambda: running(server) == 4)
            assert coroutine(end).status_code in (500, 507)
            assert all(call.result() for call in waiting), end
        wait_until("it is back", lambda: coroutine("y").status_code == 200)
    assert server.describe("coroutine")["workers"][0]["generation"] == 3


def running(server):
    return server.manage("GET", "/models/coroutine/batching").json()["runningRequests"]


def broken(call):
    def run():
        try:
            return call().status_code >= 500
        except requests.exceptions.ChunkedEncodingError:
            return True

    return run


def test_a_handler_that_is_no_coroutine_does_not_load(server, isolation):
    from harness import write_model

    config = ONE + isolation + "asyncCommunication: true\n"
    write_model(server.store, "sync", PICKY, config=config)
    answer = server.register("sync")
    assert answer.status_code == 500
    assert "`asyncCommunication` needs a handler whose `handle` is a coroutine" in answer.text


MICRO = """
from ts.handler_utils.micro_batching import MicroBatching


class Micro:
    def __init__(self):
        self.handle = MicroBatching(self, micro_batch_size=2)

    def initialize(self, context):
        self.handle.parallelism = context.model_yaml_config["parallelism"]

    def preprocess(self, data):
        return [(self.handle.get_micro_batch_idx(), bytes(row["body"]).decode()) for row in data]

    def inference(self, data):
        if any(text == "raise" for _, text in data):
            raise ValueError("in a stage")
        return data

    def postprocess(self, data):
        return [f"{text} in {index}" for index, text in data]

    def handle(self, data, context):
        raise AssertionError("replaced")
"""


def test_micro_batches_answer_in_order_and_an_exception_does_not_hang(server, isolation):
    config = FULL + isolation + "parallelism: {inference: 2}\n"
    server.serve("micro", MICRO, config=config)
    begun = time.monotonic()
    answers = batch(server, "micro", "a", "b", "c", "d")
    places = sorted(text.split(" in ")[1] for _, text in answers)
    assert [text[0] for _, text in answers] == ["a", "b", "c", "d"]
    assert places == ["0", "0", "1", "1"]
    assert [status for status, _ in batch(server, "micro", "a", "b", "c", "raise")] == [503] * 4
    assert time.monotonic() - begun < 10
    assert "in a stage" in server.wait_for_output("in a stage")
    assert [status for status, _ in batch(server, "micro", "a", "b", "c", "d")] == [200] * 4
    server.manage("DELETE", "/models/micro")


def test_models_with_a_loop_of_their_own_leave_nothing_behind(server, isolation):
    config = ONE + isolation + "asyncCommunication: true\n"
    for _ in range(2):
        server.serve("coming", COROUTINE, config=config)
        running = threading.Thread(target=lambda: server.predict("coming", "x"))
        running.start()
        assert server.predict("coming", "y").status_code == 200
        pids = server.worker_pids("coming")
        running.join()
        assert server.manage("DELETE", "/models/coming").status_code == 200
        wait_until("its host is gone", lambda pids=pids: not set(pids) & set(server.children()))
