"""`python -m ts.test_handler`: a handler of an archive or a folder, tried without a server."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ECHO = """
def handle(data, context):
    if data is None:
        return None
    context.set_response_header(0, "x-kind", type(data[0]["body"]).__name__)
    if context.get_request_header(0, "explain") == "True":
        return ["explained"] * len(data)
    return [row["body"] for row in data]
"""
FAILS = """
def handle(data, context):
    if data is not None:
        raise ValueError("no such word")
"""
PARTS = """
from ts.handler_utils.utils import send_intermediate_predict_response
def handle(data, context):
    if data is None:
        return None
    send_intermediate_predict_response(["one "], context.request_ids, "", 200, context)
    return ["two"]
"""
STEPS = """
def handle(data, context):
    if data is None:
        return None
    context.stopping_criteria = [lambda answer: answer == "3"] * len(data)
    answers = []
    for request_id in context.request_ids.values():
        context.cache[request_id] = context.cache.get(request_id, 0) + 1
        answers.append(str(context.cache[request_id]))
    return answers
"""
COROUTINE = """
async def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ts.test_handler", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )


@pytest.fixture
def model(make_model):
    def make(source, **options):
        return Path(make_model({"handler.py": source, **options.pop("files", {})}, **options)
                    ["model_dir"])  # fmt: skip

    return make


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"\xff\x00")
    return tmp_path


def zipped(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return path


def test_a_folder_and_an_archive_get_their_input_as_in_the_server(model, inputs):
    folder = model(ECHO)
    for place in (folder, zipped(folder, inputs / "m.mar")):
        done = run(place, "--input", inputs / "a.json")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("request-0: 200\nx-kind: dict\n")
        assert json.loads(done.stdout.partition("x-kind: dict\n")[2].partition("load:")[0]) == {
            "a": 1
        }
        assert "\nload: " in done.stdout and "\nbatch 1: " in done.stdout


def test_a_tar_archive(model, inputs):
    with tarfile.open(inputs / "m.tar.gz", "w:gz") as archive:
        archive.add(model(ECHO), "m")
    done = run(inputs / "m.tar.gz", "--input", inputs / "b.txt")
    assert (done.returncode, "text" in done.stdout) == (0, True), done.stderr


def test_several_inputs_are_a_batch_and_bytes_are_told_by_their_number(model, inputs):
    files = [inputs / name for name in ("a.json", "b.txt", "c.bin")]
    done = run(model(ECHO), *(word for file in files for word in ("--input", file)))
    assert done.returncode == 0, done.stderr
    assert "request-1: 200\ntext\n" in done.stdout
    assert "request-2: 200\n<2 bytes>\n" in done.stdout


def test_explanations_headers_content_types_and_repetitions(model, inputs):
    flags = ("--explain", "--content-type", "text/plain", "--repeat", "3", "--header", "x-a=b")
    done = run(model(ECHO), "--input", inputs / "a.json", *flags)
    assert done.returncode == 0, done.stderr
    assert "x-kind: str\nexplained\n" in done.stdout and "batch 3: " in done.stdout


def test_a_failure_shows_its_traceback_and_is_the_exit_status(model, inputs):
    done = run(model(FAILS), "--input", inputs / "a.json")
    assert done.returncode == 1
    assert "request-0: 503 (handler_failed)" in done.stdout
    assert "ValueError: no such word" in done.stderr and "handler.py" in done.stderr


def test_a_model_that_does_not_load(model, inputs):
    done = run(model("import no_such_module"), "--input", inputs / "a.json")
    assert done.returncode == 1
    assert "does not load (permanent)" in done.stderr and "no_such_module" in done.stderr


def test_parts_of_a_reply_come_before_it(model, inputs):
    done = run(model(PARTS), "--input", inputs / "a.json")
    assert done.returncode == 0, done.stderr
    first, second = (done.stdout.index(word) for word in ("one ", "two"))
    assert first < second and "request-0, a part: 200" in done.stdout


@pytest.mark.parametrize(
    ("source", "config", "expected"),
    [(STEPS, "continuousBatching: true", ["1", "2", "3"]),
     (COROUTINE, "asyncCommunication: true", ["text"])],
)  # fmt: skip
def test_other_ways_of_exchange(model, inputs, source, config, expected):
    folder = model(source, files={"c.yaml": config}, model={"configFile": "c.yaml"})
    done = run(folder, "--input", inputs / "b.txt")
    assert done.returncode == 0, done.stderr
    bodies = [line for line in done.stdout.splitlines() if line in ("1", "2", "3", "text")]
    assert bodies == expected


@pytest.mark.parametrize("name", ["../out", "/tmp/out-of-it", "a/../../out"])
def test_files_that_lead_out_of_an_archive_are_refused(inputs, name):
    with zipfile.ZipFile(inputs / "m.mar", "w") as archive:
        archive.writestr(name, "x")
    done = run(inputs / "m.mar", "--input", inputs / "a.json")
    assert (done.returncode, f"leads out of it: `{name}`" in done.stderr) == (1, True), done.stderr
    with tarfile.open(inputs / "m.tgz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert "leads out of it" in run(inputs / "m.tgz", "--input", inputs / "a.json").stderr


def test_what_cannot_be_tried_is_said(model, inputs):
    for arguments, text in (
        ((model(ECHO),), "nothing to ask"),
        ((inputs / "none.mar", "--input", inputs / "a.json"), "neither an archive nor a folder"),
        ((inputs / "b.txt", "--input", inputs / "a.json"), "neither a zip nor a tar"),
        ((inputs, "--input", inputs / "none"), "No such file"),
        ((model(ECHO), "--input", inputs / "a.json", "--header", "x"), "NAME=VALUE"),
    ):
        done = run(*arguments)
        assert (done.returncode, text in done.stderr) == (1, True), (text, done.stderr)
