"""Names that older archives import from here."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from ts.context import Context
from ts.metrics.metric import Metric
from ts.utils.util import PredictionException

__all__ = ["PredictionException", "Service", "emit_metrics"]


class Service:
    """A model and its entry point, for tests that archives bring along."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        entry_point: Callable[[Any, Context], Any],
        gpu: int | None,
        batch_size: int,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> None:
        self._entry_point = entry_point
        self._context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu,
            "",
            limit_max_image_pixels,
            metrics=metrics_cache,
        )

    @property
    def context(self) -> Context:
        """The context that the entry point gets."""
        return self._context


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Prints metrics as lines for the server to read. `context.metrics` costs less."""
    host = socket.gethostname()
    for metric in metrics:
        dimensions = ",".join(map(str, metric.dimensions))
        line = (
            f"[METRICS]{metric.name}.{metric.unit}:{metric.value}|#{dimensions}"
            f"|#type:{metric.metric_type.name}|#hostname:{host},{int(time.time())}"
        )
        if metric.request_id:
            line += f",{metric.request_id}"
        sys.stdout.write(line + os.linesep)
