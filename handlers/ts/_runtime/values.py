"""How request bodies become a handler's input, and its results become reply bodies.

No body is ever unpickled: the media type chooses between JSON, text and bytes, and nothing else.
"""

import io
import json
import logging
import sys
from typing import Any

from ts.context import Part

_logger = logging.getLogger(__name__)


class UnsupportedOutputError(Exception):
    """A result that is neither bytes, text, tensor nor JSON."""


def row(parts: list[Part], decode: bool) -> dict[str, Any]:
    """The dict that a handler sees for one request. Of equal names the last one wins."""
    if decode:
        return {
            name: _decoded(name, content_type, value) if content_type else value
            for name, content_type, value in parts
        }
    return {name: value for name, _, value in parts}


def _decoded(name: str, content_type: str, value: bytearray) -> Any:
    """The value as its media type says; as it came if it does not keep what that promises.

    Case-sensitive, and `application/json` only, as in TorchServe: archives rely on both.
    """
    try:
        if content_type.partition(";")[0].rstrip() == "application/json":
            # Through `str`: `json.loads` would guess UTF-16 and skip a byte order mark.
            return json.loads(value.decode())
        if content_type.startswith("text"):
            return value.decode()
    except (ValueError, RecursionError) as refused:
        _logger.warning(
            "part %r is not valid %r (%s); the handler gets its bytes", name, content_type, refused
        )
    return value


def body(answer: Any) -> bytes | bytearray:
    """The bytes to send for one result.

    Raises `UnsupportedOutputError` for what has no form on the wire.
    """
    if isinstance(answer, bytes | bytearray):
        return answer
    if isinstance(answer, str):
        # A lone surrogate has no UTF-8 form; a `?` in one place beats losing the whole batch.
        return answer.encode("utf-8", "replace")
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)
    if isinstance(tensor_type, type) and isinstance(answer, tensor_type):
        return _saved(torch, answer)
    try:
        return json.dumps(answer, indent=2).encode("ascii")
    except (TypeError, ValueError, OverflowError, RecursionError) as refused:
        name = type(answer).__name__
        raise UnsupportedOutputError(f"a `{name}` cannot be sent: {refused}") from refused


def _saved(torch: Any, tensor: Any) -> bytes:
    """The tensor in torch's file format."""
    # `torch.save` writes the whole storage: a row of a batch would carry the answers of others.
    if tensor.untyped_storage().nbytes() != tensor.nelement() * tensor.element_size():
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()
