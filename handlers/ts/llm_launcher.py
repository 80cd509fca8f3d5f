"""Serves a language model with one command: `python -m ts.llm_launcher --model_id NAME`.

Writes a model for one of the engines into the model store, and becomes the server of it.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ts import launcher

# What each engine is imported as, and the handler that runs it.
ENGINES = {
    "vllm": ("vllm", "vllm_handler"),
    "trt_llm": ("tensorrt_llm", "trt_llm_handler"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Writes the model and becomes the server, which runs in the foreground until interrupted."""
    options = parser().parse_args(arguments)
    package, _handler = ENGINES[options.engine]
    if importlib.util.find_spec(package) is None:
        sys.exit(
            f"the engine `{options.engine}` needs the package `{package}`, which this Python does "
            f"not have; install it with `{sys.executable} -m pip install {package}`"
        )
    devices = device_count()
    if devices == 0:
        sys.exit("no GPU that torch can use was found, and the engines need one")
    folder = write_model(options, devices)
    launcher.stop(wait=True)
    line = launcher.command(
        model_store=options.model_store,
        no_config_snapshots=True,
        disable_token=options.disable_token_auth,
        models=folder.name,
        foreground=True,
    )
    sys.stdout.flush()
    # The server takes this process over: signals and the exit code are its own, and nothing that
    # was imported here stays in memory.
    os.execve(line[0], line, launcher.environment())


def parser() -> argparse.ArgumentParser:
    """The command line, with TorchServe's names and defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m ts.llm_launcher",
        description="Serves a language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model_name", default="model", type=file_name, help="name the model is served under")
    add("--model_store", default="model_store", help="folder that the model is written to")
    add(
        "--model_id",
        default="meta-llama/Meta-Llama-3.1-8B-Instruct",
        help="folder of the model, or its name on the Hugging Face hub",
    )
    add("--disable_token_auth", action="store_true", help="do not ask for tokens")
    add("--engine", default="vllm", choices=ENGINES, help="what runs the model")
    add("--startup_timeout", default=1200, type=int, help="seconds that loading may take")
    add("--dtype", default="bfloat16", help="number format of the engine that trt_llm builds")
    add("--vllm_engine.max_num_seqs", default=256, type=int, help="sequences at once")
    add("--vllm_engine.max_model_len", type=int, help="tokens of a sequence, else the model's")
    add("--vllm_engine.download_dir", help="folder for weights, else the hub's own")
    add("--trt_llm_engine.max_batch_size", default=4, type=int, help="requests of a batch")
    add(
        "--trt_llm_engine.kv_cache_free_gpu_memory_fraction",
        default=0.1,
        type=float,
        help="part of the free GPU memory that keys and values may take",
    )
    return parser


def file_name(text: str) -> str:
    """Takes a model's name that can also be that of its folder."""
    if not text or text.startswith((".", "-")) or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"`{text}` cannot be the name of a folder in the store")
    return text


def device_count() -> int:
    """How many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def write_model(options: argparse.Namespace, devices: int) -> Path:
    """Writes the folder of a model without an archive, anew if an earlier start has left it."""
    _package, handler = ENGINES[options.engine]
    folder = Path(options.model_store, options.model_name)
    manifest = folder / "MAR-INF" / "MANIFEST.json"
    if folder.exists() and not is_ours(manifest):
        sys.exit(
            f"`{folder}` is a model that was not written here; "
            "choose another `--model_name` or remove it"
        )
    manifest.parent.mkdir(parents=True, exist_ok=True)
    # The manifest first: a start that is broken off leaves a folder that the next one takes.
    entry = {
        "modelName": options.model_name,
        "modelVersion": "1.0",
        "handler": handler,
        "configFile": "model-config.yaml",
    }
    manifest.write_text(json.dumps({"runtime": "python", "model": entry}, indent=2) + "\n")
    if options.engine == "vllm":
        config = vllm_config(options, devices)
    else:
        config = trt_llm_config(options, folder)
    text = yaml.safe_dump(config, sort_keys=False)
    (folder / "model-config.yaml").write_text(text, encoding="utf-8")
    return folder


def is_ours(manifest: Path) -> bool:
    """Whether a manifest names one of the handlers that this command writes."""
    try:
        handler = json.loads(manifest.read_text())["model"]["handler"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return handler in [handler for _package, handler in ENGINES.values()]


def common_config(options: argparse.Namespace) -> dict[str, Any]:
    """What both engines have in their model-config.yaml."""
    return {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": options.startup_timeout,
        "deviceType": "gpu",
        "asyncCommunication": True,
    }


def vllm_config(options: argparse.Namespace, devices: int) -> dict[str, Any]:
    """Lets vLLM spread the model over all GPUs."""
    given = vars(options)
    return common_config(options) | {
        "parallelLevel": devices,
        "handler": {
            "model_path": options.model_id,
            "vllm_engine_config": {
                "max_num_seqs": given["vllm_engine.max_num_seqs"],
                "max_model_len": given["vllm_engine.max_model_len"],
                "download_dir": given["vllm_engine.download_dir"],
                "tensor_parallel_size": devices,
            },
        },
    }


def trt_llm_config(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Names the engine, which is built on first use."""
    given = vars(options)
    weights = options.model_id
    if not Path(weights).is_dir():
        weights = importlib.import_module("huggingface_hub").snapshot_download(weights)
    max_batch_size = given["trt_llm_engine.max_batch_size"]
    # One for each set of what it is made from.
    made_from = f"{options.model_id}-{options.dtype}-{max_batch_size}"
    engine = folder / "engines" / re.sub("[^A-Za-z0-9.]", "-", made_from)
    if not engine.is_dir():
        build_engine(weights, engine, options.dtype, max_batch_size)
    fraction = given["trt_llm_engine.kv_cache_free_gpu_memory_fraction"]
    return common_config(options) | {
        "handler": {
            "tokenizer_dir": str(weights),
            "engine_dir": str(engine.resolve()),
            "kv_cache_config": {"free_gpu_memory_fraction": fraction},
        },
    }


def build_engine(weights: str, engine: Path, dtype: str, max_batch_size: int) -> None:
    """Builds a TensorRT engine into a folder that appears once all of it is there."""
    package = importlib.import_module("tensorrt_llm")
    try:
        # Since release 1.0 the class of the package itself runs without an engine.
        llm = importlib.import_module("tensorrt_llm._tensorrt_engine").LLM
    except ImportError:
        llm = package.LLM
    config = package.BuildConfig(max_batch_size=max_batch_size)
    engine.parent.mkdir(exist_ok=True)
    unfinished = engine.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with llm(model=weights, dtype=dtype, build_config=config) as built:
        built.save(str(unfinished))
    unfinished.rename(engine)


if __name__ == "__main__":
    main()
