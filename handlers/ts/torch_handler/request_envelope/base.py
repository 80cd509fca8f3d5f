"""What all envelopes do: unwrap the requests, call the handler, wrap its results."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class BaseEnvelope(ABC):
    """Stands in for a handler's entry point."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: list[dict[str, Any]], context: Any) -> Any:
        """One batch."""
        self.context = context
        unwrapped = self.parse_input(data) if data else data
        results = self._handle_fn(unwrapped, context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """What the handler gets."""

    @abstractmethod
    def format_output(self, results: list[Any]) -> list[Any]:
        """What the clients get."""


def body_of(row: dict[str, Any]) -> Any:
    """The one value of a request that an envelope looks into."""
    return row.get("data") or row.get("body")
