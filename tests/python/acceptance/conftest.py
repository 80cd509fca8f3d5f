"""What the modules share: a web server to fetch archives from, and models of torch without weights."""

import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import archive, write_files
from PIL import Image

# The "digit" of an image is the tenth of its brightness: a classifier that needs no training.
DIGITS = """
import torch

class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.arange(10) / 10)

    def forward(self, images):
        brightness = images.mean(dim=(1, 2, 3)).unsqueeze(1)
        return -((brightness - self.levels) ** 2)
"""
DIGIT_HANDLER = """
from torchvision.transforms import ToTensor
from ts.torch_handler.vision_handler import VisionHandler

class DigitHandler(VisionHandler):
    image_processing = ToTensor()

    def postprocess(self, data):
        return data.argmax(1).tolist()

    def get_insights(self, tensor_data, raw_data, target=0):
        tensor_data = tensor_data.clone().requires_grad_()
        self.model(tensor_data)[:, target].sum().backward()
        return tensor_data.grad.tolist()
"""


class Web:
    """A folder that is served by HTTP."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("web")

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        yield Web(folder, f"http://127.0.0.1:{files.server_port}")
        files.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a classifier of digits, for names such as `mnist`."""
    import torch

    folder = tmp_path_factory.mktemp("digits")
    write_files(folder, {"digits.py": DIGITS, "digit_handler.py": DIGIT_HANDLER})
    torch.save({"levels": torch.arange(10) / 10}, folder / "digits.pt")
    archive(
        folder,
        *("--model-name", "mnist", "--version", "1.0", "--handler", folder / "digit_handler.py"),
        *("--model-file", folder / "digits.py", "--serialized-file", folder / "digits.pt"),
    )
    return folder / "mnist.mar"


def image(digit: int) -> bytes:
    """A picture that the classifier of digits takes for this one."""
    encoded = io.BytesIO()
    Image.new("L", (28, 28), round(digit * 25.5)).save(encoded, "PNG")
    return encoded.getvalue()
