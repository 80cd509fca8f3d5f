"""Snapshots (section 5, and contract 2.7): what is written, and what a start makes of it."""

import json
import re
import shutil
import subprocess

import pytest
from harness import LIMIT, archive, wait_until, write_files

WHO = "def handle(data, context):\n    return data and [context.model_name] * len(data)\n"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """An archive that every store gets."""
    folder = tmp_path_factory.mktemp("packed")
    write_files(folder, {"who.py": WHO})
    archive(folder, "--model-name", "who", "--version", "1.0", "--handler", folder / "who.py")
    return folder / "who.mar"


@pytest.fixture
def make(start, packed):
    """Makes a server that writes snapshots; it is told no configuration but the folder's own."""

    def make(config=(), **options):
        server = start.make(config, **options)
        shutil.copy(packed, server.store)
        server.switches.remove("--ncs")
        server.told_config = []
        return server

    return make


def folder_of(server):
    return server.folder / "logs" / "config"


def snapshots(server, kind):
    return sorted(folder_of(server).glob(f"*{kind}*.cfg"))


def newest(server):
    return max(folder_of(server).glob("*.cfg"))


def model_snapshot(path):
    """What TorchServe's own tests read: two escapes are undone, and the rest is JSON."""
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("model_snapshot=")]
    text = line.removeprefix("model_snapshot=")
    return json.loads(text.replace("\\n", "\n").replace("\\:", ":"))


def write_model_snapshot(path, edited):
    """Puts it back as those tests do."""
    text = json.dumps(edited, indent=2).replace("\n", "\\n").replace(":", "\\:")
    lines = path.read_text().splitlines()
    lines = [f"model_snapshot={text}" if "model_snapshot=" in line else line for line in lines]
    path.write_text("\n".join(lines) + "\n")


def with_a_model(server):
    """Runs the server once, so that its snapshots know a model with a worker."""
    server.start()
    answer = server.register("who.mar")
    assert answer.status_code == 200, answer.text
    server.stop()
    return newest(server)


def serves(server):
    wait_until("its model is back", lambda: "who" in server.models())
    server.wait_for_workers("who")
    return server.predict("who", b"x").text == "who"


def fails_to_start(server):
    """Runs a start that must end by itself, and returns what it said."""
    done = subprocess.run(
        server.command("--foreground"),
        cwd=server.folder,
        env=server.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode != 0, done.stdout
    assert "Model server started" not in done.stdout
    return done.stdout


def test_the_start_each_change_and_the_stop_are_kept(make):
    """test_snapshot and sanity/test_config_snapshot: three kinds of files."""
    server = make()
    server.start()
    server.wait_for_output("Model server started")
    (first,) = snapshots(server, "startup")
    assert re.fullmatch(r"\d{17}-startup\.cfg", first.name)
    assert snapshots(server, "snap") == snapshots(server, "shutdown") == []
    changes = [
        ("POST", "/models?url=who.mar&initial_workers=1"),
        ("PUT", "/models/who?min_worker=2&synchronous=true"),
        ("PUT", "/models/who/1.0/set-default"),
        ("DELETE", "/models/who"),
    ]
    for count, (method, path) in enumerate(changes, start=1):
        answer = server.manage(method, path)
        assert answer.status_code == 200, answer.text
        # A change is on the disk before its reply.
        assert len(snapshots(server, "snap")) == count, path
        assert re.fullmatch(r"\d{17}-snapshot\.cfg", newest(server).name)
    assert server.manage("PUT", "/models/absent?min_worker=1").status_code == 404
    assert len(snapshots(server, "snap")) == len(changes)
    server.stop()
    (last,) = snapshots(server, "shutdown")
    assert re.fullmatch(r"\d{17}-shutdown\.cfg", last.name)
    assert newest(server) == last


def test_a_snapshot_is_properties_with_the_models_as_json(make):
    """test_empty_runtime reads it: names and form of each member."""
    server = make(["job_queue_size=33"])
    path = with_a_model(server)
    text = path.read_text()
    assert text.startswith("#") and "job_queue_size=33" in text.splitlines()
    told = model_snapshot(path)
    assert (told["name"], told["modelCount"]) == (path.name, 1)
    assert abs(told["created"] / 1000 - path.stat().st_mtime) < 60
    entry = told["models"]["who"]["1.0"]
    expected = {
        "defaultVersion": True,
        "marName": "who.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 120,
        "startupTimeout": 120,
        "runtimeType": "python",
    }
    assert {key: entry.get(key) for key in expected} == expected


@pytest.mark.parametrize("told", [False, True])
def test_a_restart_brings_the_models_back_with_their_workers(make, told):
    """test_start_from_latest, test_start_from_snapshot, row 12: by name, or the newest."""
    server = make(["job_queue_size=33"])
    path = with_a_model(server)
    # What the newest snapshot holds comes before the folder's own configuration.
    server.config_file.write_text(server.config_file.read_text().replace("33", "44"))
    if told:
        server.told_config = ["--ts-config", path]
    server.start()
    assert serves(server)
    described = server.describe("who")
    assert len(described["workers"]) == 1
    assert described["jobQueueStatus"]["remainingCapacity"] == 33
    assert described["loadedAtStartup"] is False


def test_every_version_comes_back_and_the_default_is_the_same(make):
    """Contract 2.7: versions, their default and their settings."""
    server = make()
    server.start()
    write_files(server.folder, {"who.py": WHO})
    second = ["--model-name", "second", "--version", "2.0", "--handler", server.folder / "who.py"]
    archive(server.store, *second)
    assert server.register("who.mar", initial_workers=0).status_code == 200
    parameters = {"model_name": "who", "batch_size": 4, "max_batch_delay": 7}
    assert server.register("second.mar", **parameters).status_code == 200
    assert server.manage("PUT", "/models/who/2.0/set-default").status_code == 200
    server.stop()
    server.start()
    assert serves(server)
    entries = {
        entry["modelVersion"]: entry for entry in server.manage("GET", "/models/who/all").json()
    }
    assert set(entries) == {"1.0", "2.0"}
    assert server.describe("who")["modelVersion"] == "2.0"
    assert len(entries["1.0"]["workers"]) == 0
    restored = entries["2.0"]
    assert (restored["batchSize"], restored["maxBatchDelay"]) == (4, 7)
    assert len(restored["workers"]) == 1


def test_a_snapshot_that_cannot_be_written_to_will_do(make):
    """test_start_from_read_only_snapshot, row 6."""
    server = make()
    path = with_a_model(server)
    path.chmod(0o444)
    server.told_config = ["--ts-config", path]
    server.start()
    assert serves(server)


@pytest.mark.parametrize("fault", ["configuration", "store", "archive"])
def test_what_a_start_needs_and_does_not_find_ends_it(make, fault):
    """test_start_from_non_existing_snapshot and its like, rows 10 and 13."""
    server = make()
    path = with_a_model(server)
    if fault == "configuration":
        server.told_config = ["--ts-config", folder_of(server) / "absent.cfg"]
        expected = "--ts-config file not found"
    elif fault == "store":
        server.args = ["--model-store", server.folder / "absent"]
        expected = "--model-store directory not found"
    else:
        (server.store / "who.mar").unlink()
        server.told_config = ["--ts-config", path]
        expected = "Model archive file for model :who, version :1.0 not found in model store"
    assert expected in fails_to_start(server)


def test_an_archive_that_is_none_is_listed(make):
    """test_replace_mar_file_with_dummy, row 10: the server starts, and names the model."""
    server = make()
    with_a_model(server)
    (server.store / "who.mar").write_text("no archive at all")
    server.start()
    wait_until("it is listed", lambda: server.models() == ["who"])
    assert server.predict("who", b"x").status_code >= 500


def test_without_snapshots_none_is_written_or_read(make):
    """test_config_snapshot with `--no-config-snapshots`, row 8."""
    server = make()
    with_a_model(server)
    kept = sorted(folder_of(server).iterdir())
    server.switches.append("--no-config-snapshots")
    server.start()
    server.wait_for_output("Model server started")
    assert server.models() == []
    assert server.register("who.mar").status_code == 200
    server.stop()
    assert sorted(folder_of(server).iterdir()) == kept


def test_a_runtime_that_is_missing_is_python(make):
    """test_empty_runtime, row 11: files of older releases."""
    server = make()
    path = with_a_model(server)
    edited = model_snapshot(path)
    del edited["models"]["who"]["1.0"]["runtimeType"]
    write_model_snapshot(path, edited)
    server.told_config = ["--ts-config", path]
    server.start()
    assert serves(server)
    assert server.describe("who")["runtime"] == "python"


def test_a_hand_written_snapshot_comes_before_load_models(make):
    """Row 5: `load_models=all` and `model_snapshot`, as configurations for KServe have them."""
    entry = {
        "defaultVersion": True,
        "marName": "who.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 2,
        "maxBatchDelay": 100,
        "responseTimeout": 120,
    }
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"renamed": {"1.0": entry}}}
    server = make(["load_models=all", f"model_snapshot={json.dumps(snapshot)}"])
    server.told_config = ["--ts-config", server.config_file]
    server.start()
    wait_until("its model is there", lambda: server.models() == ["renamed"])
    server.wait_for_workers("renamed")
    assert server.predict("renamed", b"x").text == "renamed"
    assert server.describe("renamed")["batchSize"] == 2


def test_the_place_of_logs_is_that_of_snapshots(make, tmp_path):
    """test_logs_startup_cfg_created, row 9 as far as snapshots go."""
    server = make(env={"LOG_LOCATION": tmp_path / "elsewhere"})
    server.start()
    server.wait_for_output("Model server started")
    assert len(list((tmp_path / "elsewhere" / "config").glob("*startup.cfg"))) == 1
    assert not folder_of(server).exists()
