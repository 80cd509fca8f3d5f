"""What a handler's threads say to the server while requests run."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ts._runtime import failures, values

if TYPE_CHECKING:
    from ts.context import Context

_logger = logging.getLogger(__name__)

# (kind, code, message) of one request.
Failure = tuple[str, int, str]
# (status, reason, headers, body) of one request.
Reply = tuple[int, str, list[tuple[str, str]], bytes | bytearray]


class Functions(Protocol):
    """The functions of the host: `(send, has_left, answer)`."""

    def __getitem__(self, index: int) -> Any: ...


class CallersLeftError(Exception):
    """Nobody waits for any request of the batch any more: there is no use in going on.

    Raised by `send_intermediate_predict_response`. A handler may clean up and let it pass.
    """


class Output:
    """A worker's way to the server. Thread-safe."""

    def __init__(self, functions: Functions) -> None:
        self._send, self._has_left, self.answer = (functions[index] for index in range(3))

    def has_left(self, request_id: str) -> bool:
        """Whether the caller of a running request has left."""
        return self._has_left(request_id) is True

    def send(
        self,
        results: Sequence[Any] | None,
        request_ids: Mapping[int, str],
        message: str,
        code: int,
        context: "Context",
    ) -> None:
        """Sends one part of the reply to each of the requests; more follow."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Of the processes that a model spans, the first one speaks.
            return
        parts: list[tuple[str, Reply | Failure]] = []
        for index, request_id in request_ids.items():
            if code != 200:
                parts.append((request_id, ("handler_status", code, message)))
                continue
            result = None if results is None else results[index]
            if isinstance(result, BaseException):
                parts.append((request_id, failures.item(result, request_id)))
            else:
                head = context.part_head(index, request_id)
                parts.append((request_id, (*head, values.body(result))))
        dropped, all_left = self._send(parts)
        if dropped and context.warn_of_dropped_parts():
            _logger.warning(
                "%d of %d intermediate responses were dropped: their requests have been answered, "
                "are unknown, or were named twice",
                dropped,
                len(parts),
            )
        if all_left and context.all_have_left():
            raise CallersLeftError("every caller of the batch has left")
