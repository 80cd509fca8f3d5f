"""The default handlers on the real server: in a process of their own and as threads of one host
they answer the same, predictions and explanations (AR-14, WK-08)."""

import base64
import io
import json

import pytest
from PIL import Image

SCORES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 6)
        )
    def forward(self, x):
        return self.layers(x)
"""
SEGMENTS = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return {"out": torch.stack((x[:, 0] * 0, x[:, 0], x[:, 2] * 2), 1)}
"""
DETECTS = """
import torch
class Net(torch.nn.Module):
    def forward(self, images):
        return [
            {
                "boxes": torch.tensor([[0.0, 0.0, *reversed(image.shape[-2:])]]),
                "labels": torch.tensor([1]),
                "scores": image.mean().reshape(1) * 0 + 0.75,
            }
            for image in images
        ]
"""
TEXTS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.EmbeddingBag(4, 4)
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))
"""
NAMES = {"index_to_name.json": json.dumps({"object_type_names": list("abcdef")})}
VOCABULARY = {"vocab.txt": "<unk>\ngood\nbad\nit"}
MODELS = {
    "image_classifier": ({"net.py": SCORES} | NAMES, "image"),
    "image_segmenter": ({"net.py": SEGMENTS}, "image"),
    "object_detector": ({"net.py": DETECTS} | NAMES, "image"),
    "densenet_handler": ({"net.py": SCORES}, "image"),
    "text_classifier": ({"net.py": TEXTS} | NAMES | VOCABULARY, "text"),
}
ISOLATIONS = ("process", "thread")


def photo(width=40, height=30):
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


BODIES = {"image": photo(), "text": b"It's <i>good</i>, not bad"}


@pytest.fixture(scope="module")
def served(server):
    """Every default handler in both isolations, on one server."""
    for isolation in ISOLATIONS:
        for handler, (files, _) in MODELS.items():
            config = f"workerIsolation: {isolation}\nminWorkers: 1\nbatchSize: 2\n"
            name = f"{handler}-{isolation}"
            server.serve(name, files, handler=handler, config=config, modelFile="net.py")
    return server


def both(server, handler, ask):
    answers = [ask(f"{handler}-{isolation}") for isolation in ISOLATIONS]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].content == answers[1].content
    return answers[0]


@pytest.mark.parametrize("handler", MODELS)
def test_threads_and_processes_predict_the_same(served, handler):
    body = BODIES[MODELS[handler][1]]
    answer = both(served, handler, lambda model: served.predict(model, body))
    if handler == "image_classifier":
        assert len(answer.json()) == 5 and set(answer.json()) <= set("abcdef")
    elif handler == "image_segmenter":
        assert len(answer.json()) == len(answer.json()[0]) == 224
    elif handler == "object_detector":
        assert answer.json() == [{"b": [0.0, 0.0, 40.0, 30.0], "score": 0.75}]
    elif handler == "text_classifier":
        assert sum(answer.json().values()) == pytest.approx(1)


def test_an_image_may_come_as_text_of_json(served):
    text = json.dumps(base64.b64encode(photo()).decode())
    headers = {"content-type": "application/json"}
    as_text = served.predict("image_classifier-process", text, headers=headers)
    assert as_text.status_code == 200, as_text.text
    assert as_text.json() == served.predict("image_classifier-process", photo()).json()


def explain(server, model, body, **options):
    return server.infer(f"/explanations/{model}", body, **options)


def test_an_explanation_of_an_image_is_a_number_for_all_that_the_model_sees(served):
    ask = lambda model: explain(served, model, photo())  # noqa: E731
    channels = both(served, "image_classifier", ask).json()
    assert (len(channels), len(channels[0]), len(channels[0][0])) == (3, 224, 224)
    # And then it predicts again.
    assert len(served.predict("image_classifier-process", photo()).json()) == 5


def test_an_explanation_may_be_of_another_class(served):
    model = "image_classifier-process"
    form = {"data": ("photo.png", photo(), "image/png")}
    asked = [explain(served, model, {"target": target}, files=form) for target in ("0", "3")]
    assert [answer.status_code for answer in asked] == [200, 200], asked[1].text
    assert asked[0].json() == explain(served, model, photo()).json() != asked[1].json()


def test_an_explanation_of_a_text_is_a_number_for_each_word(served):
    ask = lambda model: explain(served, model, b"good it")  # noqa: E731
    answer = both(served, "text_classifier", ask).json()
    assert answer["words"] == ["good", "it", "good it"]
    assert sum(one * one for one in answer["importances"]) == pytest.approx(1, abs=1e-4)


def test_what_cannot_be_explained_fails_and_nothing_else(served):
    answer = explain(served, "object_detector-process", photo())
    assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")
    assert served.predict("object_detector-process", photo()).status_code == 200


def test_what_is_no_image_fails_alone(served):
    for body in (b"", b"no image", photo()[:60], b"GIF89a\0\0\0\0\0\0\0"):
        answer = served.predict("image_classifier-process", body)
        assert answer.status_code == 503, (body, answer.text)
    assert served.predict("image_classifier-process", photo()).status_code == 200
