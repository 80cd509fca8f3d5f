"""The handler that most handlers derive from: load, preprocess, infer, postprocess."""

import logging
import os
import pickle
import time
from typing import Any

import torch

from ts._runtime.loader import import_file
from ts.handler_utils.timer import timed
from ts.torch_handler.compilation import compiled
from ts.utils.util import list_classes_from_module, load_label_mapping

logger = logging.getLogger(__name__)


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
        self.map_location = "cpu"
        self.device = torch.device("cpu")
        if gpu_id is None:
            return
        if torch.cuda.is_available():
            self.map_location = "cuda"
            self.device = torch.device(f"cuda:{gpu_id}")
            if torch.cuda.get_device_capability(self.device) >= (8, 0):
                torch.set_float32_matmul_precision("high")
        elif torch.backends.mps.is_available():
            self.map_location = "mps"
            self.device = torch.device("mps")
        else:
            logger.warning("torch cannot reach GPU %s; the model runs on the CPU", gpu_id)

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
        elif path.endswith(".onnx"):
            self.model = setup_ort_session(path, self.map_location)
            return
        elif path.endswith(".pt"):
            self.model = self._load_torchscript_model(path)
        else:
            raise RuntimeError(
                f"No model weights could be loaded: `{serialized_file}` is neither `.pt` nor "
                "`.onnx`. State dicts need a model file too; override `initialize` for others"
            )
        self.model.to(self.device)
        self.model.eval()
        self.model = compiled(self.model, self.model_yaml_config.get("pt2"))

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return torch.jit.load(  # type: ignore[no-untyped-call]
            model_pt_path, map_location=self.device
        )

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
            model.load_state_dict(_load_state(model_pt_path, self.device))
        return model

    @timed
    def preprocess(self, data: Any) -> Any:
        """Requests to model input."""
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Model input to model output."""
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
        else:
            # All steps, since a tensor that a step keeps must not keep the autograd graph alive.
            with torch.inference_mode():
                output = self.postprocess(self.inference(self.preprocess(data)))
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        context.metrics.add_time("HandlerTime", elapsed_ms, None, "ms")
        return output

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> list[Any]:
        """Explains the first request through `get_insights`, which a subclass provides."""
        inputs, target = raw_data[0], 0
        if isinstance(inputs, dict):
            target = inputs.get("target") or 0
            inputs = inputs.get("data") or inputs.get("body")
        return self.get_insights(data_preprocess, inputs, target)

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


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """An ONNX Runtime session. It is not callable, so `inference` has to be overridden."""
    try:
        import onnxruntime
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"`{model_pt_path}` needs the package `onnxruntime`", name=missing.name
        ) from missing
    providers = ["CPUExecutionProvider"]
    if map_location == "cuda":
        providers.insert(0, "CUDAExecutionProvider")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(model_pt_path, providers=providers, sess_options=options)


def _load_state(path: str, device: Any) -> Any:
    """A state dict, from a safetensors file or from torch's own format."""
    if path.endswith(".safetensors"):
        try:
            from safetensors.torch import load_file
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"`{path}` needs the package `safetensors`", name=missing.name
            ) from missing
        return load_file(path, device=str(device))
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as refused:
        # A full pickle runs whatever code it brings.
        raise RuntimeError(
            f"`{path}` holds more than weights and is not loaded. Save `model.state_dict()`, or "
            f"load the file in `initialize` of a handler that trusts it: {refused}"
        ) from refused
