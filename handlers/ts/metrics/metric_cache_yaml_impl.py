"""What handlers know as `context.metrics`."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ts.context import Item
from ts.metrics.caching_metric import CachingMetric, Emission
from ts.metrics.dimension import Dimension
from ts.metrics.metric_cache_errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from ts.metrics.metric_type_enum import MetricTypes

_TIME_UNITS = ("ms", "s")
_SIZE_UNITS = ("MB", "kB", "GB", "B")

# What the default metrics.yaml declares for models.
_DECLARED = (("HandlerTime", "ms"), ("PredictionTime", "ms"))


class MetricsCacheYamlImpl:
    """Metrics of one worker. Each update is handed to `sink`."""

    def __init__(
        self,
        config_file_path: str | None = None,
        model_name: str = "",
        sink: Callable[[Emission], object] = lambda emission: None,
    ) -> None:
        self.config_file_path = config_file_path
        self.model_name = model_name
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        # Set by the server for each batch. Ids are joined only when a metric wants them.
        self.items: list[Item] | None = None
        # Updates made while the model loads belong to no request.
        self._request_ids: Mapping[int, str] | str = str(uuid.uuid4())
        self._sink = sink
        for name, unit in _DECLARED:
            self.add_metric_to_cache(name, unit, ["ModelName", "Level"], MetricTypes.GAUGE)

    @property
    def request_ids(self) -> Mapping[int, str] | str:
        """The ids of the batch by index, or one text for all."""
        if self.items is not None:
            return {index: item[0] for index, item in enumerate(self.items)}
        return self._request_ids

    def set_request_ids(self, request_ids: Mapping[int, str] | str) -> None:
        """Sets the ids that updates outside of a batch carry."""
        self._request_ids = request_ids

    def initialize_cache(self) -> None:
        """Adds the metrics that the configuration file declares under `model_metrics`."""
        for type_name, metrics in _read_model_metrics(self.config_file_path).items():
            try:
                metric_type = MetricTypes(type_name)
                for metric in metrics:
                    self.add_metric_to_cache(
                        metric["name"], metric["unit"], metric["dimensions"], metric_type
                    )
            except (KeyError, TypeError, ValueError) as refused:
                raise MetricsCacheKeyError(
                    f"`{type_name}` of `{self.config_file_path}` is not a list of metrics "
                    f"with name, unit and dimensions: {refused}"
                ) from refused

    def cache_keys(self) -> list[MetricTypes]:
        """The types of which there are metrics."""
        return list(self.cache)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Declares a metric; it is sent once it is updated."""
        if not isinstance(metric_name, str) or not metric_name:
            raise MetricsCacheTypeError(f"`{metric_name!r}` is no metric name")
        if not isinstance(unit, str):
            raise MetricsCacheTypeError(f"unit `{unit!r}` of `{metric_name}` is no text")
        if not isinstance(metric_type, MetricTypes):
            raise MetricsCacheTypeError(f"`{metric_type!r}` of `{metric_name}` is no metric type")
        if isinstance(dimension_names, str) or not all(
            isinstance(name, str) for name in dimension_names
        ):
            raise MetricsCacheTypeError(f"dimension names of `{metric_name}` are no texts")
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type, self._sink)
        self.cache.setdefault(metric_type, {})[metric_name] = metric
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """A metric that was added before."""
        try:
            return self.cache[metric_type][metric_name]
        except (KeyError, TypeError) as unknown:
            raise MetricsCacheKeyError(
                f"no metric `{metric_name}` of type `{metric_type}` was added"
            ) from unknown

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Updates a metric, declaring it at its first use.

        `idx` is the request that it concerns; None means the whole batch.
        """
        dimensions = self._with_defaults(dimensions)
        try:
            metric = self.get_metric(name, metric_type)
        except MetricsCacheKeyError:
            names = [dimension.name for dimension in dimensions]
            metric = self.add_metric_to_cache(name, unit, names, metric_type)
        metric.update(value, self._request_id(idx), dimensions)

    def add_counter(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
    ) -> None:
        """Adds to a counter."""
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Records a duration in `ms` or `s`."""
        _check_unit(name, unit, _TIME_UNITS)
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Records a size in `B`, `kB`, `MB` or `GB`."""
        _check_unit(name, unit, _SIZE_UNITS)
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Records a share."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Counts an error."""
        self.add_metric(name, value, "", None, [*dimensions, Dimension("Level", "Error")])

    def _with_defaults(self, dimensions: Sequence[Dimension]) -> list[Dimension]:
        names = {dimension.name for dimension in dimensions}
        complete = list(dimensions)
        if "ModelName" not in names:
            complete.append(Dimension("ModelName", self.model_name))
        if "Level" not in names:
            complete.append(Dimension("Level", "Model"))
        return complete

    def _request_id(self, idx: int | None) -> str:
        ids = self.request_ids
        if isinstance(ids, str):
            return ids
        if idx is not None and idx in ids:
            return ids[idx]
        return ",".join(ids.values())


def _check_unit(name: str, unit: str, allowed: tuple[str, ...]) -> None:
    if unit not in allowed:
        raise MetricsCacheValueError(f"unit `{unit}` of `{name}` is none of {', '.join(allowed)}")


def _read_model_metrics(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            metrics = (yaml.safe_load(file) or {}).get("model_metrics")
    except OSError as failed:
        raise MetricsCacheIOError(f"cannot read `{path}`: {failed}") from failed
    except (yaml.YAMLError, UnicodeDecodeError) as refused:
        raise MetricsCachePyYamlError(f"`{path}` is not YAML: {refused}") from refused
    except AttributeError as refused:
        raise MetricsCacheTypeError(f"`{path}` is not a YAML mapping") from refused
    if not isinstance(metrics, dict):
        raise MetricsCacheKeyError(f"`{path}` has no `model_metrics`")
    return metrics
