"""The default handlers on small models."""

import base64
import io
import json
import logging
import sys
import threading
from pathlib import Path

import pytest
from conftest import HANDLER, MODEL, item

from ts._runtime import bridge


@pytest.fixture
def torch():
    import torch

    torch.manual_seed(0)
    return torch


def script(torch, spec, module, name="model.pt"):
    torch.jit.script(module).save(str(Path(spec["model_dir"]) / name))


def opened(spec):
    session, kind, message = bridge.load(spec)
    assert session is not None, f"{kind}: {message}"
    return session


def ask(session, *values, **headers):
    items = [item(json.dumps(value).encode(), "application/json", **headers) for value in values]
    kind, _, message, replies, metrics = session.run(items)
    assert kind == "ok", message
    return [json.loads(reply[3]) for reply in replies], metrics


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_torchscript_through_the_base_handler(torch, make_model):
    linear = torch.nn.Linear(3, 2)
    spec = make_model({"handler.py": HANDLER}, model={"serializedFile": "model.pt"})
    script(torch, spec, linear)
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    answers, metrics = ask(opened(spec), *rows)
    torch.testing.assert_close(torch.tensor(answers), linear(torch.tensor(rows)).detach())
    assert [metric[0] for metric in metrics] == ["HandlerTime", "PredictionTime"]
    assert metrics[0][2:5] == ("Milliseconds", "gauge", [("ModelName", "m"), ("Level", "Model")])


def test_an_eager_model_with_its_weights(torch, make_model):
    linear = torch.nn.Linear(3, 2)
    files = {"handler.py": HANDLER, "net.py": MODEL}
    entry = {"serializedFile": "w.pth", "modelFile": "net.py"}
    spec = make_model(files, model=entry)
    state = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    torch.save(state, Path(spec["model_dir"]) / "w.pth")
    answers, _ = ask(opened(spec), [1.0, 2.0, 3.0])
    torch.testing.assert_close(
        torch.tensor(answers), linear(torch.tensor([[1.0, 2.0, 3.0]])).detach()
    )


def test_a_pickle_with_more_than_weights_is_refused_and_not_run(torch, make_model, tmp_path):
    import pickle

    class Canary:
        def __reduce__(self):
            return open, (str(tmp_path / "canary"), "w")

    files = {"handler.py": HANDLER, "net.py": MODEL}
    spec = make_model(files, model={"serializedFile": "w.pth", "modelFile": "net.py"})
    torch.save({"x": Canary()}, Path(spec["model_dir"]) / "w.pth", pickle_module=pickle)
    session, kind, message = bridge.load(spec)
    assert (session, kind) == (None, "failed")
    assert "holds more than weights" in message
    assert not (tmp_path / "canary").exists()


def test_workers_of_one_host_load_an_eager_model_at_the_same_time(make_model):
    files = {"handler.py": HANDLER, "net.py": "import time\ntime.sleep(0.05)\n" + MODEL}
    spec = make_model(files, model={"modelFile": "net.py"})
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(bridge.load(spec))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome[1:] for outcome in outcomes] == [("", "")] * 4


@pytest.mark.parametrize(
    ("files", "model", "kind", "text"),
    [
        ({}, {}, "failed", "No model weights could be loaded"),
        ({"w.pth": ""}, {"serializedFile": "w.pth"}, "failed", "No model weights could be loaded"),
        ({}, {"serializedFile": "model.pt"}, "permanent", "model.pt"),
        ({}, {"modelFile": "net.py"}, "permanent", "Missing the model.py file"),
        ({"net.py": MODEL + "class B: pass\n"}, {"modelFile": "net.py"}, "failed",
         "Expected only one class as model definition; `net.py` defines `B`, `Net`"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded(make_model, files, model, kind, text):
    session, found, message = bridge.load(make_model({"handler.py": HANDLER, **files}, model=model))
    assert (session, found) == (None, kind)
    assert text in message


def test_inference_keeps_no_autograd_graph_and_leaves_the_thread_as_it_was(torch, make_model):
    # A step of the user's own, without a guard.
    source = HANDLER + (
        "    def inference(self, data):\n"
        "        return self.model(data)\n"
        "    def postprocess(self, data):\n"
        "        assert data.is_inference() and data.grad_fn is None\n"
        "        if data.sum() > 1e6: raise ValueError\n"
        "        return super().postprocess(data)\n"
    )
    spec = make_model({"handler.py": source}, model={"serializedFile": "model.pt"})
    script(torch, spec, torch.nn.Linear(3, 2, bias=False))
    session = opened(spec)
    ask(session, [1.0, 2.0, 3.0])
    huge = item(b"[1e9, -1e9, 1e9]", "application/json")
    tiny = item(b"[-1e9, 1e9, -1e9]", "application/json")
    assert {session.run([one])[0] for one in (huge, tiny)} == {"ok", "handler_failed"}
    assert not torch.is_inference_mode_enabled()


def test_explanations_and_descriptions_take_their_own_way(torch, make_model):
    source = HANDLER + (
        "    def get_insights(self, tensor, raw, target):\n"
        "        tensor.requires_grad_()\n"
        "        self.model(tensor)[0, target].backward()\n"
        "        return [[tensor.grad.tolist(), raw]]\n"
        "    def describe_handle(self):\n"
        "        return {'is': 'linear'}\n"
    )
    linear = torch.nn.Linear(3, 2)
    spec = make_model({"handler.py": source}, model={"serializedFile": "model.pt"})
    script(torch, spec, linear)
    session = opened(spec)
    [[gradient, raw]], _ = ask(session, [1.0, 2.0, 3.0], explain="True")
    assert raw == [1.0, 2.0, 3.0]
    torch.testing.assert_close(torch.tensor(gradient), linear.weight.detach()[:1])
    assert ask(session, [1.0, 2.0, 3.0], describe="True")[0] == [{"is": "linear"}]
    # The next request is answered as ever.
    assert len(ask(session, [1.0, 2.0, 3.0], explain="False")[0][0]) == 2


def test_profiling_times_each_step(torch, make_model):
    entry = {"serializedFile": "model.pt", "configFile": "c.yaml"}
    files = {"handler.py": HANDLER, "c.yaml": "handler: {profile: true}\n"}
    spec = make_model(files, model=entry)
    script(torch, spec, torch.nn.Linear(3, 2))
    _, metrics = ask(opened(spec), [1.0, 2.0, 3.0])
    assert {metric[0] for metric in metrics} >= {"ts_handler_inference", "ts_handler_postprocess"}


@pytest.mark.parametrize(
    ("pt2", "level", "text"),
    [
        ("eager", "INFO", "Compiled model with backend eager"),
        ("{compile: {enable: true, backend: eager}}", "INFO", "Compiled model with backend eager"),
        ("{backend: eager}", "INFO", "Compiled model with backend eager"),
        ("{compile: {enable: false, backend: eager}}", None, None),
        ("{compile: {backend: eager}}", None, None),
        ("nonsense", "WARNING", "nonsense is not a supported backend"),
        ("{compile: {enable: true, backend: eager, speed: 9}}", "WARNING", "served uncompiled"),
    ],
)
def test_compilation_that_the_model_config_asks_for(torch, make_model, caplog, pt2, level, text):
    files = {"handler.py": HANDLER, "net.py": MODEL, "c.yaml": f"pt2: {pt2}\n"}
    spec = make_model(files, model={"modelFile": "net.py", "configFile": "c.yaml"})
    with caplog.at_level(logging.INFO):
        session = opened(spec)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    told = [line for line in told if "ompile" in line[1] or "backend" in line[1]]
    if text is None:
        assert told == []
    else:
        assert told[-1][0] == level and text in told[-1][1]
    assert len(ask(session, [1.0, 2.0, 3.0])[0][0]) == 2


def png(mode="RGB", size=(300, 260)):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, size, "red" if mode.startswith("RGB") else 7).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def classifier(torch, make_model):
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )
    labels = {str(index): [f"n{index}", f"label {index}"] for index in range(6)}
    entry = {"serializedFile": "model.pt"}

    def make(**spec):
        files = {"index_to_name.json": json.dumps(labels)}
        made = make_model(files, "image_classifier", entry, **spec)
        script(torch, made, module)
        return opened(made)

    return make


@pytest.mark.parametrize(
    "request_item",
    [
        item(png(), name="data"),
        item(png(), name="body"),
        item(base64.b64encode(png()), "text/plain"),
        item(png("RGBA")),
        item(png("L")),
        item(png("P")),
    ],
    ids=["data", "body", "base64", "alpha", "grey", "palette"],
)
def test_the_image_classifier_answers_labels_and_probabilities(classifier, request_item):
    kind, _, message, replies, _ = classifier().run([request_item] * 2)
    assert kind == "ok", message
    answers = [json.loads(reply[3]) for reply in replies]
    assert answers[0] == answers[1] and len(answers[0]) == 5
    assert all(label.startswith("label ") for label in answers[0])
    values = list(answers[0].values())
    assert values == sorted(values, reverse=True) and 0.5 < sum(values) < 1


def test_an_image_that_cannot_be_decoded_fails_and_the_next_does_not(classifier):
    session = classifier()
    assert session.run([item(b"no image")])[:3] == ("handler_failed", 503, "Prediction failed")
    assert session.run([item(png())])[0] == "ok"


@pytest.mark.parametrize(("limit", "kind"), [(True, "handler_failed"), (False, "ok")])
def test_the_limit_on_pixels(classifier, monkeypatch, limit, kind):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert classifier(limit_max_image_pixels=limit).run([item(png())])[0] == kind


def test_an_explanation_without_captum_says_what_is_missing(classifier, capsys, monkeypatch):
    for name in ("captum", "captum.attr"):
        monkeypatch.setitem(sys.modules, name, None)
    kind, *_ = classifier().run([item(png(), explain="True")])
    assert kind == "handler_failed"
    assert "captum" in capsys.readouterr().err


def test_the_mock_context_of_unit_tests(torch, make_model):
    from ts.torch_handler.base_handler import BaseHandler
    from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext

    spec = make_model({"handler.py": HANDLER, "net.py": MODEL})
    context = MockContext(None, spec["model_dir"], "net.py", gpu_id=None)
    handler = BaseHandler()
    handler.initialize(context)
    assert len(handler.handle([[1.0, 2.0, 3.0]], context)[0]) == 2
    context.explain = True
    with pytest.raises(NotImplementedError):
        handler.handle([[1.0, 2.0, 3.0]], context)


ENVELOPED = "import base64\ndef handle(data, context):\n    return data and {}\n"


def enveloped(load, name, expression, *bodies, **headers):
    session = load({"handler.py": ENVELOPED.format(expression)}, service_envelope=name)
    items = [item(json.dumps(body).encode(), **headers) for body in bodies]
    kind, _, message, replies, _ = session.run(items)
    return [json.loads(reply[3]) for reply in replies] if kind == "ok" else (kind, message)


B64 = {"b64": base64.b64encode(b"ab").decode()}


@pytest.mark.parametrize(
    ("name", "expression", "bodies", "headers", "expected"),
    [
        ("body", "[x.decode() for x in data]", [1, 2], {}, [1, 2]),
        ("json", "data", [{"instances": [1, 2, 3]}, {"instances": [4]}], {},
         [{"predictions": [1, 2, 3]}, {"predictions": [4]}]),
        ("json", "data", [{"instances": [{"a": 1}]}], {}, [{"predictions": [{"a": 1}]}]),
        ("json", "[x.decode() for x in data]", [{"instances": [B64]}], {},
         [{"predictions": ["ab"]}]),
        ("json", "[x['i'].decode() for x in data]", [{"instances": [{"i": B64}]}], {},
         [{"predictions": ["ab"]}]),
        ("json", "data", [{"other": 1}], {}, ("handler_failed", "Prediction failed")),
        ("json", "data[1:] + [1, 1]", [{"instances": [1]}], {},
         ("handler_failed", "Prediction failed")),
        ("kserve", "data", [{"instances": [{"data": 1}]}], {}, [{"predictions": [{"data": 1}]}]),
        ("kserve", "data", [{"instances": [1]}], {"explain": "True"}, [{"explanations": [1]}]),
        ("kserve", "data", [{"instances": [1]}] * 2, {},
         ("batch_mismatch", "number of batch response mismatched")),
        ("kservev2", "[x['data'] for x in data]",
         [{"id": "7", "inputs": [
             {"name": "in", "shape": [2, 2], "datatype": "FP32", "data": [1.5, 2, 3, 4]}]}], {},
         [{"id": "7", "model_name": "m", "model_version": "1.0", "outputs": [
             {"name": "in", "datatype": "FP64", "data": [1.5, 2, 3, 4], "shape": [4]}]}]),
        ("kservev2", "[x['data'] for x in data]",
         [{"id": " ", "inputs": [
             {"name": "in", "shape": [1], "datatype": "BYTES", "data": ["text"]}]}], {},
         [{"id": "id-0", "model_name": "m", "model_version": "1.0", "outputs": [
             {"name": "in", "datatype": "BYTES", "data": ["text"], "shape": [1]}]}]),
        ("kservev2", "[1, 2]",
         [{"inputs": [{"name": "in", "shape": [1], "datatype": "FP32", "data": [1]}]}], {},
         ("handler_failed", "Prediction failed")),
    ],
)  # fmt: skip
def test_envelopes(load, name, expression, bodies, headers, expected):
    assert enveloped(load, name, expression, *bodies, **headers) == expected


def test_an_envelope_that_does_not_exist_is_permanent(make_model):
    spec = make_model({"handler.py": ENVELOPED.format("data")}, service_envelope="none")
    assert bridge.load(spec)[1] == "permanent"
