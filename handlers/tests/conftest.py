"""What the tests share: models made on the spot, and sessions of the bridge."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ts._runtime import bridge

# A layer, and a handler of rows of numbers.
MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.linear(x)
"""
HANDLER = """
from ts.torch_handler.base_handler import BaseHandler
class Rows(BaseHandler):
    def preprocess(self, data):
        return super().preprocess([row["body"] for row in data])
"""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A host serves one model, so each test starts with the modules and paths of a fresh one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes a model folder and returns the spec that loads it."""

    def make(
        files: dict[str, str],
        handler: str = "handler.py",
        model: dict[str, Any] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        folder = tmp_path / "model"
        (folder / "MAR-INF").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        entry = {"modelName": "m", "modelVersion": "1.0", "handler": handler} | (model or {})
        manifest = {"runtime": "python", "model": entry}
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest), encoding="utf-8")
        return {
            "model_name": "m",
            "model_version": "1.0",
            "model_dir": str(folder),
            "handler": handler,
            "gpu_id": None,
            "batch_size": 4,
            "exchange": "batches",
            "service_envelope": None,
            "limit_max_image_pixels": True,
            "decode_input_request": True,
            "server_version": "0.1.0",
            "declared_metrics": [],
            "sequence_headers": (
                "ts_request_sequence_id",
                "ts_request_sequence_start",
                "ts_request_sequence_end",
            ),
            "load_policy": "any",
            "intra_op_threads": 1,
            "change_dir": True,
        } | spec

    return make


@pytest.fixture
def load(make_model: Callable[..., dict[str, Any]]) -> Callable[..., bridge.Session]:
    """Loads a model that is expected to load."""

    def run(*args: Any, **kwargs: Any) -> bridge.Session:
        session, kind, message = bridge.load(make_model(*args, **kwargs))  # type: ignore[arg-type]
        assert session is not None, f"{kind}: {message}"
        assert (kind, message) == ("", "")
        return session

    return run


def item(
    value: bytes = b"x",
    content_type: str = "application/octet-stream",
    name: str = "body",
    request_id: str = "id-0",
    **headers: str,
) -> tuple[str, dict[str, str], list[tuple[str, str, bytearray]]]:
    """One request with one part."""
    return request_id, headers, [(name, content_type, bytearray(value))]
