"""Models and weights from files, by their format: what is read without the model's own code, and
what each format needs to be there."""

import importlib
import os
import pickle
import zipfile
from types import ModuleType
from typing import Any

import torch

from ts._runtime.policy import refused_global

# What is read of a `.pt2` package to tell the two kinds apart.
_COMPILED_PART = "/data/aotinductor/"


def needed(package: str, what_for: str) -> ModuleType:
    """Imports an optional package.

    Raises:
        ModuleNotFoundError: it is not there; the text says what needs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        root = package.partition(".")[0]
        if missing.name is None or missing.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"{what_for} needs the package `{root}`, which is not installed", name=missing.name
        ) from missing


def load_torchscript(path: str, map_location: Any) -> Any:
    """A TorchScript module.

    One that was compiled for TensorRT needs the package `torch_tensorrt` for its operators.
    """
    try:
        return torch.jit.load(path, map_location=map_location)  # type: ignore[no-untyped-call]
    except RuntimeError as refused:
        if "tensorrt" not in str(refused).lower():
            raise
        needed("torch_tensorrt", f"`{path}`, which is compiled for TensorRT,")
        return torch.jit.load(path, map_location=map_location)  # type: ignore[no-untyped-call]


def load_pt2(path: str, device: torch.device) -> Any:
    """What a `.pt2` package holds: a program of `torch.export.save`, as a module, or one that
    `torch._inductor.aoti_compile_and_package` has compiled, which can be called.

    Raises:
        RuntimeError: it is neither, or compiled for another kind of device or processor.
    """
    try:
        with zipfile.ZipFile(path) as package:
            names = package.namelist()
    except zipfile.BadZipFile as refused:
        raise RuntimeError(
            f"`{path}` is no `.pt2` package: {refused}. Write it with `torch.export.save` or "
            "`torch._inductor.aoti_compile_and_package`"
        ) from refused
    if any(_COMPILED_PART in name for name in names):
        return _load_compiled(path, device)
    module = torch.export.load(path).module()
    return module.to(device)


def _load_compiled(path: str, device: torch.device) -> Any:
    import torch._inductor

    try:
        compiled = torch._inductor.aoti_load_package(path)
        built_for = compiled.get_metadata()
    except (RuntimeError, OSError) as refused:
        raise RuntimeError(
            f"`{path}`, which is compiled ahead of time, does not fit this torch "
            f"({torch.__version__}) or this machine: {refused}. Compile it again here"
        ) from refused
    kind = built_for.get("AOTI_DEVICE_KEY", device.type)
    if kind != device.type:
        raise RuntimeError(
            f"`{path}` is compiled for `{kind}`, and the worker has `{device}`. Set `deviceType` "
            "in model-config.yaml, or compile it for this device"
        )
    return compiled


def load_aot_library(path: str, device: torch.device) -> Any:
    """What older releases of torch compiled into a shared library (`torch._export.aot_compile`)."""
    import torch._export

    load = getattr(torch._export, "aot_load", None)
    if load is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot load `{path}` any more. Compile the model with "
            "`torch._inductor.aoti_compile_and_package` into a `.pt2` package"
        )
    return load(path, device.type)


def load_onnx(path: str, on_cuda: bool, threads: int) -> Any:
    """A session of ONNX Runtime, with so many threads for one operator."""
    runtime = needed("onnxruntime", f"`{path}`")
    providers = ["CPUExecutionProvider"]
    if on_cuda:
        providers.insert(0, "CUDAExecutionProvider")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(path, providers=providers, sess_options=options)


def is_onnx_session(model: Any) -> bool:
    """Whether a model is a session, which is run by names of inputs and not called."""
    return type(model).__module__.partition(".")[0] == "onnxruntime"


def run_onnx(session: Any, inputs: Any) -> Any:
    """Runs a session on one tensor, or on as many as it has inputs, in their order, or by name.

    Returns:
        A tensor; a list of them where the model has several outputs.
    """
    names = [one.name for one in session.get_inputs()]
    if isinstance(inputs, dict):
        given = inputs
    else:
        values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if len(values) != len(names):
            raise ValueError(f"the model takes {len(names)} inputs ({names}), not {len(values)}")
        given = dict(zip(names, values, strict=True))
    arrays = {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    outputs = [torch.as_tensor(output) for output in session.run(None, arrays)]
    return outputs[0] if len(outputs) == 1 else outputs


def load_state(path: str, map_location: Any) -> Any:
    """A state dict, from a safetensors file or from torch's own format; never more than weights.

    Raises:
        RuntimeError: the file asks for more. The text names what.
    """
    if path.endswith(".safetensors"):
        safetensors = needed("safetensors.torch", f"`{path}`")
        return safetensors.load_file(path, device=str(map_location or "cpu"))
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as refused:
        # A full pickle runs whatever code it brings.
        asked = refused_global(str(refused))
        raise RuntimeError(
            f"`{os.path.basename(path)}` holds more than weights{f': {asked}' if asked else ''}. "
            "Save `model.state_dict()`, or load the file in a handler of your own that trusts it"
        ) from refused
