"""Each form of a handler, what it learns of its model, and the default handlers."""

import importlib.util
import io
import json
import os
from pathlib import Path

import pytest
from harness import SCRIPTED, archive, at_once, write_files, write_model

FUNCTION = """
def handle(data, context):
    return None if data is None else ["function"] * len(data)

def answer(data, context):
    return None if data is None else ["answer"] * len(data)
"""
CLASS = """
from collections import OrderedDict

class Handler:
    def initialize(self, context):
        self.word = "class"

    def handle(self, data, context):
        return [self.word] * len(data)
"""
TWO_CLASSES = (
    CLASS
    + """
class Other(Handler):
    def initialize(self, context):
        self.word = "other"
"""
)
FORMS = {
    "function": ("handler.py", {"handler.py": FUNCTION}, "function"),
    "function-without-ending": ("handler", {"handler.py": FUNCTION}, "function"),
    "named-function": ("handler:answer", {"handler.py": FUNCTION}, "answer"),
    "named-function-of-file": ("handler.py:answer", {"handler.py": FUNCTION}, "answer"),
    "class": ("handler.py", {"handler.py": CLASS}, "class"),
    "method-of-class": ("handler:handle", {"handler.py": CLASS}, "class"),
    "named-class": ("handler.py:Other", {"handler.py": TWO_CLASSES}, "other"),
    "package": ("pkg.mod", {"pkg/__init__.py": "", "pkg/mod.py": CLASS}, "class"),
    "function-of-package": (
        "pkg.mod.answer",
        {"pkg/__init__.py": "", "pkg/mod.py": FUNCTION},
        "answer",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_handler_answers(server, form):
    handler, files, expected = FORMS[form]
    server.serve(form, files, handler=handler)
    answer = server.predict(form, b"x")
    assert (answer.status_code, answer.text) == (200, expected)
    assert server.manage("DELETE", f"/models/{form}").status_code == 200


def test_a_registration_may_name_another_handler(server):
    write_model(server.store, "chosen", FUNCTION)
    assert server.register("chosen", handler="some/folder/handler.py:answer").status_code == 200
    assert server.predict("chosen", b"x").text == "answer"


def test_a_handler_knows_its_model_and_its_requests(server):
    config = "batchSize: 3\nmaxBatchDelay: 1\nhandler:\n  answer: [4, two]\n"
    server.serve("knows", SCRIPTED, config=config)
    code = """
import os
properties = dict(context.system_properties)
result = [{
    "name": context.model_name, "properties": properties, "manifest": context.manifest,
    "config": context.model_yaml_config, "ids": list(context.request_ids.values()),
    "in_model_dir": os.path.samefile(os.getcwd(), properties["model_dir"]),
    "files": sorted(os.listdir(properties["model_dir"])),
}]
"""
    answer = server.run(code, "knows")
    known = answer.json()
    properties = known["properties"]
    assert set(properties) == {
        *("model_dir", "gpu_id", "batch_size"),
        *("server_name", "server_version", "limit_max_image_pixels"),
    }
    assert (properties["gpu_id"], properties["batch_size"]) == (None, 3)
    assert (properties["server_name"], properties["limit_max_image_pixels"]) == ("MMS", True)
    assert os.path.isabs(properties["model_dir"])
    assert known["name"] == "knows"
    manifest = json.loads((server.store / "knows/MAR-INF/MANIFEST.json").read_text())
    assert known["manifest"] == manifest
    assert known["config"]["handler"] == {"answer": [4, "two"]}
    assert known["ids"] == [answer.headers["x-request-id"]]
    assert known["in_model_dir"]
    assert {"MAR-INF", "handler.py", "model-config.yaml"} <= set(known["files"])


def test_state_of_a_handler_and_its_context_lasts(server):
    server.serve("lasting")
    code = "context.seen = getattr(context, 'seen', 0) + 1; self.kept[context.seen] = 1; "
    for calls in (1, 2, 3):
        answer = server.run(code + "result = [[context.seen, len(self.kept)]]", "lasting")
        assert answer.json() == [calls, calls]


def test_a_described_model_tells_of_real_processes_and_of_itself(server):
    handler = """
class Described:
    def initialize(self, context):
        self.size = 3

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return [{"classes": self.size}]
        return ["x"]
"""
    server.serve("described", handler, initial_workers=2)
    described = server.describe("described")
    assert "customizedMetadata" not in described
    assert (described["modelVersion"], described["loadedAtStartup"]) == ("1.0", False)
    assert len(described["workers"]) == 2
    for worker in described["workers"]:
        command = Path(f"/proc/{worker['pid']}/cmdline").read_bytes().split(b"\0")
        assert command[1] == b"worker"
        assert worker["memoryUsage"] > 5_000_000
        assert (worker["status"], worker["gpu"], worker["gpuUsage"]) == ("READY", False, "N/A")
    assert server.describe("described", customized="true")["customizedMetadata"] == {"classes": 3}


def test_a_handler_may_start_processes_and_event_loops(server):
    code = """
import asyncio, multiprocessing, os, subprocess, sys
told = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout
child = os.fork()
if child == 0:
    os._exit(9)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
async def later():
    await asyncio.sleep(0.01)
    return "later"
with multiprocessing.get_context("fork").Pool(2) as pool:
    lengths = pool.map(len, ["a", "bb"])
result = [[told.strip(), status, asyncio.run(later()), lengths, sys.argv != None]]
"""
    assert server.run(code).json() == ["42", 9, "later", [1, 2], True]
    assert server.run("result = ['still here']").text == "still here"


def test_paths_arrive_as_the_handler_reads_them(server):
    code = 'result = [[context.get_request_header(0, name) for name in ("url_path", "explain")]]'
    for path, expected in [
        ("/predictions/scripted", ["", "False"]),
        ("/predictions/scripted/1.0", ["", "False"]),
        ("/predictions/scripted/1.0/v1/chat%20x/completion", ["v1/chat x/completion", "False"]),
        ("/explanations/scripted/1.0/tail", ["tail", "True"]),
    ]:
        for method in ("POST", "PUT"):
            kind = {"content-type": "application/octet-stream"}
            answer = server.infer(path, code.encode(), method, headers=kind)
            assert answer.json() == expected, path


# --- torch ---------------------------------------------------------------------------------------

LINEAR = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)
"""
ROWS = """
from ts.torch_handler.base_handler import BaseHandler

class Rows(BaseHandler):
    def preprocess(self, data):
        return super().preprocess([row["body"] for row in data])

    def describe_handle(self):
        return {"parameters": sum(p.numel() for p in self.model.parameters())}
"""
TENSOR = (
    ROWS
    + """
    def postprocess(self, data):
        return [row for row in data]
"""
)
CONVOLUTION = """
import torch

class Tiny(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(3, 6, 7, stride=7), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        )
"""


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.manual_seed(0)
    return torch


def imported(path):
    """The module of a file; `torch.jit.script` wants to find its source."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def linear(torch, tmp_path):
    """An eager model: its module, its state and its source, as files."""
    write_files(tmp_path, {"net.py": LINEAR, "rows.py": ROWS, "tensor.py": TENSOR})
    module = imported(tmp_path / "net.py").Net().eval()
    torch.save(module.state_dict(), tmp_path / "state.pth")
    return module


def test_an_eager_model_with_its_state(server, torch, linear, tmp_path):
    files = ["--model-file", tmp_path / "net.py", "--serialized-file", tmp_path / "state.pth"]
    model = ["--model-name", "eager", "--version", "1.0", "--handler", tmp_path / "rows.py"]
    archive(server.store, *model, *files)
    answer = server.register("eager.mar")
    assert answer.status_code == 200, answer.text
    row = [0.5, -1.0, 2.0]
    with torch.inference_mode():
        expected = linear(torch.tensor([row]))[0].tolist()
    assert server.predict(
        "eager", json.dumps(row), headers={"content-type": "application/json"}
    ).json() == (pytest.approx(expected, abs=1e-6))
    assert server.describe("eager", customized="true")["customizedMetadata"] == {"parameters": 8}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_model_that_answers_with_tensors(server, torch, linear, tmp_path):
    torch.jit.script(linear).save(str(tmp_path / "scripted.pt"))
    model = ["--model-name", "tensors", "--version", "1.0", "--handler", tmp_path / "tensor.py"]
    archive(server.store, *model, "--serialized-file", tmp_path / "scripted.pt")
    answer = server.register("tensors.mar", batch_size=2, max_batch_delay=1)
    assert answer.status_code == 200, answer.text
    row = [1.0, 2.0, 3.0]
    answer = server.predict(
        "tensors", json.dumps(row), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    received = torch.load(io.BytesIO(answer.content), weights_only=True)
    with torch.inference_mode():
        assert torch.allclose(received, linear(torch.tensor(row)))


def test_an_image_classifier_that_is_a_subclass(server, torch, tmp_path):
    from PIL import Image

    write_files(tmp_path, {"net.py": CONVOLUTION})
    module = imported(tmp_path / "net.py").Tiny().eval()
    torch.save(module.state_dict(), tmp_path / "state.pth")
    labels = {str(index): [f"n{index}", f"label {index}"] for index in range(6)}
    handler = """
from ts.torch_handler.image_classifier import ImageClassifier

class TopThree(ImageClassifier):
    topk = 3
"""
    write_files(tmp_path, {"h.py": handler, "index_to_name.json": json.dumps(labels)})
    model = ["--model-name", "classifier", "--version", "1.0", "--handler", tmp_path / "h.py"]
    model += ["--model-file", tmp_path / "net.py", "--serialized-file", tmp_path / "state.pth"]
    archive(server.store, *model, "--extra-files", tmp_path / "index_to_name.json")
    answer = server.register("classifier.mar", batch_size=2, max_batch_delay=1)
    assert answer.status_code == 200, answer.text

    image = Image.new("RGB", (320, 280), (200, 30, 90))
    # One colour: resizing and cropping leave it as it is, so no image library is needed to check.
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    colour = (torch.tensor([200, 30, 90]) / 255 - mean) / deviation
    with torch.inference_mode():
        scores = torch.softmax(module(colour.view(1, 3, 1, 1).expand(1, 3, 224, 224)), dim=1)[0]
    best = torch.topk(scores, 3)
    expected = {
        f"label {i}": p for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    }
    for form, tolerance in (("PNG", 1e-4), ("JPEG", 0.02)):
        encoded = io.BytesIO()
        image.save(encoded, form)
        for answer in (
            server.predict("classifier", encoded.getvalue(), method="PUT"),
            server.predict("classifier", files={"data": ("photo", encoded.getvalue(), "image/x")}),
        ):
            assert answer.status_code == 200, answer.text
            assert answer.json() == pytest.approx(expected, abs=tolerance)
            assert list(answer.json()) == list(expected), "the most probable comes first"
    answer = server.predict("classifier", b"no image")
    assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")

    # A full batch answers each as if it were alone (bt_01).
    answer = server.register(
        "classifier.mar", model_name="eight", batch_size=8, max_batch_delay=20000
    )
    assert answer.status_code == 200, answer.text

    def photo(red):
        encoded = io.BytesIO()
        Image.new("RGB", (32, 28), (red, 80, 90)).save(encoded, "PNG")
        return encoded.getvalue()

    photos = [photo(red) for red in range(0, 256, 32)]
    together = at_once([lambda p=p: server.predict("eight", p) for p in photos])
    for sent, answer in zip(photos, together, strict=True):
        assert answer.status_code == 200, answer.text
        alone = server.predict("classifier", sent)
        assert answer.json() == pytest.approx(alone.json(), abs=1e-5)
    assert len({answer.text for answer in together}) == 8
    for model in ("classifier", "eight"):
        server.manage("DELETE", f"/models/{model}")


WARMED = """
seen = []

def handle(data, context):
    if data is None:
        return None
    seen.append(data[0].get("data"))
    return [repr(seen)]
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_handler_has_answered_its_samples_before_its_first_client(server, isolation):
    name = f"warmed_{isolation}"
    config = (
        f"workerIsolation: {isolation}\n"
        "warmup:\n  - file: sample.json\n    contentType: application/json\n    name: data\n"
    )
    files = {"handler.py": WARMED, "sample.json": "[1]"}
    server.serve(name, files, config=config)
    assert server.predict(name, files={"data": b"x"}).text == repr([[1], [1], [1], bytearray(b"x")])


def test_a_handler_that_fails_on_its_sample_is_not_ready(server):
    source = "def handle(data, context):\n    if data:\n        raise ValueError('no')\n"
    config = "warmup:\n  - file: sample.bin\n"
    write_model(server.store, "cold", {"handler.py": source, "sample.bin": b"x"}, config=config)
    answer = server.register("cold")
    assert answer.status_code == 500
    assert "warm-up with `sample.bin` failed: Prediction failed" in answer.json()["message"]
