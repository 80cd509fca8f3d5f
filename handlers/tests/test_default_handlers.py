"""The default handlers beside the image classifier, on small models with random weights, and what
explanations look like."""

import collections
import io
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
from conftest import item

from ts._runtime import bridge

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Captum's way of asking for gradients.
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
    pytest.mark.filterwarnings("ignore:SSD always returns"),
    pytest.mark.filterwarnings("ignore:Setting forward, backward hooks"),
]


def image(width=64, height=48, mode="RGB"):
    from PIL import Image

    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def run(session, *bodies, **headers):
    kind, _, message, replies, _ = session.run([item(body, **headers) for body in bodies])
    assert kind == "ok", message
    return [json.loads(reply[3]) for reply in replies]


def refusal(spec, *bodies, **headers):
    session, kind, message = bridge.load(spec)
    assert session is not None, f"{kind}: {message}"
    return session.run([item(body, **headers) for body in bodies])[:3]


@pytest.fixture
def serve(make_model):
    def make(handler, files, **entry):
        session, kind, message = bridge.load(make_model(files, handler=handler, model=entry))
        assert session is not None, f"{kind}: {message}"
        return session

    return make


SEGMENTS = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        red, _, blue = x.unbind(1)
        return {"out": torch.stack((red * 0, red, blue * 2), 1)}
"""


def test_a_segmenter_answers_class_and_probability_of_each_pixel(serve):
    import torch

    session = serve("image_segmenter", {"net.py": SEGMENTS}, modelFile="net.py")
    answers = run(session, image(), image(300, 400))
    found = torch.tensor(answers)
    assert found.shape == (2, 224, 224, 2)
    classes, probabilities = found.unbind(-1)
    assert set(classes.unique().tolist()) <= {0.0, 1.0, 2.0}
    # Of three classes the most probable has at least a third.
    assert probabilities.min() >= 1 / 3 and probabilities.max() <= 1


SEGMENTER = """
import torch
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    def forward(self, x):
        return self.net(x)
"""


def test_a_segmenter_of_torchvision(serve):
    session = serve("image_segmenter", {"net.py": SEGMENTER}, modelFile="net.py")
    [rows] = run(session, image())
    assert (len(rows), len(rows[0]), len(rows[0][0])) == (224, 224, 2)


DETECTS = """
import torch
class Net(torch.nn.Module):
    def forward(self, images):
        found = []
        for image in images:
            height, width = image.shape[-2:]
            found.append({
                "boxes": torch.tensor([[0.0, 0.0, width, height], [1.0, 2.0, 3.0, 4.0]]),
                "labels": torch.tensor([1, 2]),
                "scores": torch.tensor([0.75, 0.25]),
            })
        return found
"""
NAMES = json.dumps({"object_type_names": ["nothing", "cat", "dog"]})


def test_a_detector_answers_what_it_is_sure_of_by_name(serve):
    files = {"net.py": DETECTS, "index_to_name.json": NAMES}
    session = serve("object_detector", files, modelFile="net.py")
    # Of one size, then of two, and in grey.
    for bodies in ([image()], [image(), image(10, 20)], [image(mode="L")] * 2):
        sizes = [(64.0, 48.0), (10.0, 20.0)] if len(set(bodies)) == 2 else [(64.0, 48.0)] * 2
        assert run(session, *bodies) == [
            [{"cat": [0.0, 0.0, width, height], "score": 0.75}]
            for width, height in sizes[: len(bodies)]
        ]


def test_a_threshold_of_a_subclass(serve):
    source = (
        "from ts.torch_handler.object_detector import ObjectDetector\n"
        "class Sure(ObjectDetector):\n    threshold = 0.2\n"
    )
    session = serve("sure.py", {"net.py": DETECTS, "sure.py": source}, modelFile="net.py")
    [found] = run(session, image())
    assert found == [
        {"1": [0.0, 0.0, 64.0, 48.0], "score": 0.75},
        {"2": [1.0, 2.0, 3.0, 4.0], "score": 0.25},
    ]


@pytest.mark.parametrize("scripted", [False, True])
def test_a_detector_of_torchvision_also_as_torchscript(make_model, scripted):
    import torch
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    torch.manual_seed(0)
    net = ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0, detections_per_img=5
    ).eval()
    source = (
        "from ts.torch_handler.object_detector import ObjectDetector\n"
        "import torch\n"
        "class Any(ObjectDetector):\n"
        "    threshold = 0.0\n"
        "    def initialize(self, context):\n"
        "        super().initialize(context)\n"
    )
    entry = {"serializedFile": "model.pt"}
    files = {"any.py": source}
    if not scripted:
        files["net.py"] = (
            "from torchvision.models.detection import ssdlite320_mobilenet_v3_large\n"
            "from torchvision.models.detection.ssd import SSD\n"
            "import torch\n"
            "class Net(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.net = ssdlite320_mobilenet_v3_large(weights=None,\n"
            "            weights_backbone=None,\n"
            "            num_classes=3, score_thresh=0.0, detections_per_img=5)\n"
            "    def forward(self, images):\n"
            "        return self.net(images)\n"
        )
        entry["modelFile"] = "net.py"
    spec = make_model(files, handler="any.py", model=entry)
    path = Path(spec["model_dir"]) / "model.pt"
    if scripted:
        torch.jit.script(net).save(str(path))
    else:
        torch.save({f"net.{name}": value for name, value in net.state_dict().items()}, path)
    session, kind, message = bridge.load(spec)
    assert session is not None, f"{kind}: {message}"
    answers = run(session, image(), image(90, 60))
    assert [len(found) for found in answers] == [5, 5]
    for one in answers[0]:
        assert set(one) - {"1", "2"} == {"score"} and 0 <= one["score"] <= 1


def test_the_handler_of_the_first_releases(serve):
    source = (
        "from ts.torch_handler.densenet_handler import DenseNetHandler\n"
        "class Old(DenseNetHandler):\n"
        "    def postprocess(self, data):\n"
        "        return [super(Old, self).postprocess(data)[0].tolist()]\n"
    )
    net = (
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.mean((2, 3))\n"
    )
    session = serve("old.py", {"net.py": net, "old.py": source}, modelFile="net.py")
    [scores] = run(session, image())
    assert len(scores[0]) == 3
    # As it is, it answers a tensor.
    session = serve("densenet_handler", {"net.py": net}, modelFile="net.py")
    assert session.run([item(image())])[0] == "ok"


def test_dali_is_named_where_it_is_missing_and_used_where_it_is_there(make_model, monkeypatch):
    import torch

    net = (
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.mean((2, 3)) * 1000\n"
    )
    config = "dali: {pipeline_file: model.dali, num_threads: 2}\n"
    files = {"net.py": net, "c.yaml": config, "model.dali": ""}
    entry = {"modelFile": "net.py", "configFile": "c.yaml"}
    source = (
        "from ts.torch_handler.dali_image_classifier import DALIImageClassifier\n"
        "class Three(DALIImageClassifier):\n    topk = 3\n"
    )
    spec = make_model(files | {"three.py": source}, handler="three.py", model=entry)
    _, kind, message = bridge.load(spec)
    assert kind == "permanent" and "needs the package `nvidia`" in message

    class Pipeline:
        @classmethod
        def deserialize(cls, filename, batch_size, num_threads, device_id, seed):
            assert (Path(filename).name, batch_size, num_threads) == ("model.dali", 4, 2)
            return cls()

        def build(self):
            pass

        def feed_input(self, name, encoded):
            assert name == "source"
            self.sizes = [len(one) for one in encoded]

        def run(self):
            batch = (
                torch.tensor([0.1, 0.3, 0.2]).reshape(1, 3, 1, 1).repeat(len(self.sizes), 1, 2, 2)
            )
            return (types.SimpleNamespace(as_array=batch.numpy),)

    dali = types.ModuleType("nvidia.dali")
    dali.pipeline = types.SimpleNamespace(Pipeline=Pipeline)
    nvidia = types.ModuleType("nvidia")
    nvidia.dali = dali
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.setitem(sys.modules, "nvidia.dali", dali)
    session, kind, message = bridge.load(spec)
    assert session is not None, f"{kind}: {message}"
    answers = run(session, image(), image())
    assert [list(answer) for answer in answers] == [["1", "2", "0"]] * 2


# --- text -----------------------------------------------------------------------------------------

TEXT_NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.EmbeddingBag(8, 4)
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))
"""
TOKENS = ["<unk>", "it", "is", "good", "it is", "is good", "bad", "is bad"]
LABELS = json.dumps({"0": "bad", "1": "good"})


@pytest.fixture
def text_files():
    return {"net.py": TEXT_NET, "index_to_name.json": LABELS, "vocab.txt": "\n".join(TOKENS)}


def test_texts_are_classified_alone_and_in_a_batch(serve, text_files):
    session = serve("text_classifier", text_files, modelFile="net.py")
    texts = [b"It's <b>good</b>!", b"It is bad.", "It’s göód".encode()]
    together = run(session, *texts)
    assert [set(answer) for answer in together] == [{"good", "bad"}] * 3
    assert all(sum(answer.values()) == pytest.approx(1) for answer in together)
    for text, answer in zip(texts, together, strict=True):
        assert run(session, text)[0] == pytest.approx(answer)
    assert together[0] == pytest.approx(together[2]), "accents and short forms do not count"
    assert together[0] != pytest.approx(together[1])


def test_a_handler_of_old_that_takes_the_pair_apart(serve, text_files):
    source = (
        "from ts.torch_handler.text_classifier import TextClassifier\n"
        "class Old(TextClassifier):\n"
        "    ngrams = 1\n"
        "    def preprocess(self, data):\n"
        "        tensor, tokens = super().preprocess(data)\n"
        "        assert tokens == ['it', 'is', 'good']\n"
        "        return tensor, tokens\n"
    )
    session = serve("old.py", text_files | {"old.py": source}, modelFile="net.py")
    assert set(run(session, b"it is good")[0]) == {"good", "bad"}


def test_an_explanation_of_a_text_says_what_each_token_weighs(serve, text_files):
    session = serve("text_classifier", text_files, modelFile="net.py")
    [answer] = run(session, b"It is good", explain="True")
    assert answer["words"] == ["it", "is", "good", "it is", "is good"]
    assert len(answer["importances"]) == 5
    assert sum(one * one for one in answer["importances"]) == pytest.approx(1, abs=1e-5)


def test_a_text_handler_without_a_vocabulary_says_what_it_looks_for(make_model):
    files = {"net.py": TEXT_NET}
    spec = make_model(files, handler="text_classifier", model={"modelFile": "net.py"})
    _, kind, message = bridge.load(spec)
    assert kind == "failed"
    assert "source_vocab.pt or vocab.json or vocab.txt" in message


def in_torchtext(monkeypatch):
    """Classes that are pickled under torchtext's names."""

    class Compiled:
        def __init__(self, tokens, default):
            self.saved = ("0.0.2", [default], tokens, [])

        def __getstate__(self):
            return self.saved

    class Vocab:
        def __init__(self, tokens, default):
            self.training = True
            self._modules = collections.OrderedDict()
            self.vocab = Compiled(tokens, default)

    class OldVocab:
        def __init__(self, tokens, default):
            self.freqs = collections.Counter(tokens)
            self.itos = tokens
            self.stoi = collections.defaultdict(zero, {one: i for i, one in enumerate(tokens)})
            self.unk_index = default
            self.vectors = None

    def zero():
        return 0

    monkeypatch.setitem(sys.modules, "torchtext", types.ModuleType("torchtext"))
    monkeypatch.setitem(sys.modules, "torchtext.vocab", types.ModuleType("torchtext.vocab"))
    for value, module, name in (
        (Compiled, "torchtext._torchtext", "Vocab"),
        (Vocab, "torchtext.vocab.vocab", "Vocab"),
        (OldVocab, "torchtext.vocab", "Vocab"),
        (zero, "torchtext.vocab", "_default_unk_index"),
    ):
        home = sys.modules.get(module) or types.ModuleType(module)
        monkeypatch.setitem(sys.modules, module, home)
        setattr(home, name, value)
        value.__module__, value.__qualname__, value.__name__ = module, name, name
    return Vocab, OldVocab


@pytest.mark.parametrize("release", [0, 1])
def test_vocabularies_that_torchtext_saved_are_read_without_it(tmp_path, monkeypatch, release):
    import torch

    from ts.handler_utils.text_utils import load_vocabulary

    with monkeypatch.context() as there:
        saved = in_torchtext(there)[release](list(TOKENS), 0)
        torch.save(saved, tmp_path / "source_vocab.pt")
    assert "torchtext" not in sys.modules
    vocabulary = load_vocabulary(str(tmp_path / "source_vocab.pt"))
    assert vocabulary.get_itos() == TOKENS
    assert vocabulary(["good", "never seen"]) == [3, 0]


@pytest.mark.parametrize(
    "saved", [TOKENS, {token: index for index, token in enumerate(TOKENS)}, tuple(TOKENS)]
)
def test_plain_vocabularies(tmp_path, saved):
    import torch

    from ts.handler_utils.text_utils import load_vocabulary

    torch.save(saved, tmp_path / "v.pt")
    (tmp_path / "v.json").write_text(json.dumps(saved))
    for name in ("v.pt", "v.json"):
        vocabulary = load_vocabulary(str(tmp_path / name))
        assert len(vocabulary) == 8 and "good" in vocabulary and "fine" not in vocabulary
        assert vocabulary["fine"] == vocabulary.get_default_index() == 0
        assert vocabulary.lookup_indices(["is"]) == [2] == [vocabulary.get_stoi()["is"]]
        assert vocabulary.lookup_tokens([2, 3]) == ["is", "good"]
        assert vocabulary.lookup_token(3) == "good"
        vocabulary.set_default_index(None)
        with pytest.raises(RuntimeError, match="Token fine not found"):
            vocabulary["fine"]


@pytest.mark.parametrize("saved", [{"a": 1}, {"a": 0, "b": 0}, [1, 2], "text", 7])
def test_what_is_no_vocabulary_is_refused(tmp_path, saved):
    from ts.handler_utils.text_utils import load_vocabulary

    (tmp_path / "v.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"`v\.json`"):
        load_vocabulary(str(tmp_path / "v.json"))


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_vocabulary_can_run_nothing(tmp_path):
    import torch

    from ts.handler_utils.text_utils import load_vocabulary

    torch.save([Canary(str(tmp_path / "canary"))], tmp_path / "v.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"no business with `(_io|io)\.open`"):
        load_vocabulary(str(tmp_path / "v.pt"))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ('It\'s "fine"; or: not?', ["it", "'", "s", "fine", "or", "not", "?"]),
        ("a<br />b (c). ", ["a", "b", "(", "c", ")", "."]),
        ("", []),
    ],
)
def test_basic_english(text, words):
    from ts.handler_utils.text_utils import get_tokenizer

    assert get_tokenizer("basic_english")(text) == words


def test_tokenizers_by_name_and_by_hand():
    from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator

    assert get_tokenizer(None)("A b") == ["A", "b"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="no tokenizer is called `moses`"):
        get_tokenizer("moses")
    with pytest.raises(ValueError, match="not for `de`"):
        get_tokenizer("basic_english", "de")
    assert list(ngrams_iterator(["a", "b", "c"], 3)) == ["a", "b", "c", "a b", "b c", "a b c"]


@pytest.mark.parametrize(
    ("text", "longer"),
    [
        ("it's we'll can't don't I'm they've he'd let's", "it is we will cannot do not I am they"
         " have he would let us"),
        ("the dog's tail, isn't it", "the dog's tail, is not it"),
    ],
)  # fmt: skip
def test_short_forms(text, longer):
    from ts.torch_handler.text_classifier import TextClassifier

    assert TextClassifier()._expand_contractions(text) == longer


# --- explanations of images -----------------------------------------------------------------------

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


def test_an_explanation_of_an_image_has_the_shape_of_what_the_model_sees(serve):
    import torch

    session = serve("image_classifier", {"net.py": SCORES}, modelFile="net.py")
    [answer] = run(session, image(), explain="True")
    assert torch.tensor(answer).shape == (3, 224, 224)
    assert torch.tensor(answer).abs().sum() > 0
    # And the next is a prediction again.
    assert len(run(session, image())[0]) == 5
