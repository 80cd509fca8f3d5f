"""A pipeline inside one batch: while one part of it is inferred, the next is preprocessed."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_STAGES = ("preprocess", "inference", "postprocess")


class MicroBatching:
    """Stands in for a handler's `handle`; set it in `__init__` or `initialize`:

        self.handle = MicroBatching(self, micro_batch_size=2, parallelism={"preprocess": 2})

    Each batch is cut into micro-batches that go through the handler's `preprocess`, `inference` and
    `postprocess`, each step in threads of its own, one unless `parallelism` says more. Results come
    in the order of the requests. An exception in a step is raised by the call.
    """

    def __init__(
        self,
        parent_handler: Any,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self._stages = {name: _Stage(name) for name in _STAGES}
        self._current = threading.local()
        self._closed = False
        self._parallelism = dict.fromkeys(_STAGES, 1)
        self.parallelism = dict(parallelism or {})

    @property
    def micro_batch_size(self) -> int:
        """Requests in one micro-batch at most."""
        return self._micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"`micro_batch_size` is `{size}` and has to be an integer from 1 on")
        self._micro_batch_size = size

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads of each step; may be set at any time, and what is left out stays as it is."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        for name, threads in parallelism.items():
            if name not in _STAGES:
                raise ValueError(f"`{name}` in `parallelism` is none of {', '.join(_STAGES)}")
            if not isinstance(threads, int) or threads < 1:
                raise ValueError(
                    f"`{name}: {threads}` in `parallelism` has to be an integer from 1 on"
                )
        self._parallelism.update(parallelism)

    def __call__(self, data: list[Any], context: Any) -> list[Any]:
        """Runs one batch; what a handler's `handle` is."""
        started = time.perf_counter()
        handler = self.handler
        handler.context = context
        if any(context.get_request_header(0, name) == "True" for name in ("describe", "explain")):
            return type(handler).handle(handler, data, context)  # type: ignore[no-any-return]
        size = self.micro_batch_size
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        self._start_threads()
        call = _Call(len(pieces))
        for index, piece in enumerate(pieces):
            self._pass_on(call, index, piece, _STAGES)
        results = call.wait()
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        context.metrics.add_time("HandlerTime", elapsed_ms, None, "ms")
        return [result for piece in results for result in piece]

    handle = __call__

    def get_micro_batch_idx(self) -> int:
        """The number of the micro-batch that the calling step works on."""
        index = getattr(self._current, "index", None)
        if index is None:
            raise RuntimeError("`get_micro_batch_idx` is for the steps of a micro-batch")
        return int(index)

    def shutdown(self) -> None:
        """Ends the threads once they have done what they were given; further calls raise."""
        self._closed = True
        for stage in self._stages.values():
            stage.resize(0, 1)

    def __del__(self) -> None:
        if hasattr(self, "_stages"):
            self.shutdown()

    def _start_threads(self) -> None:
        if self._closed:
            raise RuntimeError("the micro-batching was shut down")
        # Per thread, and set by the server for the one that calls.
        torch = sys.modules.get("torch")
        operators = torch.get_num_threads() if torch is not None else 1
        for name, stage in self._stages.items():
            stage.resize(self._parallelism[name], operators)

    def _pass_on(self, call: "_Call", index: int, value: Any, stages: tuple[str, ...]) -> None:
        """Has the first of the stages work on a micro-batch, and the others after it."""

        def work() -> None:
            if call.failed():
                return
            self._current.index = index
            try:
                with _inference_mode():
                    done = getattr(self.handler, stages[0])(value)
                if stages[1:]:
                    self._pass_on(call, index, done, stages[1:])
                else:
                    call.finish(index, done)
            except BaseException as raised:
                call.fail(raised)
            finally:
                self._current.index = None

        if not self._stages[stages[0]].give(work):
            call.fail(RuntimeError("the micro-batching was shut down"))


class _Stage:
    """The threads of one step."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads = 0
        # Bounded by the micro-batches of the batch. None ends one thread.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def resize(self, threads: int, operators: int) -> None:
        """Starts threads, or ends some after what was given so far."""
        with self._lock:
            while self._threads < threads:
                # The thread knows its queue and not its stage, so that the owner can be freed.
                threading.Thread(
                    target=_serve, args=(self._work, operators), name=self._name, daemon=True
                ).start()
                self._threads += 1
            while self._threads > threads:
                self._work.put(None)
                self._threads -= 1

    def give(self, work: Callable[[], None]) -> bool:
        """Queues work; False if there is no thread to do it."""
        with self._lock:
            if self._threads == 0:
                return False
            self._work.put(work)
            return True


def _serve(work: "queue.SimpleQueue[Callable[[], None] | None]", operators: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(operators)
    while (do := work.get()) is not None:
        do()
        # Not kept until the next comes: it holds a micro-batch and the handler.
        del do


class _Call:
    """One batch on its way."""

    def __init__(self, pieces: int) -> None:
        self._results: list[list[Any]] = [[] for _ in range(pieces)]
        self._left = pieces
        self._raised: BaseException | None = None
        self._changed = threading.Condition()

    def finish(self, index: int, result: Any) -> None:
        """The last step of a micro-batch has returned."""
        if not isinstance(result, list):
            raise TypeError(f"`postprocess` returned a {type(result).__name__} instead of a list")
        with self._changed:
            self._results[index] = result
            self._left -= 1
            self._changed.notify()

    def fail(self, raised: BaseException) -> None:
        """A step has raised; the first one counts."""
        with self._changed:
            self._raised = self._raised or raised
            self._changed.notify()

    def failed(self) -> bool:
        """Whether the rest of the batch is in vain."""
        with self._changed:
            return self._raised is not None

    def wait(self) -> list[list[Any]]:
        """The results in order."""
        with self._changed:
            while self._left and self._raised is None:
                self._changed.wait()
            if self._raised is not None:
                raise self._raised
            return self._results


def _inference_mode() -> AbstractContextManager[Any]:
    """As around all steps of a handler; the mode is each thread's own."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.inference_mode()
