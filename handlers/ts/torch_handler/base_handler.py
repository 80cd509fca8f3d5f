"""The handler that most handlers derive from: load, preprocess, infer, postprocess."""

import os
import time
from typing import Any

import torch

from ts._runtime.loader import import_file
from ts.handler_utils.timer import timed
from ts.torch_handler import devices, formats, profiling
from ts.torch_handler.compilation import asks_for_aot, compiled
from ts.utils.util import list_classes_from_module, load_label_mapping

# What `_load_model` reads, for whoever packed something else.
_FORMATS = (
    "TorchScript (`.pt`), `.pt2` packages (exported, or compiled ahead of time), ONNX (`.onnx`), "
    "libraries compiled ahead of time (`.so`, with `pt2.export.aot_compile`), and state dicts "
    "(`.pt`, `.pth`, `.bin`, `.safetensors`) beside a model file"
)


class BaseHandler:
    """Serves one PyTorch model. Subclasses override the steps they need."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, Any] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: dict[str, Any] | None = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}

    def initialize(self, context: Any) -> None:
        """Chooses the device, loads the model and reads the labels."""
        properties = context.system_properties
        model_dir = properties["model_dir"]
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self._choose_device(properties.get("gpu_id"))
        self._load_model(model_dir, (self.manifest or {}).get("model") or {})
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self.initialized = True

    def _choose_device(self, gpu_id: int | str | None) -> None:
        place = devices.place(gpu_id)
        self.device, self.map_location = place.device, place.map_location

    def _load_model(self, model_dir: str, entry: dict[str, Any]) -> None:
        serialized_file = entry.get("serializedFile")
        model_file = entry.get("modelFile")
        path = None if not serialized_file else os.path.join(model_dir, serialized_file)
        self.model_pt_path = path
        if model_file:
            self.model = self._load_pickled_model(model_dir, model_file, path)
        elif path is None:
            raise RuntimeError(
                "No model weights could be loaded: the manifest names neither a serialized file "
                "nor a model file"
            )
        elif path.endswith(".pt"):
            self.model = self._load_torchscript_model(path)
        elif path.endswith(".onnx"):
            self.model = setup_ort_session(path, self.map_location)
        elif path.endswith(".pt2"):
            self.model = formats.load_pt2(path, self.device)
        elif path.endswith(".so") and self._use_torch_export_aot_compile():
            self.model = self._load_torch_export_aot_compile(path)
        else:
            raise RuntimeError(
                f"No model weights could be loaded from `{serialized_file}`. BaseHandler reads "
                f"{_FORMATS}. Override `initialize` for others"
            )
        # What is compiled or a session already is neither moved nor compiled again.
        if isinstance(self.model, torch.nn.Module):
            self._settle_model()

    def _settle_model(self) -> None:
        if not (self.model_pt_path or "").endswith(".pt2"):
            # An exported program has no training mode, and says so when it is left.
            self.model.to(self.device)
            self.model.eval()
        plain = self.model
        self.model = compiled(plain, self.model_yaml_config.get("pt2"))
        if self.model is plain:
            self.model = devices.optimised_for_intel(plain)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return formats.load_torchscript(model_pt_path, self.device)

    def _use_torch_export_aot_compile(self) -> bool:
        return asks_for_aot(self.model_yaml_config.get("pt2"))

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        return formats.load_aot_library(model_so_path, self.device)

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> torch.nn.Module:
        """The only class of the model file, with the serialized state if there is any."""
        path = os.path.join(model_dir, model_file)
        if not os.path.isfile(path):
            raise RuntimeError(f"Missing the model.py file: `{path}`")
        classes = list_classes_from_module(import_file(path))
        if len(classes) != 1:
            names = ", ".join(f"`{found.__name__}`" for found in classes) or "none"
            raise ValueError(
                f"Expected only one class as model definition; `{model_file}` defines {names}"
            )
        model: torch.nn.Module = classes[0]()
        if model_pt_path:
            model.load_state_dict(formats.load_state(model_pt_path, self.map_location))
        return model

    @timed
    def preprocess(self, data: Any) -> Any:
        """Requests to model input."""
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Model input to model output."""
        if formats.is_onnx_session(self.model):
            return formats.run_onnx(self.model, data)
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Model output to a list with one result for each request."""
        return data.tolist()  # type: ignore[no-any-return]

    def handle(self, data: Any, context: Any) -> list[Any]:
        """One batch, from requests to results."""
        started = time.perf_counter()
        self.context = context
        if self._is_describe():
            output = [self.describe_handle()]
        elif self._is_explain():
            # Gradients are what an explanation is made of, so not under inference mode.
            output = self.explain_handle(self.preprocess(data), data)
        elif profiling.is_enabled():
            output, _ = self._infer_with_profiler(data)
        else:
            output = self._infer(data)
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        context.metrics.add_time("HandlerTime", elapsed_ms, None, "ms")
        return output

    def _infer(self, data: Any) -> list[Any]:
        # All steps, since a tensor that a step keeps must not keep the autograd graph alive.
        with torch.inference_mode():
            output: list[Any] = self.postprocess(self.inference(self.preprocess(data)))
        return output

    def _infer_with_profiler(self, data: Any) -> tuple[list[Any], torch.profiler.profile]:
        """One batch and its profile, which `profiler_args` shapes."""
        name = getattr(self.context, "model_name", None) or "model"
        with profiling.profiler(self.profiler_args, name) as profile:
            output = self._infer(data)
        return output, profile

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> list[Any]:
        """Explains the first request through `get_insights`, which a subclass provides."""
        first = raw_data[0]
        target = _index(first.get("target") or 0) if isinstance(first, dict) else 0
        return self.get_insights(data_preprocess, value_of(first), target)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any) -> list[Any]:
        """Explains one input. There is no explanation that fits all models."""
        raise NotImplementedError(f"`{type(self).__name__}` does not implement `get_insights`")

    def describe_handle(self) -> Any:
        """What the handler says of itself, as a dict; nothing unless overridden."""
        return None

    def _is_explain(self) -> bool:
        if self.context and self.context.get_request_header(0, "explain") == "True":
            self.explain = True
            return True
        return False

    def _is_describe(self) -> bool:
        return bool(self.context and self.context.get_request_header(0, "describe") == "True")

    def get_device(self) -> Any:
        """The device of the model."""
        return self.device


def value_of(row: Any) -> Any:
    """What one request brings, by either of its usual names."""
    if not isinstance(row, dict):
        return row
    return row.get("data") or row.get("body")


def _index(target: Any) -> Any:
    """A number that came as text of a form; anything else as it is."""
    return int(target) if isinstance(target, str | bytes | bytearray) else target


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """A session of ONNX Runtime with the threads that torch has here. It is run and not called:
    `BaseHandler.inference` does so by the order of its inputs."""
    return formats.load_onnx(model_pt_path, map_location == "cuda", torch.get_num_threads())
