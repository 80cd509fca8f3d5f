"""What the metrics interface raises."""


class GeneralMetricsCacheError(Exception):
    """Any of the errors below."""


class MetricsCacheValueError(GeneralMetricsCacheError):
    """A value that is not one of those allowed, such as a unit."""


class MetricsCacheTypeError(GeneralMetricsCacheError):
    """A value of the wrong type."""


class MetricsCacheKeyError(GeneralMetricsCacheError):
    """A metric that was never added."""


class MetricsCacheIOError(GeneralMetricsCacheError):
    """A configuration file that cannot be read."""


class MetricsCachePyYamlError(GeneralMetricsCacheError):
    """A configuration file that is not YAML."""
