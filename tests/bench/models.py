"""The models that are measured."""

import json
import subprocess
from pathlib import Path

from programs import BINARIES, EXAMPLE, PYTHON, environment

WORK = BINARIES.parent / "bench"
CLASSIFIER = "efficientnet_lite0"


def pack(store: Path, name: str, config: dict[str, object], *what: object) -> str:
    """Packs a model with this configuration; returns the archive's name."""
    yaml = store.parent / f"{name}.yaml"
    yaml.write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    command = [BINARIES / "torch-model-archiver", "--model-name", name, "--version", "1.0"]
    command += ["--config-file", yaml, "--export-path", store, *what]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    return f"{name}.mar"


def workers(count: int, isolation: str, batch_size: int = 1) -> dict[str, object]:
    """A model's configuration. A batch takes what waits: no delay."""
    return {
        "minWorkers": count,
        "maxWorkers": count,
        "batchSize": batch_size,
        "maxBatchDelay": 0,
        "workerIsolation": isolation,
    }


def echo_model(store: Path, name: str, config: dict[str, object]) -> str:
    """A model of the echo backend, which no archiver packs, as a folder."""
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "model-config.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in config.items())
    )
    model = {"modelName": name, "modelVersion": "1.0", "configFile": "model-config.yaml"}
    manifest = {"runtime": "echo", "model": model}
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    return name


def example_model() -> Path:
    """The folder with the example's network, names and photos, made once."""
    folder = WORK / "example"
    if not (folder / "coffee.png").exists():
        subprocess.run([PYTHON, EXAMPLE / "make_model.py", folder], check=True, env=environment())
    return folder


def classifier(store: Path, count: int, isolation: str) -> tuple[str, str]:
    """Packs the example; returns the model's name and the archive's."""
    made = example_model()
    name = f"{CLASSIFIER}_{isolation}"
    archive = pack(
        store,
        name,
        workers(count, isolation),
        *("--serialized-file", made / f"{CLASSIFIER}.pt", "--handler", EXAMPLE / "handler.py"),
        *("--extra-files", made / "index_to_name.json"),
    )
    return name, archive
