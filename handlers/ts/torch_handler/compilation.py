"""`torch.compile`, as `pt2` of model-config.yaml asks for it."""

import logging
from typing import Any

import torch

from ts.utils.util import check_valid_pt2_backend

logger = logging.getLogger(__name__)


def compiled(model: Any, pt2: Any) -> Any:
    """The model, compiled if `pt2` says so. A model that cannot be is served as it is."""
    options = _options(pt2)
    if options is None:
        return model
    backend = options.get("backend")
    if backend is not None and not check_valid_pt2_backend(backend):
        return model
    try:
        from torch import _dynamo

        # Torch compiles at the first call; what cannot be compiled then runs as it is, with a
        # warning of torch's. What fails here is the choice of options.
        _dynamo.config.suppress_errors = True
        result = torch.compile(model, **options)
    except Exception as refused:
        logger.warning("Compiling the model failed, it is served uncompiled: %s", refused)
        return model
    described = ", ".join(f"{key} {value}" for key, value in options.items())
    logger.info("Compiled model with %s", described or "the default backend")
    return result


def asks_for_aot(pt2: Any) -> bool:
    """Whether `pt2.export.aot_compile` says that the model is compiled already."""
    export = pt2.get("export") if isinstance(pt2, dict) else None
    return isinstance(export, dict) and export.get("aot_compile") is True


def _options(pt2: Any) -> dict[str, Any] | None:
    """The arguments of `torch.compile`, None where it is not wanted."""
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, dict) or not pt2:
        return None
    if "compile" in pt2:
        section = dict(pt2["compile"] or {})
        return section if section.pop("enable", False) else None
    if "export" in pt2:
        return None
    logger.warning("options directly under `pt2` are deprecated: move them to `pt2.compile`")
    return dict(pt2)
