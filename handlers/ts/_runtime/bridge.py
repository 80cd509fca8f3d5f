"""The Python that the server calls by name; `zygote` beside it is for one process of its own.

A host process embeds one interpreter and serves one model version. It calls `start_interpreter`
once; then each worker thread calls `load` once and `Session.run` for each batch, or
`AsyncSession.start` for each request. Failures of a handler are
expected, so they come back as data: nothing here raises because of a handler.
"""

import importlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict

from ts._runtime import failures, loader, logs, policy, values
from ts._runtime.output import CallersLeftError, Failure, Functions, Output, Reply
from ts.context import STREAM_NEXT, Context, Item
from ts.metrics.caching_metric import Emission
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_type_enum import MetricTypes

if TYPE_CHECKING:
    from ts._runtime.asynchronous import EventLoop

# (kind, code, message, replies, metrics) of one batch.
Outcome = tuple[str, int, str, list[Reply | Failure], list[Emission]]

# Metrics that wait for the end of a batch. Only a handler that emits from a thread of its own and
# is never called can reach the limit; it then loses its oldest ones and not the host its memory.
_MAX_PENDING_METRICS = 10_000

# What this package, or the standard library on its behalf, imports only when it is needed. By then
# the model's folder comes first on the path, and its files may have these names.
_LATE_IMPORTS = ("base64", "linecache", "pickle", "socket", "tokenize")

# They go before the names that the server has for itself.
_SEQUENCE_VARIABLES = (
    "TS_REQUEST_SEQUENCE_ID",
    "TS_REQUEST_SEQUENCE_START",
    "TS_REQUEST_SEQUENCE_END",
)

_load_lock = threading.Lock()


class Spec(TypedDict):
    """What the server tells a worker about its model. The folder is an absolute path."""

    model_name: str
    model_version: str
    model_dir: str
    handler: str
    gpu_id: int | None
    batch_size: int
    exchange: str
    service_envelope: str | None
    limit_max_image_pixels: bool
    decode_input_request: bool
    server_version: str
    sequence_headers: tuple[str, str, str]
    load_policy: str
    declared_metrics: list[tuple[str, str, str, list[str]]]
    intra_op_threads: int
    change_dir: bool


def start_interpreter() -> None:
    """Prepares the process: output and logging. Called once, before any `load`."""
    import_early()
    logs.start()


def import_early() -> None:
    """Imports what is needed later, while the names are still those of the standard library."""
    for name in _LATE_IMPORTS:
        importlib.import_module(name)


def load(spec: Spec, functions: Functions | None = None) -> "tuple[Session | None, str, str]":
    """Builds the calling thread's session: `(session, "", "")`, or `(None, kind, message)`.

    `functions` are the host's, see `output`; None leaves a handler without intermediate responses.

    The kind is `permanent` where no retry can help, `out_of_memory`, or `failed`. The message is
    one line; the traceback goes to the model's log.
    """
    try:
        return _load(spec, functions), "", ""
    except BaseException as raised:
        # Also `SystemExit`: a script's `sys.exit` must not end the host before it has answered.
        failures.print_traceback(f"loading model {spec['model_name']} failed", raised)
        raised = policy.explain(raised)
        kind = failures.load_kind(raised, spec["model_dir"])
        return None, kind, failures.one_line(raised, spec["model_dir"])


def _load(spec: Spec, functions: Functions | None) -> "Session":
    if spec["exchange"] != "asynchronous":
        return _load_in(spec, functions, None)
    # Costs as much as all of the bridge, and few models need it.
    from ts._runtime.asynchronous import EventLoop

    loop = EventLoop()
    try:
        return _load_in(spec, functions, loop)
    except BaseException:
        loop.close()
        raise


def _load_in(spec: Spec, functions: Functions | None, loop: "EventLoop | None") -> "Session":
    model_dir = spec["model_dir"]
    manifest = loader.read_manifest(model_dir)
    pending: deque[Emission] = deque(maxlen=_MAX_PENDING_METRICS)
    metrics = MetricsCacheYamlImpl(model_name=spec["model_name"], sink=pending.append)
    for name, kind, unit, dimensions in spec["declared_metrics"]:
        metrics.add_metric_to_cache(name, unit, dimensions, MetricTypes(kind))
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
    names = zip(_SEQUENCE_VARIABLES, spec["sequence_headers"], strict=True)
    (
        context.header_key_sequence_id,
        context.header_key_sequence_start,
        context.header_key_sequence_end,
    ) = (os.environ.get(variable, name) for variable, name in names)
    context.output = Output(functions) if functions is not None else None
    with _load_lock:
        policy.enforce(spec["load_policy"])
        # The process's and not the thread's, but all workers of a host have one model folder.
        if spec["change_dir"]:
            os.chdir(model_dir)
        handler = loader.import_handler(spec["handler"], model_dir)
        _refuse_unseen_device(spec["gpu_id"])
        threads_set = _set_intra_op_threads(spec["intra_op_threads"])
        if not isinstance(handler, type):
            # The module is shared by all workers of the host, and the usual `if data is None:`
            # initialises an object of the module, so one at a time.
            _settle(handler(None, context), loop)
    if isinstance(handler, type):
        instance = handler()
        _settle(instance.initialize(context), loop)
        entry = instance.handle
        declares = instance
    else:
        entry = handler
        declares = sys.modules.get(getattr(handler, "__module__", ""))
    if not threads_set:
        _set_intra_op_threads(spec["intra_op_threads"])
    entry = loader.wrap_in_envelope(spec["service_envelope"], entry)
    side_effect_free = getattr(declares, "side_effect_free", False) is True
    parts = (entry, context, metrics, pending, spec["decode_input_request"])
    if loop is None or context.output is None:
        continuous = spec["exchange"] == "continuous"
        return Session(*parts, continuous, side_effect_free)
    if not inspect.iscoroutinefunction(entry):
        raise loader.HandlerError(
            "`asyncCommunication` needs a handler whose `handle` is a coroutine function "
            f"(`async def`); that of `{spec['handler']}` is none"
        )
    loop.soon(_set_intra_op_threads, spec["intra_op_threads"])
    from ts._runtime.asynchronous import AsyncSession

    return AsyncSession(loop, context.output, *parts, False, side_effect_free)


def _settle(result: Any, loop: "EventLoop | None") -> None:
    """Waits for what a handler's initialisation returned, if it is a coroutine."""
    if loop is not None and inspect.isawaitable(result):
        loop.wait_for(result)


def _refuse_unseen_device(gpu_id: int | None) -> None:
    """Raises if torch cannot use the GPU that the server leased to this worker.

    Handlers fall back to the processor where CUDA is not available, so nobody would notice.
    Without torch in the process, a handler may use the device by other means.
    """
    if gpu_id is None or "torch" not in sys.modules:
        return
    import torch

    count = torch.cuda.device_count()
    if gpu_id < count:
        return
    built = torch.version.cuda
    reason = f"it sees {count}" if built else "it is built without CUDA"
    raise loader.HandlerError(
        f"the server leased GPU {gpu_id} to this worker, and torch {torch.__version__} cannot use "
        f"it: {reason}. Set `deviceType: cpu` for the model, or `number_of_gpu=0` for the server"
    )


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

    __slots__ = (
        "_context",
        "_continuous",
        "_decode",
        "_dimensions",
        "_entry",
        "_metrics",
        "_pending",
        "side_effect_free",
    )

    def __init__(
        self,
        entry: Callable[[Any, Context], Any],
        context: Context,
        metrics: MetricsCacheYamlImpl,
        pending: deque[Emission],
        decode: bool,
        continuous: bool = False,
        side_effect_free: bool = False,
    ) -> None:
        self._entry = entry
        self._context = context
        self._metrics = metrics
        self._pending = pending
        self._decode = decode
        self._continuous = continuous
        self.side_effect_free = side_effect_free
        self._dimensions = [("ModelName", context.model_name), ("Level", "Model")]

    def run(self, items: list[Item]) -> Outcome:
        """Runs one batch and returns `(kind, code, message, replies, metrics)`.

        The kind is `ok`, `handler_failed`, `handler_status`, `out_of_memory`,
        `device_out_of_memory`, `invalid_output`, `batch_mismatch` or `unsupported_output`; all but
        `ok` hold for each request of the batch.
        Under `ok` a request that failed alone has `(kind, code, message)` in place of its reply.
        """
        context = self._context
        context.begin_batch(items)
        self._metrics.items = items
        marked = logs.REQUEST_IDS.set(logs.ids_for_log(ids_of(items)))
        try:
            started = perf_counter()
            rows = [values.row(parts, self._decode) for _, _, parts in items]
            answers = self._entry(rows, context)
            elapsed_ms = (perf_counter() - started) * 1000.0
            replies = replies_of(items, context, answers, self._continuous)
        except BaseException as raised:
            # Also `SystemExit`: the callers of this batch are owed an answer.
            return (*failure_of(items, raised), [], self._take_metrics())
        finally:
            # Bodies of a finished batch are not kept alive until the next one.
            context.end_batch()
            self._metrics.items = None
            logs.REQUEST_IDS.reset(marked)
        return "ok", 200, "", replies, self._with_time(items, elapsed_ms)

    def _with_time(self, items: list[Item], elapsed_ms: float) -> list[Emission]:
        emitted = self._take_metrics() if self._pending else []
        emitted.append(
            ("PredictionTime", elapsed_ms, "Milliseconds", "gauge", self._dimensions, ids_of(items))
        )
        return emitted

    def _take_metrics(self) -> list[Emission]:
        # By count, since threads of the handler may add more meanwhile.
        return [self._pending.popleft() for _ in range(len(self._pending))]


class RefusedError(Exception):
    """A handler returned what cannot be sent."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def replies_of(
    items: list[Item], context: Context, answers: Any, continuous: bool
) -> list[Reply | Failure]:
    """What a handler returned, as the server takes it."""
    if not isinstance(answers, list):
        raise RefusedError("invalid_output", f"it returned a {type(answers).__name__}")
    if len(answers) != len(items):
        reason = f"it returned {len(answers)} results for {len(items)} requests"
        raise RefusedError("batch_mismatch", reason)
    context.end_parts()
    if continuous:
        _apply_stopping_criteria(context, answers)
    processors = context.used_processors()
    return [
        failures.item(answer, items[index][0])
        if isinstance(answer, BaseException)
        else (200, "", [], values.body(answer))
        if processors is None
        else (*processors[index].reply_head(), values.body(answer))
        for index, answer in enumerate(answers)
    ]


def failure_of(items: list[Item], raised: BaseException) -> Failure:
    """The failure of each request, told to the model's log."""
    if isinstance(raised, values.UnsupportedOutputError):
        raised = RefusedError("unsupported_output", str(raised))
    if isinstance(raised, RefusedError):
        line = f"result of the handler refused on request {ids_of(items)}: {raised}"
        failures.print_line(line)
        return raised.kind, 503, failures.REFUSALS[raised.kind]
    if isinstance(raised, CallersLeftError):
        failures.print_line(f"handler stopped on request {ids_of(items)}: {raised}")
    else:
        failures.print_traceback(f"handler failed on request {ids_of(items)}", raised)
    return failures.run_kind(raised)


def _apply_stopping_criteria(context: Context, answers: list[Any]) -> None:
    """Marks each reply as the last one or not, as the handler's criterion for it says."""
    criteria = context.stopping_criteria
    if criteria is None:
        return
    for index, answer in enumerate(answers):
        try:
            criterion = criteria[index]
        except LookupError:
            continue
        if criterion is None or isinstance(answer, BaseException):
            continue
        stop = criterion(answer)
        if stop is not None:
            context.set_response_header(index, STREAM_NEXT, "false" if stop else "true")


def ids_of(items: list[Item]) -> str:
    """The requests of a batch, for the log."""
    return items[0][0] if len(items) == 1 else ",".join([item[0] for item in items])
