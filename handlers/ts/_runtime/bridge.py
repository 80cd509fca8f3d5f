"""The Python that the server calls by name; `zygote` beside it is for one process of its own.

A host process embeds one interpreter and serves one model version. It calls `start_interpreter`
once; then each worker thread calls `load` once and `Session.run` for each batch. Failures of a
handler are expected, so they come back as data: nothing here raises because of a handler.
"""

import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypedDict

from ts._runtime import failures, loader, logs, values
from ts.context import Context, Item
from ts.metrics.caching_metric import Emission
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

# (status, reason, headers, body) of one request.
Reply = tuple[int, str, list[tuple[str, str]], bytes | bytearray]
# (kind, code, message, replies, metrics) of one batch.
Outcome = tuple[str, int, str, list[Reply], list[Emission]]

# Metrics that wait for the end of a batch. Only a handler that emits from a thread of its own and
# is never called can reach the limit; it then loses its oldest ones and not the host its memory.
_MAX_PENDING_METRICS = 10_000

# What this package, or the standard library on its behalf, imports only when it is needed. By then
# the model's folder comes first on the path, and its files may have these names.
_LATE_IMPORTS = ("base64", "linecache", "pickle", "socket", "tokenize")

_load_lock = threading.Lock()


class Spec(TypedDict):
    """What the server tells a worker about its model. The folder is an absolute path."""

    model_name: str
    model_version: str
    model_dir: str
    handler: str
    gpu_id: int | None
    batch_size: int
    service_envelope: str | None
    limit_max_image_pixels: bool
    decode_input_request: bool
    server_version: str
    intra_op_threads: int
    change_dir: bool


def start_interpreter() -> None:
    """Prepares the process: output and logging. Called once, before any `load`."""
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    logs.start()


def load(spec: Spec) -> "tuple[Session | None, str, str]":
    """Builds the calling thread's session: `(session, "", "")`, or `(None, kind, message)`.

    The kind is `permanent` where no retry can help, `out_of_memory`, or `failed`. The message is
    one line; the traceback goes to the model's log.
    """
    try:
        return _load(spec), "", ""
    except BaseException as raised:
        # Also `SystemExit`: a script's `sys.exit` must not end the host before it has answered.
        failures.print_traceback(f"loading model {spec['model_name']} failed", raised)
        kind = failures.load_kind(raised, spec["model_dir"])
        return None, kind, failures.one_line(raised, spec["model_dir"])


def _load(spec: Spec) -> "Session":
    model_dir = spec["model_dir"]
    manifest = loader.read_manifest(model_dir)
    pending: deque[Emission] = deque(maxlen=_MAX_PENDING_METRICS)
    metrics = MetricsCacheYamlImpl(model_name=spec["model_name"], sink=pending.append)
    context = Context(
        spec["model_name"],
        model_dir,
        manifest,
        spec["batch_size"],
        spec["gpu_id"],
        spec["server_version"],
        spec["limit_max_image_pixels"],
        metrics=metrics,
        model_yaml_config=loader.read_model_config(model_dir, manifest),
    )
    with _load_lock:
        # The process's and not the thread's, but all workers of a host have one model folder.
        if spec["change_dir"]:
            os.chdir(model_dir)
        handler = loader.import_handler(spec["handler"], model_dir)
        threads_set = _set_intra_op_threads(spec["intra_op_threads"])
        if not isinstance(handler, type):
            # The module is shared by all workers of the host, and the usual `if data is None:`
            # initialises an object of the module, so one at a time.
            handler(None, context)
    if isinstance(handler, type):
        instance = handler()
        instance.initialize(context)
        entry = instance.handle
    else:
        entry = handler
    if not threads_set:
        _set_intra_op_threads(spec["intra_op_threads"])
    entry = loader.wrap_in_envelope(spec["service_envelope"], entry)
    return Session(entry, context, metrics, pending, spec["decode_input_request"])


def _set_intra_op_threads(count: int) -> bool:
    """Sets torch's thread count, which is per thread, if the model imported torch at all.

    Done as soon as torch is there, so that a handler's own `set_num_threads` wins.
    """
    if "torch" not in sys.modules or count < 1:
        return False
    # Not out of `sys.modules`: another worker may be in the midst of importing it.
    import torch

    torch.set_num_threads(count)
    return True


class Session:
    """One worker's loaded handler."""

    __slots__ = ("_context", "_decode", "_dimensions", "_entry", "_metrics", "_pending")

    def __init__(
        self,
        entry: Callable[[Any, Context], Any],
        context: Context,
        metrics: MetricsCacheYamlImpl,
        pending: deque[Emission],
        decode: bool,
    ) -> None:
        self._entry = entry
        self._context = context
        self._metrics = metrics
        self._pending = pending
        self._decode = decode
        self._dimensions = [("ModelName", context.model_name), ("Level", "Model")]

    def run(self, items: list[Item]) -> Outcome:
        """Runs one batch and returns `(kind, code, message, replies, metrics)`.

        The kind is `ok`, `handler_failed`, `handler_status`, `out_of_memory`, `invalid_output`,
        `batch_mismatch` or `unsupported_output`; all but `ok` hold for each request of the batch.
        """
        context = self._context
        context.begin_batch(items)
        self._metrics.items = items
        replies: list[Reply] = []
        try:
            started = perf_counter()
            rows = [values.row(parts, self._decode) for _, _, parts in items]
            answers = self._entry(rows, context)
            elapsed_ms = (perf_counter() - started) * 1000.0
            if not isinstance(answers, list):
                return self._refused(items, "invalid_output", f"it returned a {_name(answers)}")
            if len(answers) != len(items):
                reason = f"it returned {len(answers)} results for {len(items)} requests"
                return self._refused(items, "batch_mismatch", reason)
            processors = context.used_processors()
            if processors is None:
                replies = [(200, "", [], values.body(answer)) for answer in answers]
            else:
                replies = [
                    (*processor.reply_head(), values.body(answer))
                    for processor, answer in zip(processors, answers, strict=True)
                ]
        except values.UnsupportedOutputError as refused:
            return self._refused(items, "unsupported_output", str(refused))
        except BaseException as raised:
            # Also `SystemExit`: the callers of this batch are owed an answer.
            failures.print_traceback(f"handler failed on request {_ids(items)}", raised)
            kind, code, message = failures.run_kind(raised)
            return kind, code, message, [], self._take_metrics()
        finally:
            # Bodies of a finished batch are not kept alive until the next one.
            context.end_batch()
            self._metrics.items = None
        emitted = self._take_metrics() if self._pending else []
        emitted.append(
            ("PredictionTime", elapsed_ms, "Milliseconds", "gauge", self._dimensions, _ids(items))
        )
        return "ok", 200, "", replies, emitted

    def _refused(self, items: list[Item], kind: str, reason: str) -> Outcome:
        """The outcome for a handler that returned what cannot be sent."""
        failures.print_line(f"result of the handler refused on request {_ids(items)}: {reason}")
        return kind, 503, failures.REFUSALS[kind], [], self._take_metrics()

    def _take_metrics(self) -> list[Emission]:
        # By count, since threads of the handler may add more meanwhile.
        return [self._pending.popleft() for _ in range(len(self._pending))]


def _ids(items: list[Item]) -> str:
    return items[0][0] if len(items) == 1 else ",".join([item[0] for item in items])


def _name(value: object) -> str:
    return type(value).__name__
