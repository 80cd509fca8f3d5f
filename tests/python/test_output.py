"""What becomes of a handler's results, statuses, headers and exceptions."""

import json
import random
import re

import pytest
from harness import ROOT, at_once, wait_until

RESULTS = {
    "dict": ({"a": [1, 2.5, None, True]}, None),
    "list": ([1, "two"], None),
    "text": ("text", b"text"),
    "json-text": ('{"a":1}', b'{"a":1}'),
    "bytes": (b"\x00\xff", b"\x00\xff"),
    "bytearray": (bytearray(b"\x01"), b"\x01"),
    "int": (5, b"5"),
    "float": (0.1, b"0.1"),
    "none": (None, b"null"),
    "bool": (True, b"true"),
    "empty": ("", b""),
    "text-cjk": ("北京 서울 😀", "北京 서울 😀".encode()),
    "dict-cjk": ({"市": "北京 서울 😀"}, None),
    "not-a-number": (float("inf"), b"Infinity"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_has_one_form_and_no_type_of_its_own_in_03_in_07(server, kind):
    result, expected = RESULTS[kind]
    if expected is None:
        expected = json.dumps(result, indent=2).encode()
    answer = server.run(f"inf = float('inf'); result = [{result!r}]")
    assert (answer.status_code, answer.content) == (200, expected)
    assert "content-type" not in answer.headers
    assert answer.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize("name", ["content-type", "Content-Type", "CONTENT-TYPE"])
@pytest.mark.parametrize("kind", RESULTS)
def test_a_type_that_the_handler_sets_is_sent_once_as_it_is_in_03_in_10(server, kind, name):
    result, expected = RESULTS[kind]
    if expected is None:
        expected = json.dumps(result, indent=2).encode()
    own = "application/x-own; charset=Latin-1"
    code = f"""
inf = float('inf')
context.set_response_header(0, {name!r}, {own!r})
result = [{result!r}]
"""
    status, headers, body = raw_answer(server, b"/predictions/scripted", code.encode())
    assert (status, body) == ("HTTP/1.1 200 ", expected)
    names = [key.lower() for key, _ in headers]
    assert len(names) == len(set(names))
    sent = {key.lower(): value for key, value in headers}
    assert sent["content-type"] == own
    assert sent["content-length"] == str(len(expected))


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1 << 20, 6_500_000])
def test_bodies_of_every_size_arrive_whole_in_15(server, size):
    server_side = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
    if "mirror" not in server.models():
        server.serve("mirror", server_side, config="batchSize: 4\nmaxBatchDelay: 20\n")
    bodies = [random.Random(caller).randbytes(size) for caller in range(4)]
    calls = [lambda body=body: server.predict("mirror", body) for body in bodies]
    for body, answer in zip(bodies, at_once(calls), strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.content == body


@pytest.mark.parametrize("words", ["北京", "서울", "😀 é", "a\u0301 \u202e ß"])
def test_text_of_any_script_comes_back_as_it_was_sent_in_07(server, words):
    model = "模型-é"
    if model not in server.models():
        server.serve(model, "def handle(data, context):\n    return data and [data[0]['body']]\n")
    assert server.describe(model)["modelName"] == model
    for kind in ("text/plain", "text/plain; charset=utf-8", "application/octet-stream"):
        answer = server.predict(model, words.encode(), headers={"content-type": kind})
        assert (answer.status_code, answer.content) == (200, words.encode())
    sent = json.dumps({words: [words]}, ensure_ascii=False).encode()
    answer = server.predict(model, sent, headers={"content-type": "application/json"})
    assert answer.json() == {words: [words]}


def test_a_lone_surrogate_costs_nobody_the_answer_in_07(server):
    assert server.run(r"result = ['a\ud800b']").content == b"a?b"
    assert server.run(r"result = [{'a': '\ud800'}]").content == b'{\n  "a": "\\ud800"\n}'
    assert server.run(r"print('\ud800'); result = ['still here']").text == "still here"


def test_a_handler_chooses_status_reason_and_headers(server):
    code = """
context.set_response_status(418, "I am a teapot", 0)
context.set_response_content_type(0, "application/x-tea")
context.set_response_header(0, "X-Leaves", 3)
result = ["hot"]
"""
    answer = server.run(code)
    assert (answer.status_code, answer.reason, answer.text) == (418, "I am a teapot", "hot")
    assert answer.headers["content-type"] == "application/x-tea"
    assert answer.headers["x-leaves"] == "3"
    answer = server.run("context.request_processor[0].report_status(202); result = ['ok']")
    assert (answer.status_code, answer.reason) == (202, "")
    for impossible in ("99", "1000", "'x'", "101"):
        answer = server.run(f"context.set_response_status({impossible}, '', 0); result = ['x']")
        assert (answer.status_code, answer.json()["type"]) == (503, "InternalServerException"), (
            impossible
        )


def raw_answer(
    server, path: bytes, body: bytes = b"", api: str = "inference", method: bytes = b"POST"
):
    head = b"%s %s HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n" % (
        method,
        path,
        len(body),
    )
    answer = server.raw(head + b"content-type: application/octet-stream\r\n\r\n" + body, api)
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, [line.partition(": ")[::2] for line in lines], body


def test_a_handler_cannot_split_or_repeat_headers_in_10(server):
    before = server.worker_pids("scripted")
    code = rb"""
for name, value in {
    "x-split": "1\r\nset-cookie: stolen=1\r\n\r\n<html>",
    "x-split-2": "1\nx-in: 1", "x-nul": "a\0b",
    "x-bad name": "1", "x-in\r\nx-in2": "1", "": "1",
    "X-Twice": "1", "x-twice": "2", "Content-Type": "a/b", "content-type": "c/d",
    "Content-Length": "1", "Transfer-Encoding": "chunked", "Connection": "keep-alive",
    "X-Request-Id": "mine", "Pragma": "mine", "x-good": "fine",
}.items():
    context.set_response_header(0, name, value)
context.set_response_status(200, "fine\r\nx-in3: 1", 0)
result = ["whole body"]
"""
    status, headers, body = raw_answer(server, b"/predictions/scripted", code)
    assert (status.rstrip(), body) == ("HTTP/1.1 200", b"whole body")
    names = [name.lower() for name, _ in headers]
    assert sorted(set(names)) == sorted(names), "every header once"
    told = {name.lower(): value for name, value in headers}
    assert (told["x-twice"], told["content-type"], told["x-good"]) == ("2", "c/d", "fine")
    assert (told["content-length"], told["pragma"]) == ("10", "no-cache")
    assert told["x-request-id"] != "mine"
    assert not {"set-cookie", "x-in", "x-in2", "x-in3", "transfer-encoding"} & set(names)
    assert server.worker_pids("scripted") == before


@pytest.mark.parametrize(
    ("api", "method", "path", "status"),
    [
        ("inference", b"GET", b"/ping", 200),
        ("inference", b"POST", b"/predictions/scripted", 200),
        ("inference", b"POST", b"/predictions/absent", 404),
        ("inference", b"POST", b"/nowhere", 404),
        ("management", b"GET", b"/models", 200),
        ("management", b"PATCH", b"/models", 405),
        ("management", b"POST", b"/models", 400),
        ("metrics_api", b"GET", b"/metrics", 200),
    ],
)
def test_no_route_sends_a_header_twice_in_10(server, api, method, path, status):
    line, headers, _ = raw_answer(server, path, b"result = ['x']", api, method)
    assert line.startswith(f"HTTP/1.1 {status} ")
    names = [name.lower() for name, _ in headers]
    assert sorted(set(names)) == sorted(names)
    expected = {"x-request-id", "pragma", "cache-control", "expires", "content-length"}
    assert expected <= set(names)


def failed(answer, status, message):
    body = answer.json()
    assert (answer.status_code, body["code"], body["message"]) == (status, status, message)
    assert body["type"] == "InternalServerException"
    assert answer.headers["content-type"] == "application/json"


RAISED = {
    "ValueError('no')": (503, "Prediction failed"),
    "SystemExit(3)": (503, "Prediction failed"),
    "KeyboardInterrupt()": (503, "Prediction failed"),
    "MemoryError()": (507, "Out of resources"),
    "RuntimeError('CUDA out of memory')": (507, "Out of resources"),
    "PredictionException('mine')": (500, "mine"),
    "PredictionException('bad input', 400)": (400, "bad input"),
    "PredictionException('unprocessable é', 422)": (422, "unprocessable é"),
    "PredictionException('odd', 513)": (513, "odd"),
    "PredictionException('custom', 599)": (599, "custom"),
    "PredictionException('no such status', 7)": (500, "no such status"),
}


@pytest.mark.parametrize("raised", RAISED)
def test_an_exception_has_its_status_and_its_traceback_the_request_id_in_05(server, raised):
    before = server.worker_pids("scripted")
    answer = server.run(f"from ts.service import PredictionException\nraise {raised}")
    failed(answer, *RAISED[raised])
    title, kind = (
        f"handler failed on request {answer.headers['x-request-id']}",
        raised.partition("(")[0],
    )
    told = rf"{title}[^\n]*\n[^\n]*Traceback \(most recent call last\):(.|\n)*{kind}"

    def model_log() -> str:
        # Other threads of the server may log in between.
        return "\n".join(line for line in server.output.splitlines() if " MODEL_LOG - " in line)

    wait_until("the traceback is told", lambda: re.search(told, model_log()))
    assert server.worker_pids("scripted") == before, "no exception ends a worker"


RETURNED = {
    "[]": "number of batch response mismatched",
    "[1, 2]": "number of batch response mismatched",
    "{'a': 1}": "Invalid model predict output",
    "None": "Invalid model predict output",
    "('x',)": "Invalid model predict output",
    "'x'": "Invalid model predict output",
    "(x for x in [1])": "Invalid model predict output",
    "[{1, 2}]": "Unsupported model output data type.",
    "[object()]": "Unsupported model output data type.",
    "[{(1, 2): 3}]": "Unsupported model output data type.",
    "[endless]": "Unsupported model output data type.",
}


@pytest.mark.parametrize("returned", RETURNED)
def test_what_cannot_be_sent_is_refused_in_05(server, returned):
    before = server.worker_pids("scripted")
    answer = server.run(f"endless = []; endless.append(endless); result = {returned}")
    failed(answer, 503, RETURNED[returned])
    assert server.worker_pids("scripted") == before


def test_sys_exit_and_deep_recursion_end_no_worker(server):
    before = server.worker_pids("scripted")
    failed(server.run("import sys; sys.exit(1)"), 503, "Prediction failed")
    failed(server.run("def deep(): return deep()\ndeep()"), 503, "Prediction failed")
    assert server.run("result = ['fine']").text == "fine"
    assert server.worker_pids("scripted") == before


def test_a_reply_over_the_limit_is_refused_alone_rs_02(start):
    server = start(["max_response_size=1000"])
    server.serve("scripted")
    assert len(server.run("result = ['x' * 1000]").text) == 1000
    answer = server.run("result = ['x' * 1001]")
    assert answer.status_code == 507
    assert "max_response_size" in answer.json()["message"]
    assert len(server.run("result = ['x' * 1000]").text) == 1000


def test_errors_tell_nothing_of_the_machine_se_12(server):
    failures = [
        server.run(f"from ts.service import PredictionException\nraise {raised}")
        for raised in RAISED
    ]
    failures += [server.run(f"result = {returned}") for returned in RETURNED]
    failures += [
        server.run("open('/no/such/file')"),
        server.run("this is no code"),
        server.run("import absent"),
    ]
    failures += [
        server.infer(path, b"x")
        for path in ("/predictions/absent", "/predictions/scripted/9", "/x")
    ]
    failures += [
        server.infer("/predictions/%2e%2e%2fx", b"x"),
        server.infer("/predictions/%ff", b"x"),
    ]
    form = {"content-type": "multipart/form-data"}
    failures += [server.predict("scripted", b"x", headers=form)]
    failures += [
        server.register(url) for url in ("absent.mar", "", "../x.mar", "ftp://x/y.mar", "x\0.mar")
    ]
    failures += [server.manage("PUT", "/models/scripted?min_worker=2&max_worker=1")]
    assert len(failures) > 30
    secrets = [str(server.folder), str(ROOT), "/root", "/tmp", "Traceback", 'File "', ".rs:", ".py"]
    secrets += [str(pid) for pid in [server.pid, *server.worker_pids("scripted")]]
    for answer in failures:
        assert answer.status_code >= 400
        told = answer.text.replace("/no/such/file", "") + str(answer.headers)
        told = told.replace(answer.headers["x-request-id"], "")
        for secret in secrets:
            word = rf"\b{secret}\b" if secret.isdigit() else re.escape(secret)
            assert not re.search(word, told), f"{secret!r} in {told}"


def test_failures_are_one_callers_own(server):
    def call(number):
        return lambda: server.run("raise ValueError" if number % 3 == 0 else f"result = [{number}]")

    answers = at_once([call(number) for number in range(60)], callers=16)
    for number, answer in enumerate(answers):
        expected = (503, True) if number % 3 == 0 else (200, answer.text == str(number))
        assert (answer.status_code, True) == expected
