"""The class that handlers of TorchServe's predecessors derive from."""

from abc import ABC, abstractmethod
from typing import Any


class ModelService(ABC):
    """Subclasses answer batches in `handle`; `initialize` and `preprocess` and the like are theirs.

    Args:
        model_name: registered name; the server makes handlers without arguments.
        model_dir: folder of the archive.
        manifest: content of its MANIFEST.json.
        gpu: number of the worker's GPU, None for the processor.
    """

    def __init__(
        self,
        model_name: str = "",
        model_dir: str = "",
        manifest: dict[str, Any] | None = None,
        gpu: int | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_dir = model_dir
        self.manifest = manifest
        self.gpu = gpu
        self.context: Any = None

    def initialize(self, context: Any) -> None:
        """Takes over what the server says of the model."""
        properties = context.system_properties
        self.context = context
        self.model_name = context.model_name
        self.model_dir = properties["model_dir"]
        self.manifest = context.manifest
        self.gpu = properties["gpu_id"]

    @abstractmethod
    def handle(self, data: Any, context: Any) -> list[Any]:
        """One batch, from requests to as many results."""
