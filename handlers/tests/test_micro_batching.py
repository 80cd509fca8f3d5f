import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ts.context import Context
from ts.handler_utils.micro_batching import MicroBatching


class Handler:
    """Doubles numbers, in threads that it notes."""

    def __init__(self, size: int = 1, parallelism: dict[str, int] | None = None) -> None:
        self.handle: Any = MicroBatching(self, size, parallelism)
        self.context: Any = None
        self.threads: dict[str, set[int]] = {}
        self.indices: list[int] = []
        self.pause = 0.0

    def note(self, step: str) -> None:
        self.threads.setdefault(step, set()).add(threading.get_ident())
        time.sleep(self.pause)

    def preprocess(self, data: list[Any]) -> list[Any]:
        self.note("preprocess")
        self.indices.append(self.handle.get_micro_batch_idx())
        return data

    def inference(self, data: list[Any]) -> list[Any]:
        self.note("inference")
        if "bad" in data:
            raise ValueError("of one micro-batch")
        return [2 * number for number in data]

    def postprocess(self, data: list[Any]) -> Any:
        self.note("postprocess")
        return None if data == [0] else [str(number) for number in data]


@pytest.fixture
def context() -> Any:
    made = Context("m", "/", None, 1, None, "", metrics=SimpleNamespace(add_time=print))
    made.begin_batch([("id", {}, [])])
    return made


def test_results_keep_the_order_whatever_the_threads(context: Any) -> None:
    handler = Handler(3, {"preprocess": 2, "inference": 4})
    for _ in range(20):
        numbers = list(range(1, 32))
        assert handler.handle(numbers, context) == [str(2 * number) for number in numbers]
    assert sorted(handler.indices) == sorted(list(range(11)) * 20)
    assert handler.handle([], context) == []
    assert len(handler.threads["postprocess"]) == 1
    assert threading.get_ident() not in handler.threads["inference"]


def test_steps_overlap(context: Any) -> None:
    handler = Handler()
    handler.pause = 0.05
    started = time.monotonic()
    handler.handle(list(range(1, 11)), context)
    assert time.monotonic() - started < 0.05 * 30 * 0.7, "one step after another"


@pytest.mark.parametrize("data", [[1, "bad", 3, 4], ["bad"], [1, 2, 3, "bad"]])
def test_an_exception_in_a_step_is_raised_and_the_next_batch_runs(data: Any, context: Any) -> None:
    handler = Handler()
    with pytest.raises(ValueError, match="of one micro-batch"):
        handler.handle(data, context)
    assert handler.handle([1, 2], context) == ["2", "4"]
    with pytest.raises(TypeError, match="NoneType instead of a list"):
        handler.handle([0], context)


def test_the_number_of_threads_may_change(context: Any) -> None:
    handler = Handler(1, {"inference": 4})
    handler.pause = 0.01
    handler.handle(list(range(1, 20)), context)
    assert len(handler.threads["inference"]) == 4
    handler.handle.parallelism = {"inference": 1}
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 1, "postprocess": 1}
    handler.handle([1], context)
    handler.threads.clear()
    handler.handle(list(range(1, 20)), context)
    assert len(handler.threads["inference"]) == 1


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"other": 1}, {"inference": 0}, {"inference": "2"}):
        with pytest.raises(ValueError, match="parallelism"):
            MicroBatching(None, 1, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro_batch_size"):
        MicroBatching(None, 0)
    with pytest.raises(RuntimeError, match="steps"):
        MicroBatching(None).get_micro_batch_idx()


def stage_threads() -> int:
    names = ("preprocess", "inference", "postprocess")
    return sum(thread.name in names for thread in threading.enumerate())


def wait_for_threads(count: int) -> None:
    deadline = time.monotonic() + 10
    while stage_threads() != count:
        assert time.monotonic() < deadline, f"{stage_threads()} threads run on"
        time.sleep(0.005)


def test_threads_end_with_shutdown_and_with_the_handler(context: Any) -> None:
    gc.collect()
    wait_for_threads(0)
    handler = Handler()
    handler.handle([1, 2], context)
    assert stage_threads() == 3
    handler.handle.shutdown()
    wait_for_threads(0)
    with pytest.raises(RuntimeError, match="shut down"):
        handler.handle([1], context)
    handler = Handler()
    handler.handle([1, 2], context)
    known = weakref.ref(handler)
    del handler
    gc.collect()
    assert known() is None
    wait_for_threads(0)


def test_description_and_explanation_do_not_take_the_pipeline() -> None:
    class Described(Handler):
        def handle(self, data: Any, context: Any) -> Any:  # type: ignore[override]
            return ["described"]

    handler = Described()
    for name in ("describe", "explain"):
        context = Context("m", "/", None, 1, None, "")
        context.begin_batch([("id", {name: "True"}, [])])
        assert handler.handle([{}], context) == ["described"]
    assert handler.threads == {}
