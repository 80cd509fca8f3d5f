"""Profiles of what a handler does, where `ENABLE_TORCH_PROFILER` asks for them."""

import os
import tempfile
from typing import Any

import torch


def is_enabled() -> bool:
    """Whether each batch is profiled."""
    return os.environ.get("ENABLE_TORCH_PROFILER", "").lower() not in ("", "0", "false")


def profiler(arguments: dict[str, Any], model_name: str) -> torch.profiler.profile:
    """A profiler with the handler's `profiler_args`; what they leave open is all activities there
    are, and a trace for each batch in `pytorch_profiler/<model>` in the folder for temporary files.
    """
    chosen = dict(arguments)
    if not chosen.get("activities"):
        chosen["activities"] = list(torch.profiler.supported_activities())  # type: ignore[no-untyped-call]
    # One batch is one cycle, so that there is nothing to clear.
    chosen.setdefault("acc_events", True)
    if "on_trace_ready" not in chosen:
        folder = os.path.join(tempfile.gettempdir(), "pytorch_profiler", model_name)
        chosen["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(folder)
    return torch.profiler.profile(**chosen)
