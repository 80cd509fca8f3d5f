"""Models from the hub of Hugging Face, for scripts."""

import importlib
from typing import Any


def download_model(repo_id: str, revision: str | None = None, **options: Any) -> str:
    """Downloads a model's files unless they are there, and returns their folder.

    `options` are those of `huggingface_hub.snapshot_download`.

    Raises:
        ModuleNotFoundError: the package `huggingface_hub` is not installed.
    """
    hub = importlib.import_module("huggingface_hub")
    folder: str = hub.snapshot_download(repo_id, revision=revision, **options)
    return folder
