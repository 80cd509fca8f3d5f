"""The kinds of metrics."""

import enum


class MetricTypes(enum.Enum):
    """What the values of a metric add up to."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
