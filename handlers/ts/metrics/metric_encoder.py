"""Metrics and their dimensions as JSON; kept for older archives."""

import json
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricEncoder(json.JSONEncoder):
    """An encoder that knows them."""

    def default(self, obj: Any) -> Any:
        """One of them as a mapping; all else as ever."""
        if isinstance(obj, (Metric, Dimension)):
            return obj.to_dict()
        return super().default(obj)
