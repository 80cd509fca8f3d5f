"""Numbered behaviours (contract, part 13) that no other module has a test for."""

import json
import shutil
import subprocess

import pytest
from harness import LIMIT, SERVER, at_once, write_model

ECHO = """
import json

def text(value):
    return value if isinstance(value, (str, dict, list)) else bytes(value).decode()

def handle(data, context):
    if data is None:
        return None
    return [{name: text(value) for name, value in row.items()} for row in data]
"""
CHOOSES = """
def handle(data, context):
    if data is None:
        return None
    for index, row in enumerate(data):
        if bytes(row["body"]) == b"own":
            context.set_response_status(507, "Full", index)
        if bytes(row["body"]) == b"memory":
            raise MemoryError("no room")
        if bytes(row["body"]) == b"raise":
            raise ValueError("of one request")
    return ["own body"] * len(data)
"""


@pytest.fixture(scope="module")
def echo(server):
    server.serve("echo", ECHO)
    return server


def test_a_relative_store_is_one_of_the_folder_of_the_start(start):
    """Row 6: `--model-store` relative."""
    server = start.make()
    write_model(server.store, "echo", ECHO)
    server.args = ["--model-store", "store", "--models", "named=echo"]
    server.start()
    server.wait_for_workers("named")
    assert server.predict("named", b"x").json() == {"body": "x"}


def test_the_routes_of_sagemaker_take_the_model_from_wherever_it_is_named(echo):
    """Row 42: the query, a field of a form, the path; fields of the query reach the handler."""
    form = {"files": {"data": ("a.txt", b"in a form", "text/plain"), "model_name": (None, "echo")}}
    answer = echo.infer("/invocations", **form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"] == "in a form"
    kind = {"content-type": "application/json"}
    body = json.dumps({"numbers": [1]})
    answer = echo.infer("/invocations?model_name=echo&mode=fast", body, headers=kind)
    assert answer.json()["body"] == {"numbers": [1]}
    assert answer.json()["mode"] == "fast"
    answer = echo.infer("/models/echo/invoke?data=in%20the%20query", b"x")
    assert answer.json()["data"] == "in the query"
    for path in ("/echo/predict?data=legacy", "/echo/1.0/predict?data=legacy"):
        answer = echo.infer(path, method="GET")
        assert (answer.status_code, answer.json()["data"]) == (200, "legacy"), path
    answer = echo.infer("/predictions/echo?data=ignored", b"x")
    assert answer.json() == {"body": "x"}


def test_without_a_name_an_invocation_is_refused(echo):
    """Row 42: with no or several models of the start, one has to be named."""
    answer = echo.infer("/invocations", b"x")
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert answer.json()["message"] == "Parameter model_name is required."


def test_a_status_of_the_handler_comes_with_its_own_body(server):
    """Row 47: 507 that the handler sets is no error of the server."""
    server.serve("chooses", CHOOSES)
    answer = server.predict("chooses", b"own")
    assert (answer.status_code, answer.reason, answer.text) == (507, "Full", "own body")
    assert server.predict("chooses", b"x").status_code == 200


@pytest.mark.parametrize("text, status", [("memory", 507), ("raise", 503)])
def test_an_error_is_one_of_the_whole_batch(server, text, status):
    """Row 48."""
    config = "minWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 20000\nbatchGather: strict\n"
    server.serve(f"batch-{text}", CHOOSES, config=config)
    texts = ["a", "b", text, "c"]
    answers = at_once([lambda t=t: server.predict(f"batch-{text}", t) for t in texts])
    assert [answer.status_code for answer in answers] == [status] * 4
    assert f'"code": {status},' in answers[0].text.replace("\n", " ")


@pytest.mark.parametrize("known", [True, False])
def test_a_stop_is_harmless_where_nothing_runs(start, known):
    """Row 2: whether or not there is a folder of logs, a key file or a pid file."""
    server = start.make()
    if known:
        (server.temp / ".model_server.pid").write_text("")
        shutil.copy(server.config_file, server.folder / "key_file.json")
    for more in ([], ["--foreground"]):
        done = subprocess.run(
            [SERVER, "--stop", *more],
            cwd=server.folder,
            env=server.env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        told = (done.returncode, done.stdout)
        assert told == (0, "TorchServe is not currently running.\n")
