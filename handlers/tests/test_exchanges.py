"""Parts of replies, failures of single requests, steps of continuous batches, coroutines."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import item

from ts._runtime import bridge
from ts.handler_utils.utils import (
    CallersLeftError,
    import_class,
    send_intermediate_predict_response,
)
from ts.protocol import otf_message_handler


class Host:
    """Stands in for the functions that a host gives to the bridge."""

    def __init__(self) -> None:
        self.running = {"id-0", "id-1"}
        self.left: set[str] = set()
        self.parts: list[tuple[str, Any]] = []
        self.answers: queue.Queue[tuple[str, Any]] = queue.Queue()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self.send, self.has_left, self.answer

    def send(self, parts: list[tuple[str, Any]]) -> tuple[int, bool]:
        known = [part for part in parts if part[0] in self.running]
        self.parts += [part for part in known if part[0] not in self.left]
        return len(parts) - len(known), bool(known) and {part[0] for part in known} <= self.left

    def has_left(self, request_id: str) -> bool | None:
        return request_id in self.left if request_id in self.running else None

    def answer(self, request_id: str, outcome: Any) -> None:
        self.answers.put((request_id, outcome))


@pytest.fixture
def server() -> Host:
    return Host()


@pytest.fixture
def serve(make_model: Callable[..., Any], server: Host) -> Callable[..., Any]:
    def run(body: str, **spec: Any) -> Any:
        source = "from ts.handler_utils.utils import *\nfrom ts.service import *\n" + body
        session, kind, message = bridge.load(
            make_model({"handler.py": source}, **spec), server.functions
        )
        assert session is not None, f"{kind}: {message}"
        return session

    return run


STREAM = """
def handle(data, context):
    if data is None:
        return
    context.set_response_header(0, "x-a", "1")
    for part in range(2):
        texts = [f"{part} of {index}" for index in range(len(data))]
        send_intermediate_predict_response(texts, context.request_ids, "", 200, context)
        context.set_response_status(500, "too late for the head", 0)
    return ["last"] * len(data)
"""


def test_parts_go_out_before_the_last_one(serve: Any, server: Host) -> None:
    kind, _, _, replies, _ = serve(STREAM).run([item(), item(request_id="id-1")])
    assert kind == "ok"
    first = (200, "", [("x-a", "1"), ("ts_stream_next", "true")], b"0 of 0")
    assert server.parts[0] == ("id-0", first)
    assert server.parts[1] == ("id-1", (200, "", [("ts_stream_next", "true")], b"0 of 1"))
    assert [part[1][3] for part in server.parts[2:]] == [b"1 of 0", b"1 of 1"]
    assert replies[1] == (200, "", [("ts_stream_next", "false")], b"last")


def test_a_batch_that_does_not_stream_has_no_mark_of_it(serve: Any) -> None:
    session = serve(STREAM.replace("range(2)", "range(int(data[0]['body']))"))
    session.run([item(b"1")])
    assert session.run([item(b"0")])[3] == [(200, "", [("x-a", "1")], b"last")]


def test_generation_stops_when_all_callers_have_left(
    serve: Any, server: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    session = serve(STREAM)
    items = [item(), item(request_id="id-1")]
    server.left = {"id-0"}
    assert session.run(items)[0] == "ok"
    assert {part[0] for part in server.parts} == {"id-1"}
    server.left = {"id-0", "id-1"}
    assert session.run(items)[:3] == ("handler_failed", 503, "Prediction failed")
    told = capsys.readouterr().err
    assert "handler stopped on request id-0,id-1: every caller of the batch has left" in told
    assert "Traceback" not in told


def test_what_nobody_can_get_is_dropped_with_one_warning(
    serve: Any, server: Host, caplog: pytest.LogCaptureFixture
) -> None:
    serve(
        """
def handle(data, context):
    if data is None:
        return
    for _ in range(3):
        send_intermediate_predict_response(["x"], {0: "unknown"}, "", 200, context)
    return ["x"]
"""
    ).run([item()])
    assert server.parts == []
    assert caplog.text.count("intermediate responses were dropped") == 1


def test_a_code_or_an_exception_fails_its_requests(serve: Any, server: Host) -> None:
    serve(
        """
def handle(data, context):
    if data is None:
        return
    ids = context.request_ids
    send_intermediate_predict_response(["a", KeyError("b")], ids, "", 200, context)
    send_intermediate_predict_response(None, ids, "no more", 507, context)
    return ["x", "y"]
"""
    ).run([item(), item(request_id="id-1")])
    assert server.parts[1] == ("id-1", ("handler_failed", 503, "Prediction failed"))
    assert [part[1] for part in server.parts[2:]] == [("handler_status", 507, "no more")] * 2


def test_without_a_server_it_is_a_clear_error(load: Any, server: Host) -> None:
    session = load({"handler.py": "from ts.handler_utils.utils import *\n" + STREAM})
    kind, *_ = session.run([item()])
    assert kind == "handler_failed"
    with pytest.raises(RuntimeError, match="served"):
        send_intermediate_predict_response(["x"], {0: "id"}, "", 200)
    older = otf_message_handler.send_intermediate_predict_response
    assert older is send_intermediate_predict_response


def test_a_handler_may_ask_who_is_there(serve: Any, server: Host) -> None:
    session = serve(
        """
def handle(data, context):
    if data is not None:
        context.seen = [context.has_left(0), context.has_left(1), context.all_have_left()]
        return ["x"] * len(data)
"""
    )
    items = [item(), item(request_id="id-1")]
    for left, seen in (
        (set(), [False, False, False]),
        ({"id-1"}, [False, True, False]),
        ({"id-0", "id-1"}, [True, True, True]),
    ):
        server.left = left
        session.run(items)
        assert session._context.seen == seen
    assert session._context.all_have_left() is False, "there is no batch"


def test_an_exception_in_place_of_a_result_is_of_one_request(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session = serve(
        """
def handle(data, context):
    if data is not None:
        return ["a", ValueError("b"), PredictionException("c", 422), MemoryError()]
"""
    )
    items = [item(request_id=f"id-{number}") for number in range(4)]
    kind, _, _, replies, _ = session.run(items)
    assert kind == "ok"
    assert replies == [
        (200, "", [], b"a"),
        ("handler_failed", 503, "Prediction failed"),
        ("handler_status", 422, "c"),
        ("out_of_memory", 507, "Out of resources"),
    ]
    assert "request id-1 of the batch failed\nValueError: b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "declared"),
    [
        ("def handle(data, context): ...", False),
        ("side_effect_free = True\ndef handle(data, context): ...", True),
        ("class A:\n  def initialize(s, c): ...\n  def handle(s, d, c): ...", False),
        (
            "class A:\n  side_effect_free = True\n  def initialize(s, c): ...\n"
            "  def handle(s, d, c): ...",
            True,
        ),
    ],
)
def test_only_a_handler_that_says_so_is_free_of_side_effects(
    load: Any, source: str, declared: bool
) -> None:
    assert load({"handler.py": source}).side_effect_free is declared


def test_stopping_criteria_decide_who_comes_again(serve: Any, server: Host) -> None:
    body = """
def handle(data, context):
    if data is None:
        return
    context.stopping_criteria = [lambda a: a == "a", lambda a: False, lambda a: None, None]
    return ["a", "b", "c", "d", "e"]
"""
    items = [item(request_id=f"id-{number}") for number in range(5)]
    replies = serve(body, exchange="continuous").run(items)[3]
    marks = [dict(reply[2]).get("ts_stream_next") for reply in replies]
    assert marks == ["false", "true", None, None, None]
    assert all(reply[2] == [] for reply in serve(body).run(items)[3])


COROUTINE = """
import asyncio

waiting = {}

async def handle(data, context):
    if data is None:
        context.ready = True
        return
    assert context.ready
    text = bytes(data[0]["body"]).decode()
    key = context.get_request_id()
    context.set_response_header(0, "x-id", key)
    if text == "wait":
        waiting[key] = asyncio.Event()
        await waiting[key].wait()
    elif text.startswith("free "):
        waiting[text[5:]].set()
    elif text == "exit":
        raise SystemExit
    send_intermediate_predict_response(["part"], context.request_ids, "", 200, context)
    assert context.get_request_id() == key
    return [text]
"""


def test_coroutines_run_side_by_side(serve: Any, server: Host) -> None:
    session = serve(COROUTINE, exchange="asynchronous")
    session.start(item(b"wait", request_id="id-0"))
    session.start(item(b"free id-0", request_id="id-1"))
    answers = dict(server.answers.get(timeout=10) for _ in range(2))
    for key, (kind, _, _, replies, metrics) in answers.items():
        assert kind == "ok"
        assert dict(replies[0][2]) == {"x-id": key, "ts_stream_next": "false"}
        assert [metric[0] for metric in metrics] == ["PredictionTime"]
    assert sorted(part[0] for part in server.parts) == ["id-0", "id-1"]
    session.close()


def test_a_coroutine_that_is_broken_off_or_exits_is_answered(serve: Any, server: Host) -> None:
    session = serve(COROUTINE, exchange="asynchronous")
    session.start(item(b"wait", request_id="id-0"))
    session.cancel("id-0")
    session.cancel("unknown")
    assert server.answers.get(timeout=10)[1][0] == "handler_failed"
    session.start(item(b"exit", request_id="id-1"))
    assert server.answers.get(timeout=10)[1][0] == "handler_failed"
    session.start(item(b"x", request_id="id-1"))
    assert server.answers.get(timeout=10)[1][3][0][3] == b"x"
    session.start(item(b"wait", request_id="id-0"))
    session.close()
    assert server.answers.get(timeout=10)[0] == "id-0"
    assert not [thread for thread in threading.enumerate() if thread.name == "event-loop"]


def test_what_is_no_coroutine_does_not_load_asynchronously(
    make_model: Callable[..., Any], server: Host
) -> None:
    spec = make_model({"handler.py": "def handle(data, context): ..."}, exchange="asynchronous")
    session, kind, message = bridge.load(spec, server.functions)
    assert (session, kind) == (None, "permanent")
    assert "coroutine function" in message
    assert not [thread for thread in threading.enumerate() if thread.name == "event-loop"]


def test_classes_are_found_by_name() -> None:
    assert import_class("utils.CallersLeftError", "ts.handler_utils") is CallersLeftError
    assert import_class("CallersLeftError", "ts.handler_utils.utils") is CallersLeftError
    with pytest.raises(ImportError, match="names no module"):
        import_class("CallersLeftError")
