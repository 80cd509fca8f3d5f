"""Timing of a handler's steps."""

import functools
import time
from collections.abc import Callable
from typing import Any


def timed(step: Callable[..., Any]) -> Callable[..., Any]:
    """Records the step as `ts_handler_<name>` if `handler.profile` of model-config.yaml is set.

    For methods of handlers that keep their context in `self.context`.
    """
    metric = f"ts_handler_{step.__name__}"

    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "context", None)
        config = getattr(context, "model_yaml_config", None) or {}
        section = config.get("handler")
        if context is None or not (isinstance(section, dict) and section.get("profile")):
            return step(self, *args, **kwargs)
        started = time.perf_counter()
        result = step(self, *args, **kwargs)
        context.metrics.add_time(metric, (time.perf_counter() - started) * 1000.0)
        return result

    return run
