"""What handlers call while they run."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ts._runtime.output import CallersLeftError
from ts.context import Context

__all__ = ["CallersLeftError", "import_class", "send_intermediate_predict_response"]


def send_intermediate_predict_response(
    ret: Sequence[Any] | None,
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context | None = None,
) -> None:
    """Sends each request of `req_id_map` a part of its reply; what `handle` returns is the last.

    `ret` holds the parts by the indices of `req_id_map`, usually `context.request_ids`. Status and
    headers of a reply are those that the context has at its first part. A `code` other than 200
    fails the requests with `message`. Raises `CallersLeftError` when nobody waits for any request
    of the batch any more. May be called from any thread.
    """
    if context is None or context.output is None:
        raise RuntimeError("intermediate responses need the context of a handler that is served")
    context.output.send(ret, req_id_map, message, code, context)


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """The class called `class_name`, which may be `module.Class`, in `module_prefix` if given."""
    module, _, name = class_name.rpartition(".")
    path = ".".join(part for part in (module_prefix, module) if part)
    if not path:
        raise ImportError(f"`{class_name}` names no module")
    return getattr(importlib.import_module(path), name)
