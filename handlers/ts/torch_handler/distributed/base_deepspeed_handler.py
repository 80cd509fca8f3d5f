"""The handler of models that DeepSpeed runs in a group of processes."""

import os
from abc import ABC
from typing import Any

from ts.torch_handler.base_handler import BaseHandler


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """A subclass loads its model in `initialize`, with
    `ts.handler_utils.distributed.deepspeed.get_ds_engine`; the device is that of this process."""

    def initialize(self, context: Any) -> None:
        """Takes the number of this process in its group (`LOCAL_RANK`) as its device."""
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self.device = int(os.environ.get("LOCAL_RANK", "0"))
