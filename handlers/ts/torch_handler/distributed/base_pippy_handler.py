"""The handler of models that are cut into stages, one for each process of a group."""

import os
from abc import ABC
from typing import Any

import torch

from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers
from ts.torch_handler.base_handler import BaseHandler


class BasePippyHandler(BaseHandler, ABC):
    """A subclass cuts its model in `initialize`, with
    `ts.handler_utils.distributed.pt_pippy.get_pipeline_driver`."""

    def __init__(self) -> None:
        super().__init__()
        self.local_rank = 0
        self.world_size = 1

    def initialize(self, context: Any) -> None:
        """Joins the group that `LOCAL_RANK` and `WORLD_SIZE` tell of.

        Raises:
            RuntimeError: this process is of no group; `torchrun` in model-config.yaml makes one.
        """
        if "LOCAL_RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                "this handler needs a group of processes: set `parallelType: pp` and `torchrun` in "
                "model-config.yaml"
            )
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        devices = torch.cuda.device_count()
        self.device = self.local_rank % devices if devices else torch.device("cpu")
        initialize_rpc_workers(self.local_rank, self.world_size, context)
