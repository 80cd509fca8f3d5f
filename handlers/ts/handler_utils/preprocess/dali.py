"""Pipelines of NVIDIA DALI, as archives of TorchServe's examples serialise them."""

from typing import Any

from ts.torch_handler.formats import needed


def serialize_pipeline(pipeline: Any, path: str) -> None:
    """Writes a pipeline to the file that `dali.pipeline_file` in model-config.yaml names."""
    needed("nvidia.dali", "a pipeline")
    pipeline.serialize(filename=path)
