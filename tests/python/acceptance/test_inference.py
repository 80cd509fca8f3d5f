"""Inference with stand-ins for the pretrained models, and KServe's envelopes (section 4)."""

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Starter
from harness import archive, wait_until, write_files

from acceptance.digits import image

# A classifier of colours: how much there is of each, and one less for its dark sister.
COLOURS = """
import torch

class Colours(torch.nn.Module):
    def forward(self, images):
        amounts = images.mean(dim=(2, 3))
        return torch.cat([amounts, amounts - 1], dim=1)
"""
# Like torchvision's detectors: a list with one dictionary for each image.
DETECTOR = """
from torchvision.transforms import ToTensor
from ts.torch_handler.vision_handler import VisionHandler

class Detector(VisionHandler):
    image_processing = ToTensor()

    def inference(self, data):
        return self.model(data)

    def postprocess(self, data):
        found = []
        for scores in data:
            score, place = scores.max(0)
            box = [0.0, 0.0, 28.0, 28.0]
            found.append([{"red green blue".split()[place]: box, "score": score.item()}])
        return found
"""
# Of each pixel the most likely class and how likely it is.
SEGMENTER = """
import torch
from torchvision import transforms
from ts.torch_handler.vision_handler import VisionHandler

class Segmenter(VisionHandler):
    image_processing = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])

    def inference(self, data):
        return torch.softmax(data, dim=1)

    def postprocess(self, data):
        probability, place = data.max(dim=1)
        return torch.stack([place.float(), probability], dim=3).tolist()
"""
TEXT = """
from ts.torch_handler.base_handler import BaseHandler

class Text(BaseHandler):
    def preprocess(self, data):
        return [(row.get("data") or row.get("body")) for row in data]

    def inference(self, data):
        return [text if isinstance(text, str) else bytes(text).decode() for text in data]

    def postprocess(self, data):
        return ["Accepted" if "good" in text else "Not Accepted" for text in data]
"""
WORDS = """
from ts.torch_handler.base_handler import BaseHandler

class Words(BaseHandler):
    def preprocess(self, data):
        return [bytes(row.get("data") or row.get("body")).decode().split() for row in data]

    def inference(self, data):
        return data

    def postprocess(self, data):
        return [[[word, "TITLE" if word.istitle() else "OTHER"] for word in row] for row in data]
"""
IDENTITY = """
import torch

class Identity(torch.nn.Module):
    def forward(self, x):
        return x
"""
KSERVE = """
class Values:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if context.get_request_header(0, "explain") == "True":
            return [[0.25, 0.5] for row in data if row["data"]]
        return [2 for row in data if row["data"]]
"""
COLOUR_NAMES = ["red", "green", "blue", "dark red", "dark green", "dark blue"]
LABELS = {str(place): [f"n{place}", name] for place, name in enumerate(COLOUR_NAMES)}


def about(expected: Any) -> Any:
    """Within the five per cent that the pretrained models are held to."""
    return pytest.approx(expected, rel=0.05)


def is_segmented(answer: Any) -> bool:
    return (len(answer), len(answer[0]), len(answer[0][0])) == (224, 224, 2)


def colour() -> bytes:
    import io

    from PIL import Image

    encoded = io.BytesIO()
    Image.new("RGB", (300, 260), (255, 128, 0)).save(encoded, "PNG")
    return encoded.getvalue()


# Softmax of what `image_classifier` makes of that colour, each channel normalised: the best five.
CLASSIFIED = {
    "red": 0.6374,
    "dark red": 0.2345,
    "green": 0.0826,
    "dark green": 0.0304,
    "blue": 0.0111,
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the archives are packed from."""
    import warnings

    import torch

    folder = tmp_path_factory.mktemp("parts")
    sources = {
        "colours.py": COLOURS,
        "identity.py": IDENTITY,
        "detector.py": DETECTOR,
        "segmenter.py": SEGMENTER,
        "text.py": TEXT,
        "words.py": WORDS,
        "values.py": KSERVE,
        "index_to_name.json": json.dumps(LABELS),
    }
    write_files(folder, sources)
    spec = importlib.util.spec_from_file_location("colours", folder / "colours.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.Colours()).save(str(folder / "colours.pt"))
    torch.save({}, folder / "empty.pth")
    return folder


EAGER = ["--model-file", "colours.py", "--serialized-file", "empty.pth"]
SCRIPT = ["--serialized-file", "colours.pt"]
NO_NET = ["--model-file", "identity.py"]
NAMES = ["--extra-files", "index_to_name.json"]

# How each stand-in is packed, what it is asked, and what must come back.
MODELS: dict[str, tuple[list[str], Callable[[], Any], Callable[[Any], bool]]] = {
    "eager-classifier": (
        ["--handler", "image_classifier", *EAGER, *NAMES],
        colour,
        lambda answer: answer.json() == about(CLASSIFIED),
    ),
    "scripted-classifier": (
        ["--handler", "image_classifier", *SCRIPT, *NAMES],
        colour,
        lambda answer: answer.json() == about(CLASSIFIED),
    ),
    "eager-detector": (
        ["--handler", "detector.py", *EAGER],
        colour,
        lambda answer: answer.json() == [{"red": [0.0, 0.0, 28.0, 28.0], "score": about(1.0)}],
    ),
    "scripted-detector": (
        ["--handler", "detector.py", *SCRIPT],
        colour,
        lambda answer: answer.json() == [{"red": [0.0, 0.0, 28.0, 28.0], "score": about(1.0)}],
    ),
    "segmenter": (
        ["--handler", "segmenter.py", *NO_NET],
        colour,
        lambda answer: is_segmented(answer.json()),
    ),
    "text": (
        ["--handler", "text.py", *NO_NET],
        lambda: b"a film that is bad",
        lambda answer: answer.text == "Not Accepted",
    ),
    "pairs": (
        ["--handler", "words.py", *NO_NET],
        lambda: b"Paris is",
        lambda answer: answer.json() == [["Paris", "TITLE"], ["is", "OTHER"]],
    ),
}


def pack(store: Path, parts: Path, name: str, flags: list[str]) -> None:
    files = [str(parts / flag) if (parts / flag).exists() else flag for flag in flags]
    archive(store, "--model-name", name, "--version", "1.0", "--force", *files)


@pytest.fixture(scope="module")
def server(tmp_path_factory, parts, digits):
    with ExitStack() as stack:
        server = Starter(lambda: tmp_path_factory.mktemp("server"), stack)(
            ["default_response_timeout=300"]
        )
        for name, (flags, _, _) in MODELS.items():
            pack(server.store, parts, name, flags)
        shutil.copy(digits, server.store)
        yield server


@pytest.mark.parametrize("name", MODELS)
def test_a_stand_in_is_registered_asked_and_removed(server, name):
    """postman/inference and test_gRPC_inference_api: a body of the file, a field of a form."""
    _, asked, is_right = MODELS[name]
    assert server.register(f"{name}.mar").status_code == 200
    for options in ({"data": asked()}, {"files": {"data": ("file", asked())}}):
        answer = server.infer(f"/predictions/{name}", **options)
        assert answer.status_code == 200, answer.text
        assert is_right(answer), answer.text[:2000]
    assert server.manage("DELETE", f"/models/{name}").status_code == 200
    assert server.infer(f"/predictions/{name}", asked()).status_code == 404


def test_a_digit_is_sent_bare(server):
    """postman/inference: the classifier of digits, and row 56."""
    assert server.register("mnist.mar").status_code == 200
    assert [server.predict("mnist", image(digit)).text for digit in (0, 9)] == ["0", "9"]


def test_a_scripted_model_from_an_address_with_a_longer_limit(server, web, parts):
    """postman/increased_timeout_inference: `default_response_timeout=300`."""
    pack(web.folder, parts, "dense", MODELS["scripted-classifier"][0])
    assert server.register(web.url("dense.mar")).status_code == 200
    assert server.describe("dense")["responseTimeout"] == 300
    assert server.predict("dense", colour()).json() == about(CLASSIFIED)


def test_an_explanation_is_a_list_of_one(server):
    """postman/explanation, and row 58."""
    answer = server.register("mnist.mar", model_name="explained")
    assert answer.status_code == 200, answer.text
    answer = server.infer("/explanations/explained", image(3))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()) == 1


@pytest.mark.parametrize("envelope", ["kserve", "kservev2"])
def test_kserves_envelopes(start, parts, envelope, scheme):
    """postman/inference_kf and inference_kfv2, https_kf and https_kfv2, and row 57."""
    server = start.make([f"service_envelope={envelope}"])
    if scheme == "https":
        server.speak_tls()
    server.start()
    pack(server.store, parts, "values", ["--handler", "values.py"])
    assert server.register("values.mar").status_code == 200
    assert server.describe("values")["modelName"] == "values"
    for workers, synchronous, status in ((5, "true", 200), (6, "false", 202)):
        path = f"/models/values?min_worker={workers}&synchronous={synchronous}"
        assert server.manage("PUT", path).status_code == status
    wait_until("six are ready", lambda: len(server.worker_pids("values")) == 6)
    server.wait_for_workers("values")
    if envelope == "kserve":
        body = json.dumps({"instances": [{"data": base64.b64encode(b"image").decode()}]})
        predicted = server.infer("/v1/models/values:predict", body)
        explained = server.infer("/v1/models/values:explain", body)
        assert predicted.json() == {"predictions": [2]}
        assert explained.json() == {"explanations": [[0.25, 0.5]]}
        return
    given = {"name": "input-0", "shape": [4], "datatype": "INT64", "data": [1, 2, 3, 4]}
    body = json.dumps({"id": "d3b15cad-50a2", "inputs": [given]})
    head = {"id": "d3b15cad-50a2", "model_name": "values", "model_version": "1.0"}
    predicted = server.infer("/v2/models/values/infer", body)
    output = {"name": "input-0", "shape": [1], "datatype": "INT64", "data": [2]}
    assert predicted.json() == head | {"outputs": [output]}
    explained = server.infer("/v2/models/values/explain", body)
    output = {"name": "input-0", "shape": [2], "datatype": "FP64", "data": [0.25, 0.5]}
    assert explained.json() == head | {"outputs": [output]}
