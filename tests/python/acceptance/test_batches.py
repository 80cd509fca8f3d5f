"""Micro-batches and sequences (section 6)."""

import re
import time

import requests
from harness import at_once, wait_until

MICRO = """
from ts.handler_utils.micro_batching import MicroBatching

class Micro:
    def __init__(self):
        self.handle = MicroBatching(self, micro_batch_size=2)

    def initialize(self, context):
        self.handle.parallelism = context.model_yaml_config["micro_batching"]["parallelism"]

    def preprocess(self, data):
        return [bytes(row["body"]).decode() for row in data]

    def inference(self, data):
        assert len(data) <= 2
        return data

    def postprocess(self, data):
        return ["label " + text for text in data]

    def handle(self, data, context):
        raise AssertionError("replaced in the constructor")
"""
SUMS = """
class Sums:
    def initialize(self, context):
        self.sums = {}
        self.worker = str(id(self))

    def handle(self, data, context):
        answers = []
        for index, row in enumerate(data):
            name = context.get_request_header(index, "ts_request_sequence_id")
            self.sums[name] = self.sums.get(name, 0) + int(bytes(row["body"]))
            context.set_response_header(index, "ts_request_sequence_id", name)
            context.set_response_header(index, "x-worker", self.worker)
            answers.append(str(self.sums[name]))
        return answers
"""
# Adds up numbers, sends dots until it is cancelled, and closes its sequence when told to.
STATEFUL = """
import time

class Stateful:
    def initialize(self, context):
        context.cache = {}
        self.sums = {}
        self.cancelled = set()

    def handle(self, data, context):
        time.sleep(0.01)
        results, criteria = [], []
        for gone in set(context.cache) - set(context.request_ids.values()):
            del context.cache[gone]
        for index, row in enumerate(data):
            request = context.request_ids[index]
            name = context.get_sequence_id(index)
            if request not in context.cache:
                context.cache[request] = bytes(row["body"]).decode()
                context.set_response_header(index, "ts_request_sequence_id", name)
            text = context.cache[request]
            if text == "cancel":
                self.cancelled.add(name)
            elif text == "close":
                context.set_response_header(index, "ts_request_sequence_end", name)
            elif text != "stream":
                self.sums[name] = self.sums.get(name, 0) + int(text)
            ends = text != "stream" or name in self.cancelled
            results.append("." if text == "stream" else str(self.sums.get(name, 0)))
            criteria.append(lambda _, ends=ends: ends)
        context.stopping_criteria = criteria
        return results
"""
ID = "ts_request_sequence_id"


def test_micro_batches_give_each_request_its_label(server):
    """test_example_micro_batching: a batch of 32 in pieces of two, 4 and 16 requests at once."""
    config = (
        "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 32\nmaxBatchDelay: 200\nmicro_batching:\n"
        "  micro_batch_size: 2\n  parallelism: {preprocess: 2, inference: 1, postprocess: 2}\n"
    )
    server.serve("micro", MICRO, config=config)
    for count in (4, 16):
        answers = at_once([lambda n=n: server.predict("micro", str(n)) for n in range(count)])
        assert [answer.text for answer in answers] == [f"label {n}" for n in range(count)]


def test_each_sequence_stays_with_its_worker(server):
    """test_example_stateful_sequence_batching_http: two workers, two sequences at once."""
    config = (
        "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nsequenceBatching: true\n"
        "sequenceMaxIdleMSec: 60000\nmaxNumSequence: 4\nmaxSequenceJobQueueSize: 10\n"
    )
    server.serve("sums", SUMS, config=config)

    def sequence(name, first):
        answers = [
            server.predict("sums", str(number), headers={ID: name})
            for number in range(first, first + 10, 2)
        ]
        assert {answer.headers[ID] for answer in answers} == {name}
        assert len({answer.headers["x-worker"] for answer in answers}) == 1
        return [answer.text for answer in answers]

    odd, even = at_once([lambda: sequence("odd", 1), lambda: sequence("even", 2)])
    assert odd == ["1", "4", "9", "16", "25"]
    assert even == ["2", "6", "12", "20", "30"]


def stateful(server, name, idle=60_000, whole=60_000):
    """A model of which two sequences can be open, with the limits of each in milliseconds."""
    config = (
        "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 10\nsequenceBatching: true\n"
        f"continuousBatching: true\nsequenceMaxIdleMSec: {idle}\nsequenceTimeoutMSec: {whole}\n"
        "maxNumSequence: 2\nmaxSequenceJobQueueSize: 4\n"
    )
    server.serve(name, STATEFUL, config=config)

    def send(text, sequence=None, **options):
        headers = {ID: sequence} if sequence else {}
        return server.predict(name, text, headers=headers, **options)

    return send


def test_a_sequence_without_a_name_gets_one_and_is_closed_by_its_handler(server):
    """test_example_stateful_sequence_continuous_batching_http: start, later requests, end."""
    send = stateful(server, "opened")
    first = send("3")
    sequence = first.headers[ID]
    assert re.fullmatch(r"ts-seq-[0-9a-f-]{36}", sequence)
    assert [first.text, send("4", sequence).text, send("5", sequence).text] == ["3", "7", "12"]
    assert send("close", sequence).status_code == 200
    over = send("1", sequence)
    assert over.status_code == 503, "what comes later is not part of it"
    assert 'Model "opened" has no worker to serve inference request' in over.json()["message"]


def test_a_stream_is_cancelled_on_its_own_sequence(server):
    """test_example_stateful_sequence_continuous_batching_http: cancel."""
    send = stateful(server, "streamed")
    with send("stream", stream=True) as streamed:
        assert streamed.headers["Transfer-Encoding"] == "chunked"
        parts = streamed.iter_content(1)
        assert [next(parts) for _ in range(3)] == [b"."] * 3
        cancelled = requests.post(
            f"{server.inference}/predictions/streamed",
            data="cancel",
            headers={ID: streamed.headers[ID]},
            timeout=20,
        )
        assert cancelled.status_code == 200
        assert set(parts) <= {b"."}


def test_an_idle_sequence_ends(server):
    """test_example_stateful_sequence_continuous_batching_http: `sequenceMaxIdleMSec`."""
    send = stateful(server, "idle", idle=500)
    sequence = send("1").headers[ID]
    assert send("2", sequence).text == "3"
    # Nothing may look at it meanwhile: a request would keep it open.
    time.sleep(1.2)
    assert send("1", sequence).status_code == 503


def test_a_sequence_ends_when_its_time_is_over(server):
    """test_example_stateful_sequence_continuous_batching_http: `sequenceTimeoutMSec`."""
    send = stateful(server, "limited", whole=1000)
    began = time.monotonic()
    sequence = send("1").headers[ID]
    wait_until("it is over", lambda: send("1", sequence).status_code == 503, limit=10)
    assert time.monotonic() - began >= 1, "however busy it is, and not before"


def test_more_sequences_than_places_can_follow_each_other(server):
    """test_example_stateful_sequence_continuous_batching_http: one after another."""
    send = stateful(server, "turns")
    for number in range(5):
        first = send(str(number))
        assert (first.status_code, first.text) == (200, str(number))
        assert send("close", first.headers[ID]).status_code == 200
