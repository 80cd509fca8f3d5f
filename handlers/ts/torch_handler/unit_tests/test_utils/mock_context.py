"""A context for unit tests of handlers, without a server."""

import os
from typing import Any

from ts.context import Context, RequestProcessor
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.utils.util import get_yaml_config


class MockContext(Context):
    """A context with one request. Set `explain` to ask for an explanation."""

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = ".",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        model = {"serializedFile": model_pt_file, "modelFile": model_file}
        config: dict[str, Any] = {}
        if model_yaml_config_file is not None:
            config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file))
        super().__init__(
            model_name,
            model_dir,
            {"model": {key: name for key, name in model.items() if name}},
            1,
            None if gpu_id is None else int(gpu_id),
            "",
            metrics=MetricsCacheYamlImpl(model_name=model_name),
            model_yaml_config=config,
        )
        self.request_ids = {0: "0"}
        self.request_processor = [RequestProcessor({})]
        self.explain = False

    def get_request_header(self, idx: int, key: str) -> Any:
        """`explain` follows the attribute; other headers come from the request processor."""
        if key == "explain":
            return str(self.explain)
        return super().get_request_header(idx, key)
