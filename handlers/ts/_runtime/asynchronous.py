"""Handlers that serve many requests at once: coroutines in an event loop of their own thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from ts._runtime import failures, logs, values
from ts._runtime.bridge import Outcome, Session, failure_of, replies_of
from ts._runtime.output import Output
from ts.context import Item

# How long what still runs may take to end once the loop is closed.
_CLOSE_SECONDS = 5.0


class EventLoop:
    """An event loop that runs from the start to `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="event-loop", daemon=True)
        self._thread.start()

    def soon(self, function: Callable[..., object], *args: object) -> None:
        """Has the loop call a function."""
        self._loop.call_soon_threadsafe(function, *args)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """Runs something in the loop to its end. Not to be called from the loop itself."""

        async def run() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        """Cancels what still runs, and ends the loop."""
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS / 2)
            self._loop.stop()

        if tasks:
            self._ending = self._loop.create_task(end())
        else:
            self._loop.stop()


class AsyncSession(Session):
    """One worker's loaded coroutine, called for each request on its own."""

    __slots__ = ("_loop", "_output", "_tasks")

    def __init__(self, loop: EventLoop, output: Output, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = loop
        self._output = output
        # Touched by the loop's thread only.
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}

    def start(self, item: Item) -> None:
        """Starts one request and returns."""
        self._loop.soon(self._begin, item)

    def cancel(self, request_id: str) -> None:
        """Breaks a request off."""
        self._loop.soon(self._break_off, request_id)

    def close(self) -> None:
        """Ends the loop and whatever still runs in it."""
        self._loop.close()

    def _begin(self, item: Item) -> None:
        task = asyncio.get_running_loop().create_task(self._serve([item]))
        self._tasks[item[0]] = task
        # Also a task that is cancelled before it has begun ends here.
        task.add_done_callback(lambda ended: self._end(item, ended))

    def _end(self, item: Item, task: "asyncio.Task[Outcome]") -> None:
        del self._tasks[item[0]]
        if task.cancelled():
            failures.print_line(f"handler broken off on request {item[0]}")
            failed = ("handler_failed", 503, "Prediction failed")
            outcome: Outcome = (*failed, [], self._take_metrics())
        else:
            outcome = task.result()
        try:
            self._output.answer(item[0], outcome)
        except Exception as raised:
            failures.print_traceback(f"request {item[0]} could not be answered", raised)

    def _break_off(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def _serve(self, items: list[Item]) -> Outcome:
        # Of this task, and of those that it starts.
        logs.REQUEST_IDS.set(items[0][0])
        try:
            return await self._run_one(items)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            # Also `SystemExit`, which would end the loop.
            return (*failure_of(items, raised), [], self._take_metrics())

    async def _run_one(self, items: list[Item]) -> Outcome:
        context = self._context.of_one_request()
        context.begin_batch(items)
        context.metrics.items = items
        started = perf_counter()
        rows = [values.row(parts, self._decode) for _, _, parts in items]
        answers = await self._entry(rows, context)
        elapsed_ms = (perf_counter() - started) * 1000.0
        replies = replies_of(items, context, answers, False)
        return "ok", 200, "", replies, self._with_time(items, elapsed_ms)
