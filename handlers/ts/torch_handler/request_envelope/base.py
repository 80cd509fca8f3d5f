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
        if not data:  # as a function is called when its model loads
            return self._handle_fn(data, context)
        unwrapped = self.parse_input(data)
        # Handlers stack what they get, and nothing cannot be stacked.
        results = self._handle_fn(unwrapped, context) if unwrapped else []
        return self.format_output(results) if isinstance(results, list) else results

    @abstractmethod
    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """What the handler gets."""

    @abstractmethod
    def format_output(self, results: list[Any]) -> list[Any]:
        """What the clients get."""


def body_of(row: dict[str, Any]) -> Any:
    """The one value of a request that an envelope looks into."""
    return row.get("data") or row.get("body")
