"""How results become replies, and failures outcomes."""

import io
import json

import pytest
from conftest import item

HEAD = "def handle(data, context):\n    if data is None:\n        return None\n"


def run(load, statement, items=None, **kwargs):
    session = load({"handler.py": f"{HEAD}    {statement}\n"}, **kwargs)
    return session.run(items if items is not None else [item()])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("b'\\x00raw'", b"\x00raw"),
        ("bytearray(b'raw')", b"raw"),
        ("'text'", b"text"),
        ("''", b""),
        ("'é 😀'", "é 😀".encode()),
        ("'a\\ud800b'", b"a?b"),
        ("'{\"a\": 1}'", b'{"a": 1}'),
        ("{'a': [1, None]}", b'{\n  "a": [\n    1,\n    null\n  ]\n}'),
        ("{'é': '\\ud800'}", b'{\n  "\\u00e9": "\\ud800"\n}'),
        ("[]", b"[]"),
        ("0", b"0"),
        ("1.5", b"1.5"),
        ("True", b"true"),
        ("None", b"null"),
        ("(1,)", b"[\n  1\n]"),
        ("float('nan')", b"NaN"),
    ],
)
def test_each_kind_of_result_has_its_bytes(load, expression, expected):
    kind, code, message, replies, _ = run(load, f"return [{expression}]")
    assert (kind, code, message) == ("ok", 200, "")
    assert [
        (status, reason, headers, bytes(body)) for status, reason, headers, body in replies
    ] == [(200, "", [], expected)]


def test_a_tensor_is_saved_in_torchs_format_and_alone(load):
    import torch

    kind, _, _, replies, _ = run(
        load, "import torch; return list(torch.arange(8.0).reshape(2, 4))", [item(), item()]
    )
    assert kind == "ok"
    for index, (_, _, _, body) in enumerate(replies):
        row = torch.load(io.BytesIO(body), weights_only=True)
        assert row.tolist() == [4.0 * index + offset for offset in range(4)]
        # The rows of a batch share their storage; a client may not get the other rows.
        assert row.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        ("None", "invalid_output", "Invalid model predict output"),
        ("'text'", "invalid_output", "Invalid model predict output"),
        ("('x',)", "invalid_output", "Invalid model predict output"),
        ("{0: 'x'}", "invalid_output", "Invalid model predict output"),
        ("[]", "batch_mismatch", "number of batch response mismatched"),
        ("['a', 'b']", "batch_mismatch", "number of batch response mismatched"),
        ("[object()]", "unsupported_output", "Unsupported model output data type."),
        ("[{1, 2}]", "unsupported_output", "Unsupported model output data type."),
        ("[{'a': b'x'}]", "unsupported_output", "Unsupported model output data type."),
        ("[memoryview(b'x')]", "unsupported_output", "Unsupported model output data type."),
        (
            "(lambda x: x.append(x) or [x])([])",
            "unsupported_output",
            "Unsupported model output data type.",
        ),
    ],
)
def test_a_result_that_cannot_be_sent(load, capsys, result, kind, message):
    assert run(load, f"return {result}")[:4] == (kind, 503, message, [])
    assert "refused on request id-0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        ("raise ValueError('no')", ("handler_failed", 503, "Prediction failed")),
        ("raise KeyError('CPU')", ("handler_failed", 503, "Prediction failed")),
        ("1 / 0", ("handler_failed", 503, "Prediction failed")),
        ("import sys; sys.exit(3)", ("handler_failed", 503, "Prediction failed")),
        ("return handle(data, context)", ("handler_failed", 503, "Prediction failed")),
        ("raise MemoryError", ("out_of_memory", 507, "Out of resources")),
        (
            "raise RuntimeError('DefaultCPUAllocator: not enough memory')",
            ("out_of_memory", 507, "Out of resources"),
        ),
        ("raise RuntimeError('CUDA error')", ("device_out_of_memory", 507, "Out of resources")),
        (
            "raise Exception('CUDA out of memory')",
            ("device_out_of_memory", 507, "Out of resources"),
        ),
        (
            "import torch; raise torch.OutOfMemoryError('full')",
            ("device_out_of_memory", 507, "Out of resources"),
        ),
        (
            "from ts.service import PredictionException as E; raise E('wrong size', 422)",
            ("handler_status", 422, "wrong size"),
        ),
        (
            "from ts.utils.util import PredictionException as E; raise E('bad', 599)",
            ("handler_status", 599, "bad"),
        ),
        (
            "from ts.utils.util import PredictionException as E; raise E('bad')",
            ("handler_status", 500, "bad"),
        ),
        (
            "from ts.utils.util import PredictionException as E; raise E('bad', 'x')",
            ("handler_status", 500, "bad"),
        ),
        (
            "from ts.utils.util import PredictionException as E; raise E('bad', 10**30)",
            ("handler_status", 500, "bad"),
        ),
        (
            "context.set_response_status(5, 'x'); return data",
            ("handler_failed", 503, "Prediction failed"),
        ),
        (
            "context.set_response_status('x'); return data",
            ("handler_failed", 503, "Prediction failed"),
        ),
        (
            "raise type('E', (Exception,), {'__str__': lambda e: 1 / 0})",
            ("handler_failed", 503, "Prediction failed"),
        ),
    ],
)
def test_what_a_handler_raises(load, capsys, statement, outcome):
    session = load(
        {"handler.py": f"{HEAD}    if data[0]['body'] == b'ok': return ['fine']\n    {statement}\n"}
    )
    items = [item(request_id="id-0"), item(request_id="id-1")]
    assert session.run(items)[:4] == (*outcome, [])
    log = capsys.readouterr().err
    assert log.startswith("handler failed on request id-0,id-1\nTraceback (most recent call last)")
    # The worker goes on.
    assert session.run([item(b"ok")])[0] == "ok"


def test_a_failed_batch_keeps_nothing_of_its_requests_alive(load):
    import gc
    import weakref

    source = HEAD + "    context.kept.append(type(data)); raise ValueError(data)\n"
    session = load({"handler.py": source.replace("return None", "context.kept = []; return None")})

    class Headers(dict):
        pass

    headers = Headers()
    reference = weakref.ref(headers)
    assert session.run([("id", headers, [])])[0] == "handler_failed"
    del headers
    gc.collect()
    assert reference() is None


def test_status_and_headers_of_each_reply(load):
    statement = """context.set_response_content_type(0, "text/plain; charset=utf-8")
    context.set_response_header(0, "x-number", 7)
    context.set_response_status(404, "Nowhere", 1)
    assert context.get_response_status(1) == (404, "Nowhere")
    assert context.get_response_content_type(0).startswith("text")
    assert context.get_response_headers(1) == {}
    return ["a", "b"]"""
    kind, _, _, replies, _ = run(load, statement, [item(), item()])
    assert kind == "ok"
    assert replies == [
        (200, "", [("content-type", "text/plain; charset=utf-8"), ("x-number", "7")], b"a"),
        (404, "Nowhere", [], b"b"),
    ]


def test_a_status_does_not_stay_for_the_next_batch(load):
    session = load(
        {
            "handler.py": HEAD
            + "    if data[0]['body'] == b'bad': context.set_all_response_status(507, 'full')\n"
            + "    return ['x'] * len(data)\n"
        }
    )
    assert [reply[0] for reply in session.run([item(b"bad"), item()])[3]] == [507, 507]
    assert [reply[0] for reply in session.run([item()])[3]] == [200]


def test_non_latin_output_of_a_handler_survives_an_ascii_locale(make_model, tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    source = HEAD.replace("return None", "return print('北京 é 😀', '\\ud800')")
    source = "import logging\nlogging.getLogger('m').info('Größe')\n" + source
    spec = make_model({"handler.py": source})
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from ts._runtime import bridge; bridge.start_interpreter()\n"
        "print(bridge.load(json.loads(sys.argv[2]))[1:])"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-X",
            "utf8=0",
            "-c",
            code,
            str(Path(__file__).parents[1]),
            json.dumps(spec),
        ],
        env={"LC_ALL": "C", "PATH": os.environ["PATH"], "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    lines = done.stdout.decode("utf-8").splitlines()
    assert lines == ["INFO m - Größe", "北京 é 😀 \\ud800", "('', '')"]
