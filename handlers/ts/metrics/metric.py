"""A single measurement, for `ts.service.emit_metrics`; kept for older archives."""

from collections.abc import Sequence
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import UNITS


class Metric:
    """Name, value, unit and dimensions."""

    def __init__(
        self,
        name: str,
        value: float,
        unit: str,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.value = value
        self.unit = UNITS.get(unit, unit)
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    @property
    def metric_type(self) -> MetricTypes:
        """What the server makes of it where no configuration says."""
        return MetricTypes.COUNTER if self.metric_method == "counter" else MetricTypes.GAUGE

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "RequestId": self.request_id,
        }

    def update(self, value: float) -> None:
        """Adds to a counter, replaces anything else."""
        self.value = self.value + value if self.metric_method == "counter" else value
