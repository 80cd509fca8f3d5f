"""Envelopes around handlers: what the handler gets of each form, and who gets which result."""

import base64
import json

import pytest
from harness import Server, at_once

# Answers each instance with its type, its value, and how many came with it.
TELLS = """
def handle(data, context):
    def shown(value):
        if isinstance(value, dict):
            return {name: shown(inner) for name, inner in value.items()}
        return [value.decode(), "decoded"] if isinstance(value, bytes) else value
    return data and [[type(each).__name__, shown(each), len(data)] for each in data]
"""

JSON = {"content-type": "application/json"}
B64 = {"b64": base64.b64encode(b"raw").decode()}
RAW = ["raw", "decoded"]

# Instances, and the type and value that the handler sees of each.
FORMS = {
    "numbers": ([1, -2.5], [("int", 1), ("float", -2.5)]),
    "texts": (["a", "é 北京"], [("str", "a"), ("str", "é 北京")]),
    "lists": ([[1, 2], [[]]], [("list", [1, 2]), ("list", [[]])]),
    "dicts": ([{"a": 1}, {"b": None}], [("dict", {"a": 1}), ("dict", {"b": None})]),
    "b64": ([B64, B64], [("bytes", RAW), ("bytes", RAW)]),
    "b64-columns": ([{"image": B64, "id": 7}], [("dict", {"image": RAW, "id": 7})]),
    "nothing": ([None, False], [("NoneType", None), ("bool", False)]),
}


@pytest.fixture(scope="module")
def enveloped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, ["service_envelope=json", "batch_gather=strict"]).start()
    server.serve("one", TELLS)
    server.serve("four", TELLS, config="batchSize: 4\nmaxBatchDelay: 10000\n")
    yield server
    server.stop()


def predictions(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def body(*instances) -> bytes:
    return json.dumps({"instances": instances}).encode()


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_instances_reaches_the_handler_as_documented_in_04(enveloped, form):
    instances, seen = FORMS[form]
    expected = [[kind, value, len(seen)] for kind, value in seen]
    sent = body(*instances)
    for headers in ({}, JSON, {"content-type": "text/plain"}):
        assert predictions(enveloped.predict("one", sent, headers=headers)) == expected
    assert predictions(enveloped.predict("one", files={"data": ("f", sent)})) == expected


def test_results_go_back_to_their_callers_in_order_in_04_in_14(enveloped):
    # Three instances, one, none and two: a batch of four requests has six of them.
    callers = [["a0", "a1", "a2"], ["b0"], [], [{"d": 0}, {"d": 1}]]
    bodies = [body(*caller) for caller in callers]
    calls = [lambda sent=sent: enveloped.predict("four", sent, headers=JSON) for sent in bodies]
    for _ in range(5):
        for caller, answer in zip(callers, at_once(calls), strict=True):
            expected = [[type(each).__name__, each, 6] for each in caller]
            assert predictions(answer) == expected


def test_a_batch_without_any_instance_has_an_empty_answer_in_14(enveloped):
    assert predictions(enveloped.predict("one", body(), headers=JSON)) == []
    calls = [lambda: enveloped.predict("four", body(), headers=JSON)] * 4
    assert [predictions(answer) for answer in at_once(calls)] == [[]] * 4


NO_INSTANCES = [b"", b"{}", b"[]", b"1", b'{"instances": 1}', b'{"instances": null}', b"{"]


@pytest.mark.parametrize("wrong", NO_INSTANCES)
def test_a_body_without_instances_ends_no_worker_in_12(enveloped, wrong):
    before = enveloped.worker_pids("one")
    answer = enveloped.predict("one", wrong, headers=JSON)
    assert (answer.status_code, answer.json()["message"]) == (503, "Prediction failed")
    assert enveloped.worker_pids("one") == before


EMPTY_INPUTS = {
    "no-rows": ({"shape": [0, 3], "datatype": "FP32", "data": []}, []),
    "no-columns": ({"shape": [1, 0], "datatype": "FP32", "data": []}, [[]]),
    "no-bytes": ({"shape": [0], "datatype": "BYTES", "data": []}, ""),
    "empty-bytes": ({"shape": [1], "datatype": "BYTES", "data": [""]}, ""),
}


def test_inputs_without_elements_are_taken_in_14(start):
    server = start(["service_envelope=kservev2"])
    server.serve(
        "m",
        "def handle(data, context):\n    return data and [[str(each['data'])] for each in data]\n",
    )
    before = server.worker_pids("m")
    for given, seen in EMPTY_INPUTS.values():
        sent = json.dumps({"id": "7", "inputs": [{"name": "in"} | given]}).encode()
        answer = server.infer("/v2/models/m/infer", sent, headers=JSON)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [str(seen)]
    answer = server.infer("/v2/models/m/infer", b'{"inputs": []}', headers=JSON)
    assert (answer.status_code, answer.json()["outputs"]) == (200, [])
    assert server.worker_pids("m") == before
