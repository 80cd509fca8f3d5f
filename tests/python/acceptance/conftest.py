"""What the modules share: a web server to fetch archives from, and a classifier of digits."""

import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import archive, write_files

from acceptance.digits import HANDLER, MODEL


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
    write_files(folder, {"digits.py": MODEL, "digit_handler.py": HANDLER})
    torch.save({"levels": torch.arange(10) / 10}, folder / "digits.pt")
    archive(
        folder,
        *("--model-name", "mnist", "--version", "1.0", "--handler", folder / "digit_handler.py"),
        *("--model-file", folder / "digits.py", "--serialized-file", folder / "digits.pt"),
    )
    return folder / "mnist.mar"


@pytest.fixture(params=["http", "https"])
def scheme(request):
    """For what TorchServe's tests check with TLS and without."""
    if request.param == "https" and shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    return request.param
