"""Where a model runs, by what there is and what the environment asks for."""

import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A device, and where torch's readers are to put what they read."""

    device: Any
    map_location: str | None


def switched_on(variable: str) -> bool:
    """Whether a variable of the environment says `true`."""
    return os.environ.get(variable, "").strip().lower() == "true"


def place(gpu_id: int | str | None) -> Place:
    """The first that there is of CUDA, Intel's GPUs (with `TS_IPEX_GPU_ENABLE`), Apple's, XLA's and
    the processor. Without a number of a GPU, only XLA's and the processor."""
    if gpu_id is not None:
        found = _accelerator(gpu_id)
        if found is not None:
            return found
    if importlib.util.find_spec("torch_xla") is not None:
        import torch_xla.core.xla_model as xla

        return Place(xla.xla_device(), None)
    if gpu_id is not None:
        logger.warning("torch cannot reach GPU %s; the model runs on the CPU", gpu_id)
    return Place(torch.device("cpu"), "cpu")


def _accelerator(gpu_id: int | str) -> Place | None:
    if torch.cuda.is_available():
        device = torch.device(f"cuda:{gpu_id}")
        if torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        return Place(device, "cuda")
    if switched_on("TS_IPEX_GPU_ENABLE"):
        if torch.xpu.is_available():
            return Place(torch.device(f"xpu:{gpu_id}"), "xpu")
        logger.warning("`ipex_gpu_enable` is on, and torch finds no GPU of Intel's")
    if torch.backends.mps.is_available():
        return Place(torch.device("mps"), "mps")
    return None


def optimised_for_intel(model: Any) -> Any:
    """The model as the Intel extension arranges it, where `ipex_enable` asks for that."""
    if not (switched_on("TS_IPEX_ENABLE") or switched_on("TS_IPEX_GPU_ENABLE")):
        return model
    try:
        import intel_extension_for_pytorch as ipex
    except ModuleNotFoundError as missing:
        logger.warning("`ipex_enable` is on, and the model is served without: %s", missing)
        return model
    return ipex.optimize(model.to(memory_format=torch.channels_last))
