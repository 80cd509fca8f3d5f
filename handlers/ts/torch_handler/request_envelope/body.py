"""Hands over the bare bodies."""

from typing import Any

from .base import BaseEnvelope, body_of


class BodyEnvelope(BaseEnvelope):
    """One value for each request, in place of a dict."""

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """The `data` or `body` of each request."""
        return [body_of(row) for row in data]

    def format_output(self, results: list[Any]) -> list[Any]:
        """Unchanged."""
        return results
