"""The HTTP edge with a Python handler behind it: codings, ids, traces, events, timing."""

import gzip
import http.client
import json
import re
import zlib

import pytest
from harness import at_once, wait_until

STREAM = """
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    kind = context.get_request_header(0, "x-kind")
    if kind:
        context.set_response_header(0, "Content-TYPE", kind)
    parts = eval(bytes(data[0]["body"]).decode())
    for part in parts[:-1]:
        if part == "raise":
            raise ValueError("in the midst")
        send_intermediate_predict_response([part], context.request_ids, "", 200, context)
    return [parts[-1]]
"""
EVENTS = {"accept": "text/event-stream"}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def values(answer) -> dict[str, float]:
    """The durations of `Server-Timing`."""
    entries = answer.headers["server-timing"].split(", ")
    return {name: float(value) for name, value in (entry.split(";dur=") for entry in entries)}


def events(text: str) -> list[tuple[str, str]]:
    """What a browser makes of a stream of events: type and data of each that it dispatches."""
    found = []
    for block in re.split(r"\r\n\r\n|\n\n|\r\r", text):
        lines = [line.partition(": ")[::2] for line in re.split(r"\r\n|\n|\r", block) if line]
        data = [value for name, value in lines if name == "data"]
        kind = [value for name, value in lines if name == "event"]
        if any(data):
            found.append((kind[-1] if kind else "message", "\n".join(data)))
    return found


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_handler_gets_a_compressed_body_as_it_was(server, coding):
    encode = {"gzip": gzip.compress, "deflate": zlib.compress}[coding]
    code = """
names = ("content-encoding", "content-length", "content-type")
result = [{name: context.get_request_header(0, name) for name in names}]
"""
    body = encode(code.encode())
    headers = {"content-encoding": coding, "content-type": "application/x-python"}
    seen = server.predict("scripted", body, headers=headers).json()
    assert seen == {
        "content-encoding": None,
        "content-length": str(len(code)),
        "content-type": "application/x-python",
    }


def test_what_a_handler_has_compressed_is_not_touched(server):
    code = """
import gzip
context.set_response_header(0, "CONTENT-Encoding", "gzip")
context.set_response_content_type(0, "text/plain")
result = [gzip.compress(b"by the handler " * 1000)]
"""
    answer = server.run(code, stream=True, headers={"accept-encoding": "zstd, gzip, br"})
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.raw.read(decode_content=False)) == b"by the handler " * 1000


@pytest.mark.parametrize("kind", ["", "application/json", "text/html; charset=utf-8"])
def test_clients_decompress_without_being_told(server, kind):
    code = f"""
if {kind!r}:
    context.set_response_content_type(0, {kind!r})
result = [{{"numbers": list(range(2000))}}]
"""
    answer = server.run(code, headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < len(answer.content) / 2
    assert answer.json() == {"numbers": list(range(2000))}
    plain = server.run(code, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content


def test_a_clients_id_is_the_one_that_everybody_sees(server):
    code = """
result = [[context.get_request_id(0), context.get_request_header(0, "traceparent")]]
"""
    headers = {"x-request-id": "order-66.a", "traceparent": TRACE}
    answer = server.run(code, headers=headers)
    assert answer.json() == ["order-66.a", TRACE]
    assert answer.headers["x-request-id"] == "order-66.a"
    assert answer.headers["traceparent"] == TRACE
    # A trace that is none is not passed on.
    answer = server.run(code, headers={"traceparent": "00-nonsense"})
    assert answer.json()[1] is None
    assert "traceparent" not in answer.headers

    failed = server.run("raise ValueError('why')", headers={"x-request-id": "fails-7"})
    assert failed.status_code == 503
    assert failed.headers["x-request-id"] == "fails-7"
    wait_until(
        "the log names the request",
        lambda: any("fails-7" in line for line in server.output.splitlines()),
    )


def test_requests_of_one_id_in_one_batch_are_told_apart(server):
    source = """
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row["body"]).decode() for row in data]
    send_intermediate_predict_response(
        [f"first of {body}\\n" for body in bodies], context.request_ids, "", 200, context
    )
    ids = [context.get_request_id(index) for index in range(len(data))]
    return [f"{len(set(ids))} of {len(data)}, {body}" for body in bodies]
"""
    server.serve(
        "together",
        source,
        config="minWorkers: 1\nmaxWorkers: 1\n"
        "batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 20000\n",
    )
    for _ in range(3):
        bodies = [f"caller {number}" for number in range(4)]
        calls = [
            lambda body=body: server.predict("together", body, headers={"x-request-id": "same"})
            for body in bodies
        ]
        for body, answer in zip(bodies, at_once(calls), strict=True):
            assert answer.headers["x-request-id"] == "same"
            assert answer.text == f"first of {body}\n4 of 4, {body}"


def test_a_continuous_batch_does_not_take_a_new_request_for_one_that_has_left(server):
    source = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        answers = []
        for index, row in enumerate(data):
            name = context.get_request_id(index)
            if name not in context.cache:
                context.cache[name] = {"text": bytes(row["body"]).decode(), "step": 0}
            kept = context.cache[name]
            kept["step"] += 1
            answers.append(f"{kept['text']} ")
        context.stopping_criteria = [
            (lambda answer, name=context.get_request_id(index): context.cache[name]["step"] == 5)
            for index in range(len(data))
        ]
        return answers
"""
    server.serve("steps", source, config="continuousBatching: true\nbatchSize: 4\n")
    for number in range(20):
        headers = {"x-request-id": "again"}
        leaver = server.predict("steps", "leaver", headers=headers, stream=True)
        leaver.close()
        answer = server.predict("steps", f"n{number}", headers=headers)
        assert answer.text == f"n{number} " * 5


def test_parts_become_events_that_a_browser_reads(server):
    server.serve("stream", STREAM)
    parts = [
        "one",
        "two\nlines",
        "",
        "北京 😀",
        b"\xff\xfe",
        {"a": [1]},
        "x\r\ny\rz",
        "event: end\n",
    ]
    answer = server.predict("stream", repr(parts).encode(), headers=EVENTS)
    assert answer.headers["content-type"] == "text/event-stream"
    answer.encoding = "utf-8"
    assert events(answer.text) == [
        ("message", "one"),
        ("message", "two\nlines"),
        ("message", "北京 😀"),
        ("base64", "//4="),
        ("message", json.dumps({"a": [1]}, indent=2)),
        ("message", "x\ny\nz"),
        ("message", "event: end\n"),
        ("end", "[DONE]"),
    ]


def test_a_failure_after_the_first_event_is_the_last_one(server):
    if "stream" not in server.models():
        server.serve("stream", STREAM)
    answer = server.predict("stream", b"['one', 'raise', 'never']", headers=EVENTS)
    assert answer.status_code == 200
    first, (kind, data) = events(answer.text)
    assert first == ("message", "one")
    assert kind == "error"
    assert json.loads(data) == {
        "code": 503,
        "type": "InternalServerException",
        "message": "Prediction failed",
    }


def test_events_of_the_handlers_own_go_as_they_are(server):
    if "stream" not in server.models():
        server.serve("stream", STREAM)
    own = 'data: {"choices": []}\n\n'
    headers = EVENTS | {"x-kind": "text/event-stream; charset=utf-8"}
    body = repr([own, own, "data: [DONE]\n\n"]).encode()
    answer = server.predict("stream", body, headers=headers)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text == own + own + "data: [DONE]\n\n"


def test_the_standard_client_reads_events_one_by_one(server):
    if "stream" not in server.models():
        server.serve("stream", STREAM)
    client = http.client.HTTPConnection(server.inference.removeprefix("http://"), timeout=40)
    for _ in range(2):
        client.request("PUT", "/predictions/stream", b"['a', 'b']", EVENTS)
        answer = client.getresponse()
        assert answer.status == 200
        lines = [answer.readline() for _ in range(4)]
        assert lines == [b"data: a\n", b"\n", b"data: b\n", b"\n"]
        assert answer.read() == b"event: end\ndata: [DONE]\n\n"
    client.close()


def test_an_answer_tells_where_its_time_went(server):
    code = "import time; time.sleep(0.08); result = ['x']"
    answer = server.run(code)
    spent = values(answer)
    assert list(spent) == ["queue", "batch", "handler"]
    assert spent["handler"] >= 80
    assert sum(spent.values()) <= answer.elapsed.total_seconds() * 1e3
    own = "context.set_response_header(0, 'Server-Timing', 'db;dur=5'); result = ['x']"
    assert list(values(server.run(own))) == ["db", "queue", "batch", "handler"]


def test_json_of_the_server_ends_no_line_of_javascript(server):
    answer = server.infer("/predictions/a%E2%80%A8b%E2%80%A9<c>")
    assert answer.status_code == 404
    assert answer.text == (
        '{\n  "code": 404,\n  "type": "ModelNotFoundException",\n'
        '  "message": "Model not found: a\\u2028b\\u2029<c>"\n}\n'
    )
