"""How long functions take, for whoever looks for it in the model's log."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def timeit(func: Callable[..., Any]) -> Callable[..., Any]:
    """Logs the milliseconds of each call."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            taken = (time.perf_counter() - started) * 1000.0
            logger.info("%s took %.2f ms", func.__qualname__, taken)

    return call
