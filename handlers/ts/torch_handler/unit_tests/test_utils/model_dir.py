"""Model folders for unit tests of handlers."""

import os
import shutil
import urllib.request
from collections.abc import Iterable


def copy_files(src: str, dst: str, files: Iterable[str]) -> None:
    """Copies files of one folder into another."""
    os.makedirs(dst, exist_ok=True)
    for name in files:
        shutil.copy(os.path.join(src, name), dst)


def download_model(url: str, dst: str) -> str:
    """Downloads a file into a folder unless it is there already. Returns its path."""
    if not url.startswith(("https://", "http://", "file://")):
        raise ValueError(f"`{url}` is no address of a file")
    os.makedirs(dst, exist_ok=True)
    path = os.path.join(dst, os.path.basename(url.partition("?")[0]))
    if not os.path.exists(path):
        beside = f"{path}.part"
        with urllib.request.urlopen(url) as source, open(beside, "wb") as file:  # noqa: S310
            shutil.copyfileobj(source, file)
        os.replace(beside, path)
    return path
