"""What `BaseHandler` loads beside TorchScript and plain state dicts, where it puts it, and what it
says of what it cannot load."""

import json
import logging
import sys
import types
from pathlib import Path

import pytest
from conftest import HANDLER, MODEL, item

from ts._runtime import bridge

ROWS = [[1.0, 2.0, 3.0], [-4.0, 5.0, 0.5]]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def linear():
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).eval()


@pytest.fixture(scope="session")
def compiled_package(tmp_path_factory):
    """A layer compiled ahead of time, and what it is compiled from. Takes a while."""
    import torch
    import torch._inductor

    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 2).eval()
    path = tmp_path_factory.mktemp("compiled") / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported(linear), package_path=str(path))
    return linear, path


def exported(module):
    import torch

    rows = torch.export.Dim.DYNAMIC
    return torch.export.export(module, (torch.ones(2, 3),), dynamic_shapes=({0: rows},))


def write_onnx(linear, path):
    import numpy
    import onnx
    from onnx import TensorProto, helper

    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, value.shape, value.astype(numpy.float32))
        for name, value in (
            ("w", linear.weight.detach().numpy()),
            ("b", linear.bias.detach().numpy()),
        )
    ]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))


def answers_as(linear, spec):
    import torch

    session, kind, message = bridge.load(spec)
    assert session is not None, f"{kind}: {message}"
    kind, _, message, replies, _ = session.run(
        [item(json.dumps(row).encode(), "application/json") for row in ROWS]
    )
    assert kind == "ok", message
    found = torch.tensor([json.loads(reply[3]) for reply in replies])
    torch.testing.assert_close(found, linear(torch.tensor(ROWS)).detach())


def test_weights_without_any_pickle(make_model, linear):
    from safetensors.torch import save_file

    entry = {"serializedFile": "w.safetensors", "modelFile": "net.py"}
    spec = make_model({"handler.py": HANDLER, "net.py": MODEL}, model=entry)
    state = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    save_file(state, Path(spec["model_dir"]) / "w.safetensors")
    answers_as(linear, spec)


def test_an_onnx_model_is_run_by_the_order_of_its_inputs(make_model, linear):
    spec = make_model({"handler.py": HANDLER}, model={"serializedFile": "m.onnx"})
    write_onnx(linear, Path(spec["model_dir"]) / "m.onnx")
    answers_as(linear, spec)


def test_an_onnx_handler_of_old_runs_the_session_itself(make_model, linear):
    source = HANDLER + (
        "    def inference(self, data):\n"
        "        import torch\n"
        "        name = self.model.get_inputs()[0].name\n"
        "        return torch.tensor(self.model.run(None, {name: data.numpy()})[0])\n"
    )
    spec = make_model({"handler.py": source}, model={"serializedFile": "m.onnx"})
    write_onnx(linear, Path(spec["model_dir"]) / "m.onnx")
    answers_as(linear, spec)


def test_the_inputs_of_an_onnx_model_are_counted(tmp_path, linear):
    import torch

    from ts.torch_handler.base_handler import setup_ort_session
    from ts.torch_handler.formats import run_onnx

    write_onnx(linear, tmp_path / "m.onnx")
    session = setup_ort_session(str(tmp_path / "m.onnx"), "cpu")
    x = torch.tensor(ROWS)
    assert torch.equal(run_onnx(session, {"x": x}), run_onnx(session, [x]))
    with pytest.raises(ValueError, match=r"takes 1 inputs \(\['x'\]\), not 2"):
        run_onnx(session, [x, x])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_an_exported_program(make_model, linear):
    import torch

    spec = make_model({"handler.py": HANDLER}, model={"serializedFile": "m.pt2"})
    torch.export.save(exported(linear), Path(spec["model_dir"]) / "m.pt2")
    answers_as(linear, spec)


def test_a_package_that_is_compiled_ahead_of_time(make_model, compiled_package):
    linear, path = compiled_package
    spec = make_model({"handler.py": HANDLER}, model={"serializedFile": "m.pt2"})
    (Path(spec["model_dir"]) / "m.pt2").write_bytes(path.read_bytes())
    answers_as(linear, spec)


def test_a_package_for_another_device_names_both(compiled_package):
    import torch

    from ts.torch_handler.formats import load_pt2

    with pytest.raises(RuntimeError, match="compiled for `cpu`, and the worker has `cuda:1`"):
        load_pt2(str(compiled_package[1]), torch.device("cuda:1"))


def test_a_damaged_package_says_how_to_write_one(make_model):
    spec = make_model({"handler.py": HANDLER, "m.pt2": "x"}, model={"serializedFile": "m.pt2"})
    _, kind, message = bridge.load(spec)
    assert kind == "failed"
    assert "`m.pt2` is no `.pt2` package" in message and "torch.export.save" in message


def test_a_library_is_loaded_where_the_config_says_it_is_compiled(make_model, monkeypatch):
    import torch

    from ts.torch_handler import formats

    loaded = []
    load = lambda path, device: loaded.append((path, device)) or (lambda x: x)  # noqa: E731
    monkeypatch.setattr(formats, "load_aot_library", load)
    files = {"handler.py": HANDLER, "m.so": "", "c.yaml": "pt2: {export: {aot_compile: true}}\n"}
    entry = {"serializedFile": "m.so", "configFile": "c.yaml"}
    spec = make_model(files, model=entry)
    assert bridge.load(spec)[1:] == ("", "")
    assert loaded == [(str(Path(spec["model_dir"]) / "m.so"), torch.device("cpu"))]
    _, kind, message = bridge.load(make_model(files, model={"serializedFile": "m.so"}))
    assert kind == "failed" and "`pt2.export.aot_compile`" in message


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin", "w.ckpt"])
def test_weights_without_a_model_file_are_told_what_is_missing(make_model, name):
    spec = make_model({"handler.py": HANDLER, name: ""}, model={"serializedFile": name})
    _, kind, message = bridge.load(spec)
    assert kind == "failed"
    for word in (f"from `{name}`", "beside a model file", "Override `initialize`"):
        assert word in message


@pytest.mark.parametrize(
    ("entry", "package"),
    [
        ({"serializedFile": "m.onnx"}, "onnxruntime"),
        ({"serializedFile": "m.safetensors", "modelFile": "net.py"}, "safetensors"),
    ],
)
def test_a_package_that_is_not_installed_is_named_and_not_tried_again(
    make_model, monkeypatch, entry, package
):
    for known in [known for known in sys.modules if known.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, known)

    class Hidden:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    files = {"handler.py": HANDLER, "net.py": MODEL, entry["serializedFile"]: ""}
    _, kind, message = bridge.load(make_model(files, model=entry))
    assert kind == "permanent"
    assert f"needs the package `{package}`, which is not installed" in message


def test_what_a_pickle_asks_for_is_named(make_model):
    import torch

    files = {"handler.py": HANDLER, "net.py": MODEL}
    spec = make_model(files, model={"serializedFile": "w.pth", "modelFile": "net.py"})
    torch.save({"x": types.SimpleNamespace(a=1)}, Path(spec["model_dir"]) / "w.pth")
    _, kind, message = bridge.load(spec)
    assert kind == "failed"
    assert "`w.pth` holds more than weights: `types.SimpleNamespace`." in message


# --- devices and switches -------------------------------------------------------------------------


@pytest.fixture
def no_accelerator(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return torch


def test_the_order_of_devices(no_accelerator, monkeypatch):
    from ts.torch_handler.devices import place

    torch = no_accelerator
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def found(gpu_id):
        chosen = place(gpu_id)
        return str(chosen.device), chosen.map_location

    assert found(None) == found(1) == ("cpu", "cpu")
    xla = types.ModuleType("torch_xla.core.xla_model")
    xla.xla_device = lambda: "xla:0"
    package = types.ModuleType("torch_xla")
    package.__spec__ = types.SimpleNamespace()
    package.core = types.ModuleType("torch_xla.core")
    package.core.xla_model = xla
    for module in (package, package.core, xla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert found(None) == found(1) == ("xla:0", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (found(None), found(1)) == (("xla:0", None), ("mps", "mps"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert found(1) == ("mps", "mps"), "Intel's GPUs are asked for by a switch"
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    assert found(1) == ("xpu:1", "xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (found(None), found(1)) == (("xla:0", None), ("cuda:1", "cuda"))
    assert precisions == ["high"]


def test_a_gpu_that_is_not_there_and_a_switch_for_one_are_told(no_accelerator, monkeypatch, caplog):
    from ts.torch_handler.devices import place

    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    assert place(3).map_location == "cpu"
    assert "torch finds no GPU of Intel's" in caplog.text and "GPU 3" in caplog.text


def test_the_intel_extension_is_used_or_missed_aloud(make_model, monkeypatch, caplog):
    import torch

    monkeypatch.setenv("TS_IPEX_ENABLE", "true")
    files = {"handler.py": HANDLER, "net.py": MODEL}
    assert bridge.load(make_model(files, model={"modelFile": "net.py"}))[1:] == ("", "")
    assert "`ipex_enable` is on, and the model is served without" in caplog.text
    seen = []
    extension = types.ModuleType("intel_extension_for_pytorch")
    extension.optimize = lambda model: seen.append(model) or model
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    assert bridge.load(make_model(files, model={"modelFile": "net.py"}))[1:] == ("", "")
    assert isinstance(seen[0], torch.nn.Module)


def test_a_module_for_tensorrt_names_the_package(tmp_path, monkeypatch):
    import torch

    from ts.torch_handler.formats import load_torchscript

    def refuse(path, map_location):
        raise RuntimeError("Unknown builtin op: tensorrt::execute_engine.")

    monkeypatch.setattr(torch.jit, "load", refuse)
    with pytest.raises(ModuleNotFoundError, match="compiled for TensorRT, needs the package"):
        load_torchscript(str(tmp_path / "m.pt"), "cpu")


def test_what_cannot_be_compiled_at_the_first_call_runs_as_it_is(make_model, linear, caplog):
    import torch._dynamo

    @torch._dynamo.register_backend(name="ofi")
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    import torch

    files = {"handler.py": HANDLER, "net.py": MODEL, "c.yaml": "pt2: ofi\n"}
    entry = {"serializedFile": "w.pt", "modelFile": "net.py", "configFile": "c.yaml"}
    spec = make_model(files, model=entry)
    state = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    torch.save(state, Path(spec["model_dir"]) / "w.pt")
    with caplog.at_level(logging.INFO):
        answers_as(linear, spec)
    assert "Compiled model with backend ofi" in caplog.text


# --- profiles -------------------------------------------------------------------------------------


def test_a_profile_of_each_batch(make_model, linear, monkeypatch, tmp_path):
    import tempfile

    import torch

    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = make_model({"handler.py": HANDLER}, model={"serializedFile": "model.pt"})
    torch.jit.script(linear).save(str(Path(spec["model_dir"]) / "model.pt"))
    answers_as(linear, spec)
    [trace] = (tmp_path / "pytorch_profiler" / "m").glob("*.json")
    assert "aten::linear" in trace.read_text()


def test_a_profile_is_shaped_by_the_handler(linear, monkeypatch):
    import torch

    from ts.torch_handler.base_handler import BaseHandler

    done = []
    handler = BaseHandler()
    handler.model, handler.device = linear, torch.device("cpu")
    handler.profiler_args = {
        "activities": [torch.profiler.ProfilerActivity.CPU],
        "on_trace_ready": done.append,
        "record_shapes": True,
    }
    output, profile = handler._infer_with_profiler(ROWS)
    assert len(output) == 2 and done == [profile]
