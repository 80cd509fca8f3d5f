"""TensorFlow Serving's rows: `{"instances": […]}` in, `{"predictions": […]}` out."""

import base64
import json
from typing import Any

from .base import BaseEnvelope, body_of


class JSONEnvelope(BaseEnvelope):
    """Joins the instances of all requests, and cuts the results back by request."""

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """All instances, in the order of their requests."""
        groups = [_instances(row) for row in data]
        self._lengths = [len(group) for group in groups]
        return [instance for group in groups for instance in group]

    def format_output(self, results: list[Any]) -> list[Any]:
        """One JSON text for each request."""
        if len(results) != sum(self._lengths):
            raise ValueError(
                f"the handler returned {len(results)} results for {sum(self._lengths)} instances"
            )
        replies = []
        start = 0
        for length in self._lengths:
            replies.append(json.dumps({"predictions": results[start : start + length]}))
            start += length
        return replies


def _instances(row: dict[str, Any]) -> list[Any]:
    body = body_of(row) or row
    if isinstance(body, bytes | bytearray | str):
        body = json.loads(body)
    instances = body.get("instances") if isinstance(body, dict) else None
    if not isinstance(instances, list):
        raise ValueError("a request has no list of `instances`")
    if instances and isinstance(instances[0], dict):
        return [_decoded(instance) for instance in instances]
    return instances


def _decoded(instance: Any) -> Any:
    """Base64 to bytes: `{"b64": …}` itself, or any column of that form."""
    if not isinstance(instance, dict):
        return instance
    if set(instance) == {"b64"}:
        return base64.b64decode(instance["b64"])
    return {
        column: base64.b64decode(value["b64"])
        if isinstance(value, dict) and set(value) == {"b64"}
        else value
        for column, value in instance.items()
    }
