"""Helpers that handlers import: the exception clients may see, labels, classes, YAML."""

import enum
import functools
import inspect
import itertools
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

# Markup tags, for handlers that clean text.
CLEANUP_REGEX = re.compile("<.*?>")


class PredictionException(Exception):
    """Raised by a handler to answer the whole batch with a message and a status of its choice."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that `module` itself defines, in the order of their names."""
    return [
        found
        for name, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__
        # An alias would count the class twice.
        and (name == found.__name__ or getattr(module, found.__name__, None) is not found)
        and (parent_class is None or issubclass(found, parent_class))
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, Any] | None:
    """Reads `index_to_name.json`; None, with a warning, where there is none."""
    if not os.path.isfile(mapping_file_path):
        logger.warning(
            "%s is missing. Inference output will not include class name.", mapping_file_path
        )
        return None
    with open(mapping_file_path, encoding="utf-8") as file:
        mapping = json.load(file)
    if not isinstance(mapping, dict):
        raise ValueError(f"`{mapping_file_path}` is not a JSON object of index to label")
    if "object_type_names" in mapping:
        names = mapping["object_type_names"]
        return {str(index): name for index, name in enumerate(names)}
    labels = {}
    for index, label in mapping.items():
        # `["n01440764", "tench"]`: the last one is for people.
        labels[index] = label[-1] if isinstance(label, list) and label else label
        if not isinstance(labels[index], str):
            raise ValueError(
                f"the label of `{index}` in `{mapping_file_path}` is no text or list of texts"
            )
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: dict[str, Any] | None = None,
    lbl_classes: Iterable[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """One `{label: value}` for each row; indices stand for labels where there is no mapping."""
    if lbl_classes is None:
        lbl_classes = itertools.repeat(range(len(probs[0]) if probs else 0), len(probs))
    return [
        {
            (str(index) if mapping is None else mapping[str(index)]): value
            for index, value in zip(indices, row, strict=False)
        }
        for indices, row in zip(lbl_classes, probs, strict=False)
    ]


def get_yaml_config(yaml_file_path: str) -> Any:
    """What `yaml.safe_load` reads from a file."""
    import yaml

    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def deprecated(version: str, replacement: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Marks a function that will go; calling it warns."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        text = f"`{function.__name__}` is deprecated since {version}"
        if replacement:
            text += f"; use `{replacement}`"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return call

    return mark


class PT2Backend(enum.StrEnum):
    """The backends of `torch.compile` that `model-config.yaml` may name."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether `backend` is one of `PT2Backend`; warns if not."""
    if backend in set(PT2Backend):
        return True
    logger.warning("%s is not a supported backend", backend)
    return False
