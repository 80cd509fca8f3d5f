"""KServe's first protocol. The first request of a batch only, so the batch size has to be 1."""

import json
from typing import Any

from .base import BaseEnvelope, body_of


class KServeEnvelope(BaseEnvelope):
    """`{"instances": […]}` in, `{"predictions": […]}` or `{"explanations": …}` out."""

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """The instances of the first request."""
        body = body_of(data[0])
        if isinstance(body, bytes | bytearray | str):
            body = json.loads(body)
        instances = body.get("instances") if isinstance(body, dict) else None
        if not isinstance(instances, list):
            raise ValueError("the request has no list of `instances`")
        return instances

    def format_output(self, results: list[Any]) -> list[Any]:
        """All results in one reply."""
        explained = self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if explained else "predictions": results}]
