"""Engines of DeepSpeed, as `deepspeed` in model-config.yaml describes them."""

import json
import os
from typing import Any

from ts.torch_handler.formats import needed


def get_ds_engine(model: Any, ctx: Any) -> Any:
    """The engine for this process's part of a model.

    `deepspeed.config` names a JSON file of the archive, whose content goes to
    `deepspeed.init_inference`; `deepspeed.checkpoint` one of the checkpoint.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        ValueError: the section or its file is missing.
    """
    deepspeed = needed("deepspeed", "a `deepspeed` section in model-config.yaml")
    section = (ctx.model_yaml_config or {}).get("deepspeed")
    if not isinstance(section, dict) or "config" not in section:
        raise ValueError("model-config.yaml has no `deepspeed` section with a `config`")
    folder = ctx.system_properties["model_dir"]
    path = os.path.join(folder, section["config"])
    if not os.path.isfile(path):
        raise ValueError(f"`deepspeed.config` names `{section['config']}`, which is not there")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    if checkpoint := section.get("checkpoint"):
        checkpoint_path = os.path.join(folder, checkpoint)
        if not os.path.isfile(checkpoint_path):
            raise ValueError(f"`deepspeed.checkpoint` names `{checkpoint}`, which is not there")
        config["checkpoint"] = checkpoint_path
        config.setdefault("base_dir", folder)
    return deepspeed.init_inference(model, config=config)
