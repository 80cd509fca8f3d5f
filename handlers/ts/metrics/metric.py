"""A single measurement, for `ts.service.emit_metrics`; kept for older archives."""

from collections.abc import Sequence

from ts.metrics.dimension import Dimension
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

    def update(self, value: float) -> None:
        """Adds to a counter, replaces anything else."""
        self.value = self.value + value if self.metric_method == "counter" else value
