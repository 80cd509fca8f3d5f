"""Models cut into stages by PiPPy, as `pippy` in model-config.yaml describes them.

PiPPy is no longer published; its successor is `torch.distributed.pipelining`, whose stages a
handler makes itself. These functions serve archives that bring the package along.
"""

import os
from typing import Any

from ts.torch_handler.formats import needed

_SUCCESSOR = "`pippy` in model-config.yaml (its successor is `torch.distributed.pipelining`)"


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> None:
    """Joins this process to those of its group.

    Args:
        local_rank: which process of the group this is.
        world_size: processes of the group.
        ctx: the handler's context; `pippy.rpc_timeout` (s) and `pippy.num_worker_threads` count.
    """
    from torch.distributed import rpc

    section = _section(ctx)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=section.get("num_worker_threads", 512),
        rpc_timeout=section.get("rpc_timeout", 1800),
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=options
    )


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> Any:
    """The driver of a model in as many stages as there are processes.

    `pippy.input_names` are the inputs that are given, `pippy.chunks` the pieces of a batch,
    `pippy.index_filename` the index of a checkpoint in the archive, and `pippy.model_type` `HF` for
    models of Hugging Face.
    """
    pippy = needed("pippy", _SUCCESSOR)
    section = _section(ctx)
    names = section.get("input_names")
    if not names:
        raise ValueError("`pippy.input_names` in model-config.yaml names no input")
    options: dict[str, Any] = {
        "num_ranks": world_size,
        "chunks": section.get("chunks", 1),
        "split_policy": pippy.split_into_equal_size(world_size),
        "concrete_args": pippy.create_default_args(model, except_keys=names),
    }
    if section.get("model_type") == "HF":
        options["tracer"] = needed("pippy.hf", _SUCCESSOR).PiPPyHFTracer()
    if index := section.get("index_filename") or section.get("index_file_name"):
        folder = ctx.system_properties["model_dir"]
        options |= {
            "index_filename": os.path.join(folder, index),
            "checkpoint_prefix": section.get("checkpoint_prefix"),
        }
    return pippy.all_compile(model, **options)


def _section(ctx: Any) -> dict[str, Any]:
    section = (ctx.model_yaml_config or {}).get("pippy")
    if not isinstance(section, dict):
        raise ValueError("model-config.yaml has no `pippy` section")
    return section
