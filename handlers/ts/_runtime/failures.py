"""What a failure of a handler means to the server, and how it is told to the model's log."""

import os
import sys
import traceback

from ts._runtime.loader import HandlerError, files_named_by_manifest
from ts._runtime.policy import LoadPolicyError
from ts.utils.util import PredictionException

# What a client reads when a handler returned what cannot be sent, by kind.
REFUSALS = {
    "invalid_output": "Invalid model predict output",
    "batch_mismatch": "number of batch response mismatched",
    "unsupported_output": "Unsupported model output data type.",
}

_MAX_MESSAGE_CHARS = 2_000

# Where torch has no type of its own for memory that ran out: its allocator for the processor, and
# what TorchServe goes by, and its clients by that.
_HOST_MEMORY_TEXT = "DefaultCPUAllocator: "
_DEVICE_MEMORY_TEXT = "CUDA"


def load_kind(raised: BaseException, model_dir: str) -> str:
    """`permanent`, `out_of_memory` or `failed`."""
    if isinstance(raised, HandlerError | ImportError | SyntaxError | LoadPolicyError):
        return "permanent"
    if _memory_kind(raised, text_counts_for=RuntimeError):
        return "out_of_memory"
    for name in files_named_by_manifest(model_dir):
        if not os.path.exists(os.path.join(model_dir, name)):
            return "permanent"
    return "failed"


def run_kind(raised: BaseException) -> tuple[str, int, str]:
    """The kind, status code and message for what `handle` raised."""
    if isinstance(raised, PredictionException):
        code = raised.error_code
        if not isinstance(code, int) or not 100 <= code <= 999:
            code = 500
        return "handler_status", code, _text(raised.message)
    if kind := _memory_kind(raised, text_counts_for=Exception):
        return kind, 507, "Out of resources"
    return "handler_failed", 503, "Prediction failed"


def item(raised: BaseException, request_id: str) -> tuple[str, int, str]:
    """The failure of one request for an exception that stands in place of its result."""
    print_traceback(f"request {request_id} of the batch failed", raised)
    return run_kind(raised)


def one_line(raised: BaseException, model_dir: str = "") -> str:
    """`Type: text` without line breaks, cut to a length that fits a reply.

    Files of the model are told by their place in its folder: where that lies is no client's
    business.
    """
    text = " ".join(f"{type(raised).__name__}: {_text(raised)}".split())
    if model_dir:
        text = text.replace(os.path.join(model_dir, ""), "")
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"


def print_traceback(title: str, raised: BaseException) -> None:
    """Writes the traceback under a title. One write, so that threads do not mix their lines."""
    try:
        details = "".join(traceback.format_exception(raised)).rstrip("\n")
    except Exception:
        # An exception of the handler's own making can refuse to be shown.
        details = one_line(raised)
    print_line(f"{title}\n{details}")


def print_line(text: str) -> None:
    """Writes to the model's log, even if the handler has replaced or closed `sys.stderr`."""
    try:
        sys.stderr.write(text + "\n")
    except Exception:
        os.write(2, (text + "\n").encode("utf-8", "backslashreplace"))


def _memory_kind(raised: BaseException, text_counts_for: type[Exception]) -> str | None:
    """`out_of_memory`, `device_out_of_memory` where it was an accelerator's, or `None`."""
    if isinstance(raised, MemoryError):
        return "out_of_memory"
    typed = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if isinstance(typed, type) and isinstance(raised, typed):
        return "device_out_of_memory"
    if not isinstance(raised, text_counts_for):
        return None
    text = _text(raised)
    if _HOST_MEMORY_TEXT in text:
        return "out_of_memory"
    return "device_out_of_memory" if _DEVICE_MEMORY_TEXT in text else None


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return "<its text cannot be shown>"
