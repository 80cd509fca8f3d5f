"""Finds a model's handler: from the manifest's spelling of it to something to call."""

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from ts.utils.util import list_classes_from_module

_DEFAULT_ENTRY = "handle"
_DEFAULT_HANDLERS = "ts.torch_handler"
_ENVELOPES = "ts.torch_handler.request_envelope"

_import_lock = threading.RLock()


class HandlerError(Exception):
    """The archive's handler cannot work, however often it is loaded."""


def read_manifest(model_dir: str) -> dict[str, Any] | None:
    """The archive's manifest, None where it has none."""
    path = os.path.join(model_dir, "MAR-INF", "MANIFEST.json")
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as refused:
        raise HandlerError(f"`{path}` is not JSON: {refused}") from refused
    if not isinstance(manifest, dict):
        raise HandlerError(f"`{path}` is not a JSON object")
    return manifest


def read_model_config(model_dir: str, manifest: dict[str, Any] | None) -> dict[str, Any]:
    """The file that the manifest calls `configFile`, as `yaml.safe_load` reads it."""
    name = _model_entry(manifest).get("configFile")
    if not name:
        return {}
    import yaml

    path = os.path.join(model_dir, name)
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except FileNotFoundError as missing:
        raise HandlerError(f"`{path}`, which the manifest names, is missing") from missing
    except (yaml.YAMLError, UnicodeDecodeError) as refused:
        raise HandlerError(f"`{path}` is not YAML: {refused}") from refused
    return config if isinstance(config, dict) else {}


def files_named_by_manifest(model_dir: str) -> list[str]:
    """The files of the archive without which a model cannot load."""
    with suppress(HandlerError, OSError):
        model = _model_entry(read_manifest(model_dir))
        return [
            name
            for key in ("serializedFile", "modelFile", "configFile")
            if isinstance(name := model.get(key), str)
        ]
    return []


def _model_entry(manifest: dict[str, Any] | None) -> dict[str, Any]:
    entry = (manifest or {}).get("model")
    return entry if isinstance(entry, dict) else {}


def import_handler(handler: str, model_dir: str) -> Callable[..., Any]:
    """The function or class that `handler` names.

    Accepted are `file.py`, `file`, `folder/file.py`, each with `:function` or `:Class` after it,
    `package.module`, `package.module.function`, and the name of a module of `ts.torch_handler`.
    """
    location, _, entry = handler.partition(":")
    module, entry = _import_module(handler, location, entry or _DEFAULT_ENTRY, model_dir)
    found = getattr(module, entry, None)
    if found is None or (not isinstance(found, type) and not callable(found)):
        # What follows the colon may also be the method of the file's only class.
        found = _only_class(module)
    if isinstance(found, type):
        for method in (_DEFAULT_ENTRY, "initialize"):
            if not callable(getattr(found, method, None)):
                raise HandlerError(f"Expect {method} method in class {found.__name__}")
    return found


def wrap_in_envelope(name: str | None, entry: Callable[..., Any]) -> Callable[..., Any]:
    """The entry point behind the service envelope, if the server has one."""
    if not name:
        return entry
    try:
        module = importlib.import_module(f"{_ENVELOPES}.{name}")
    except ModuleNotFoundError as missing:
        raise HandlerError(f"no service envelope is called `{name}`") from missing
    envelope = list_classes_from_module(module)[0]
    return envelope(entry).handle  # type: ignore[no-any-return]


def _only_class(module: ModuleType) -> type:
    classes = list_classes_from_module(module)
    if len(classes) == 1:
        return classes[0]
    names = ", ".join(f"`{found.__name__}`" for found in classes) or "none"
    raise HandlerError(
        "Expected only one class in custom service code or a function entry point; "
        f"`{module.__name__}` defines {names}"
    )


def _import_module(
    handler: str, location: str, entry: str, model_dir: str
) -> tuple[ModuleType, str]:
    name = os.path.basename(location.removesuffix(".py"))
    if not name:
        raise HandlerError(f"handler `{handler}` names no module")
    # Before the folder goes on the path: the standard module of this name must stay what others
    # get, torch among them, and the handler is reached by its place.
    if name in sys.stdlib_module_names:
        with suppress(ImportError):
            importlib.import_module(name)
    if model_dir not in sys.path:
        sys.path.insert(0, model_dir)
    path = os.path.join(model_dir, f"{name}.py")
    if os.path.isfile(path):
        return import_file(path), entry
    if (module := _import_if_present(name)) is not None:
        return module, entry
    # `package.module.function`.
    package, _, attribute = name.rpartition(".")
    if package and ":" not in handler:
        module = _import_if_present(package)
        if module is not None and hasattr(module, attribute):
            return module, attribute
    if (module := _import_if_present(f"{_DEFAULT_HANDLERS}.{name}")) is not None:
        return module, entry
    raise HandlerError(
        f"no handler module `{name}` in the archive, and no default handler `{handler}`"
    )


def import_file(path: str) -> ModuleType:
    """Imports one file of the archive, once, under its own name where that is free."""
    name = os.path.basename(path).removesuffix(".py")
    # Workers that share a host must not see each other's half-executed modules.
    with _import_lock:
        known = sys.modules.get(name)
        if known is not None and _is_file(known, path):
            return known
        if known is not None:
            name = f"_archive_{name}"
            if name in sys.modules:
                return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise HandlerError(f"`{path}` is not a Python module")
        module = importlib.util.module_from_spec(spec)
        # Registered first, as `import` does: dataclasses and pickle look a class's module up.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module


def _import_if_present(name: str) -> ModuleType | None:
    """Imports `name`; None if there is no such module. An import that fails inside it raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (name + ".").startswith(missing.name + "."):
            return None
        raise
    except ValueError:
        # Not a name that `import` could know, such as one with empty parts.
        return None


def _is_file(module: ModuleType, path: str) -> bool:
    place = getattr(module, "__file__", None)
    return place is not None and os.path.exists(place) and os.path.samefile(place, path)
