"""Metrics gathered by hand, for `ts.service.emit_metrics`; kept for older archives.

`context.metrics` does the same without being emitted by hand.
"""

from collections.abc import Mapping, Sequence

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricsStore:
    """Metrics of one batch, each of its values one entry of `store`."""

    def __init__(self, request_ids: Mapping[int, str] | str, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        # Counters add up under their name, their dimensions and their requests.
        self.cache: dict[tuple[str, str, str], Metric] = {}

    def add_counter(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Adds to a counter."""
        self._add_or_update(name, value, self._request_id(idx), "count", dimensions, "counter")

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Records a duration in `ms` or `s`."""
        _check_unit(name, unit, ("ms", "s"))
        self._add_or_update(name, value, self._request_id(idx), unit, dimensions)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Records a size in `B`, `kB`, `MB` or `GB`."""
        _check_unit(name, unit, ("MB", "kB", "GB", "B"))
        self._add_or_update(name, value, self._request_id(idx), unit, dimensions)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Records a share."""
        self._add_or_update(name, value, self._request_id(idx), "percent", dimensions)

    def add_error(
        self, name: str, value: float, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """Records an error."""
        level = Dimension("Level", "Error")
        self._add_or_update(name, value, None, "", [*(dimensions or []), level])

    def add_metric(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Records a value of any unit."""
        self._add_or_update(name, value, self._request_id(idx), unit, dimensions)

    def _add_or_update(
        self,
        name: str,
        value: float,
        request_id: str | None,
        unit: str,
        dimensions: Sequence[Dimension] | None,
        method: str | None = None,
    ) -> None:
        complete = list(dimensions or [])
        names = {dimension.name for dimension in complete}
        defaults = {"ModelName": self.model_name, "Level": "Model"}
        complete += [Dimension(key, text) for key, text in defaults.items() if key not in names]
        key = (name, ",".join(map(str, complete)), request_id or "")
        known = self.cache.get(key) if method == "counter" else None
        if known is not None:
            known.update(value)
            return
        metric = Metric(name, value, unit, complete, request_id, method)
        self.store.append(metric)
        self.cache[key] = metric

    def _request_id(self, idx: int | None) -> str:
        if isinstance(self.request_ids, str):
            return self.request_ids
        if idx is not None and idx in self.request_ids:
            return self.request_ids[idx]
        return ",".join(self.request_ids.values())


def _check_unit(name: str, unit: str, allowed: tuple[str, ...]) -> None:
    if unit not in allowed:
        raise ValueError(f"unit `{unit}` of `{name}` is none of {', '.join(allowed)}")
