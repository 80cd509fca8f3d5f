"""A metric that a handler keeps and updates."""

import logging
from collections.abc import Callable, Sequence

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import UNITS

logger = logging.getLogger(__name__)

# (name, value, unit, type, dimensions, request ids): one update, as the server takes it.
Emission = tuple[str, float, str, str, list[tuple[str, str]], str]


class CachingMetric:
    """Name, unit, type and dimension names; each update goes to the server with its batch."""

    __slots__ = ("_emit", "dimension_names", "metric_name", "metric_type", "unit")

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: MetricTypes,
        emit: Callable[[Emission], object],
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = list(dimension_names)
        self.metric_type = metric_type
        self._emit = emit

    def add_or_update(
        self, value: float, dimension_values: Sequence[str] = (), request_id: str = ""
    ) -> None:
        """Adds to a counter, sets a gauge, or observes in a histogram.

        A refused update is logged and not raised: a metric is no reason to fail a request.
        """
        try:
            number = float(value)
            if len(dimension_values) != len(self.dimension_names):
                expected, given = len(self.dimension_names), len(dimension_values)
                raise ValueError(f"{expected} dimension values are needed, {given} were given")
            if number < 0 and self.metric_type is MetricTypes.COUNTER:
                raise ValueError("a counter cannot go down")
        except (TypeError, ValueError, OverflowError) as refused:
            logger.error(
                "[METRICS]Failed to update metric with name:%s and dimensions: %s "
                "with value: %s: %s",
                self.metric_name,
                ",".join(map(str, dimension_values)),
                value,
                refused,
            )
            return
        dimensions = [
            (name, str(given))
            for name, given in zip(self.dimension_names, dimension_values, strict=True)
        ]
        self._emit(
            (
                self.metric_name,
                number,
                self.unit,
                self.metric_type.value,
                dimensions,
                request_id,
            )
        )

    def update(
        self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Like `add_or_update`, with names of dimensions that replace the metric's own."""
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)
