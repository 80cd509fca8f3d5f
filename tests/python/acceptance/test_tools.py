"""The archiver, registering what it packs, and compiled models (section 7)."""

import json
import re
import subprocess
import tarfile
import zipfile
from contextlib import ExitStack

import pytest
from conftest import Starter
from harness import ARCHIVER, LIMIT, archive, wait_until, write_files

WHO = "def handle(data, context):\n    return data and [context.model_name] * len(data)\n"


@pytest.fixture
def pack(tmp_path):
    """Runs the archiver and returns its exit code; `without` leaves options out."""
    write_files(tmp_path, {"who.py": WHO, "weights.pt": "weights"})

    def run(*more, without=()):
        options = {
            "--model-name": "who",
            "--version": "1.0",
            "--handler": tmp_path / "who.py",
            "--export-path": tmp_path / "out",
        }
        given = [part for option in options.items() if option[0] not in without for part in option]
        done = subprocess.run(
            [ARCHIVER, *given, *more], capture_output=True, text=True, timeout=LIMIT
        )
        assert done.stdout == ""
        assert done.stderr or done.returncode == 0, "a failure says why"
        return done.returncode

    return run


def test_the_exit_code_tells_whether_it_packed(pack):
    """test_model_archiver, row 73: what is needed, and that nothing is overwritten unasked."""
    assert pack() == 0
    assert pack() != 0
    assert pack("--force") == 0
    for option in ("--handler", "--model-name"):
        assert pack("--force", without=[option]) != 0
    assert pack("--force", "--serialized-file", "absent.pt") != 0
    assert pack("--force", "--handler", "no_such_handler.py") != 0


def members_of(path):
    """The manifest of an archive of any form, and how its members are stored."""
    if path.is_dir():
        return json.loads((path / "MAR-INF/MANIFEST.json").read_text()), "folder"
    if path.suffix == ".gz":
        with tarfile.open(path) as packed:
            (name,) = [name for name in packed.getnames() if name.endswith("MANIFEST.json")]
            return json.load(packed.extractfile(name)), "tar"
    with zipfile.ZipFile(path) as packed:
        kinds = {entry.compress_type for entry in packed.infolist() if not entry.is_dir()}
        (kind,) = kinds
        return json.loads(packed.read("MAR-INF/MANIFEST.json")), kind


FORMS = {
    "default": ("who.mar", zipfile.ZIP_DEFLATED),
    "no-archive": ("who", "folder"),
    "tgz": ("who.tar.gz", "tar"),
    "zip-store": ("who.mar", zipfile.ZIP_STORED),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_a_manifest(pack, tmp_path, form):
    """model-archiver/cli-table: four forms, their manifest, and the second run."""
    name, kind = FORMS[form]
    # Longer than the others, since what is short may be stored where it could be deflated.
    (tmp_path / "weights.pt").write_bytes(bytes(10_000))
    options = ["--archive-format", form, "--serialized-file", tmp_path / "weights.pt"]
    assert pack(*options) == 0
    assert pack(*options) != 0
    assert pack(*options, "--force") == 0
    manifest, stored = members_of(tmp_path / "out" / name)
    assert stored == kind
    assert re.fullmatch(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d", manifest["createdOn"])
    assert manifest["runtime"] == "python"
    model = manifest["model"]
    expected = {"modelName": "who", "handler": "who.py", "modelVersion": "1.0"}
    assert {key: model[key] for key in expected} == expected
    assert model["serializedFile"] == "weights.pt"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with two models of the start in one argument; both are compiled."""
    with ExitStack() as stack:
        starter = Starter(lambda: tmp_path_factory.mktemp("server"), stack)
        server = starter.make(["default_workers_per_model=1"])
        write_files(server.folder, {"net.py": NET, "rows.py": ROWS, "who.py": WHO})
        for name, config in COMPILED.items():
            write_files(server.folder, {f"{name}/model-config.yaml": config})
            archive(
                server.store,
                *("--model-name", name, "--version", "1.0"),
                *("--handler", server.folder / "rows.py"),
                *("--model-file", server.folder / "net.py"),
                *("--config-file", server.folder / name / "model-config.yaml"),
            )
        server.args = ["--models", ",".join(f"{name}.mar" for name in COMPILED)]
        server.start()
        yield server


NET = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""
ROWS = """
from ts.torch_handler.base_handler import BaseHandler

class Rows(BaseHandler):
    def preprocess(self, data):
        return super().preprocess([row["body"]["numbers"] for row in data])
"""
COMPILED = {
    "text": "pt2: inductor\n",
    "dictionary": "pt2:\n  compile:\n    enable: true\n    backend: inductor\n"
    "    mode: reduce-overhead\n",
}


def test_two_models_of_one_argument_are_listed(server):
    """test_torch_compile, row 4: healthy, and the list of both."""
    wait_until("both are loaded", lambda: len(server.models()) == 2)
    ping = server.infer("/ping", method="GET")
    assert (ping.status_code, ping.json()) == (200, {"status": "Healthy"})
    listed = server.manage("GET", "/models").json()
    expected = [{"modelName": name, "modelUrl": f"{name}.mar"} for name in sorted(COMPILED)]
    assert listed == {"models": expected}


def test_both_ways_to_ask_for_a_compiled_model_are_told(server):
    """test_torch_compile, row 61: `pt2` as a text and as a dictionary."""
    line = re.compile(r" W-\d+-(\w+)_1\.0-std\w+ MODEL_LOG .*Compiled model with (.+)")
    # Importing what compiles takes half a minute on a busy machine.
    wait_until("both are told", lambda: len(line.findall(server.output)) == 2, limit=110)
    assert dict(line.findall(server.output)) == {
        "text": "backend inductor",
        "dictionary": "backend inductor, mode reduce-overhead",
    }


def test_a_media_type_may_end_in_a_semicolon(server):
    """test_torch_compile: `application/json;` is JSON all the same."""
    write_files(server.folder, {"eager.yaml": "pt2: eager\n"})
    archive(
        server.store,
        *("--model-name", "eager", "--version", "1.0", "--handler", server.folder / "rows.py"),
        *("--model-file", server.folder / "net.py", "--config-file", server.folder / "eager.yaml"),
    )
    assert server.register("eager.mar").status_code == 200
    headers = {"Content-Type": "application/json;"}
    answer = server.predict("eager", json.dumps({"numbers": [1.5, 2.0]}), headers=headers)
    assert (answer.status_code, answer.json()) == (200, [3.0, 4.0])
    assert server.manage("DELETE", "/models/eager").status_code == 200


def test_two_versions_of_a_name_and_the_same_one_again(server, web):
    """test_model_archiver, rows 20 and 29: two are listed; 500 by address, 409 by name."""
    for name, version in (("first", "1.0"), ("second", "2.0")):
        model = ["--model-name", name, "--version", version]
        for folder in (server.store, web.folder):
            archive(folder, *model, "--handler", server.folder / "who.py", "--force")
    for name in ("first", "second"):
        assert server.register(f"{name}.mar", model_name="versions").status_code == 200
    assert len(server.manage("GET", "/models/versions/all").json()) == 2
    again = server.register(web.url("first.mar"), model_name="versions").json()
    assert (again["code"], again["type"]) == (500, "InternalServerException")
    again = server.register("first.mar", model_name="versions").json()
    assert (again["code"], again["type"]) == (409, "ConflictStatusException")
