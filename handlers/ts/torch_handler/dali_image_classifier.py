"""Image classification with NVIDIA DALI's decoding and resizing."""

import os
from typing import Any

import numpy
import torch

from ts.torch_handler.base_handler import value_of
from ts.torch_handler.formats import needed
from ts.torch_handler.image_classifier import ImageClassifier


class DALIImageClassifier(ImageClassifier):
    """Decodes, resizes and normalises whole batches by a pipeline of the archive, which `dali` in
    model-config.yaml names: `pipeline_file`, with `batch_size`, `num_threads`, `device_id`, `seed`.
    """

    def initialize(self, context: Any) -> None:
        """Also builds the pipeline."""
        super().initialize(context)
        config = self.model_yaml_config.get("dali")
        if not isinstance(config, dict) or "pipeline_file" not in config:
            raise ValueError("model-config.yaml has no `dali` section with a `pipeline_file`")
        dali = needed("nvidia.dali", "`dali_image_classifier`")
        path = os.path.join(context.system_properties["model_dir"], config["pipeline_file"])
        self.pipeline = dali.pipeline.Pipeline.deserialize(
            filename=path,
            batch_size=config.get("batch_size", context.system_properties["batch_size"]),
            num_threads=config.get("num_threads", 1),
            device_id=config.get("device_id", 0),
            seed=config.get("seed", -1),
        )
        self.pipeline.build()

    def preprocess(self, data: Any) -> torch.Tensor:
        """A batch from encoded images."""
        encoded = [numpy.frombuffer(value_of(row), dtype=numpy.uint8) for row in data]
        self.pipeline.feed_input("source", encoded)
        (images,) = self.pipeline.run()
        batch = images.as_cpu().as_array() if hasattr(images, "as_cpu") else images.as_array()
        return torch.as_tensor(batch, device=self.device)
