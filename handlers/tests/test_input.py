"""What a handler sees of a request's body."""

import json
import logging

import pytest
from conftest import item

ECHO = """
import json
def handle(data, context):
    if data is None:
        return None
    return [
        json.dumps({k: [type(v).__name__, v.decode("latin-1") if isinstance(v, bytearray) else v]
                    for k, v in row.items()})
        for row in data
    ]
"""


def seen(session, *items):
    kind, code, message, replies, _ = session.run(list(items))
    assert (kind, code, message) == ("ok", 200, "")
    return [json.loads(reply[3]) for reply in replies]


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        ("", b"1", ["bytearray", "1"]),
        ("application/octet-stream", b"1", ["bytearray", "1"]),
        ("application/json", b'{"a": 1}', ["dict", {"a": 1}]),
        ("application/json", b"[1, 2]", ["list", [1, 2]]),
        ("application/json", b"null", ["NoneType", None]),
        ("application/json", '"北京 é 😀"'.encode(), ["str", "北京 é 😀"]),
        ("application/json; charset=utf-8", b"{}", ["dict", {}]),
        ("application/json;", b"{}", ["dict", {}]),
        ("application/json ;charset=utf-8", b"{}", ["dict", {}]),
        # Compared as it is written, and as a whole.
        ("APPLICATION/JSON", b"{}", ["bytearray", "{}"]),
        ("application/vnd.api+json", b"{}", ["bytearray", "{}"]),
        ("application/jsonl", b"{}", ["bytearray", "{}"]),
        ("text/plain", "é 😀".encode(), ["str", "é 😀"]),
        ("text/plain; charset=utf-8", b"x", ["str", "x"]),
        ("text/csv", b"a,b", ["str", "a,b"]),
        ("text", b"x", ["str", "x"]),
        ("Text/plain", b"x", ["bytearray", "x"]),
        ("image/jpeg", b"\xff\xd8", ["bytearray", "\xff\xd8"]),
        ("application/python-pickle", b"\x80\x04.", ["bytearray", "\x80\x04."]),
    ],
)
def test_media_type_decides_the_form(load, content_type, body, expected):
    assert seen(load({"handler.py": ECHO}), item(body, content_type)) == [{"body": expected}]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{"a":'),
        ("application/json", b""),
        ("application/json", b"\xff\xff"),
        ("application/json", b"\xef\xbb\xbf{}"),
        ("application/json", "{}".encode("utf-16")),
        ("application/json", b"[" * 100_000),
        ("application/json", b"1" * 10_000),
        ("text/plain", b"\xff\xfe"),
    ],
)
def test_a_body_that_does_not_decode_is_handed_over_raw_with_a_warning(
    load, caplog, content_type, body
):
    session = load({"handler.py": ECHO})
    with caplog.at_level(logging.WARNING):
        assert seen(session, item(body, content_type)) == [
            {"body": ["bytearray", body.decode("latin-1")]}
        ]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    # And the next request is served as ever.
    assert seen(session, item(b"1", "application/json")) == [{"body": ["int", 1]}]


def test_nothing_is_decoded_where_the_server_says_so(load):
    session = load({"handler.py": ECHO}, decode_input_request=False)
    assert seen(session, item(b"{}", "application/json"), item(b"x", "text/plain")) == [
        {"body": ["bytearray", "{}"]},
        {"body": ["bytearray", "x"]},
    ]


def test_parts_become_keys_and_the_last_of_a_name_wins(load):
    parts = [
        ("a", "", bytearray(b"1")),
        ("b", "application/json", bytearray(b"2")),
        ("a", "text/plain", bytearray(b"3")),
    ]
    assert seen(load({"handler.py": ECHO}), ("id", {}, parts)) == [
        {"a": ["str", "3"], "b": ["int", 2]}
    ]


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "application/octet-stream",
        "application/python-pickle",
        "application/vnd.bentoml+pickle",
        "application/x-pickle",
        "text/plain",
        "text/x-python",
    ],
)
def test_no_media_type_gets_a_body_unpickled(load, tmp_path, content_type):
    canary = tmp_path / "canary"
    pickled = f"cbuiltins\nopen\n(V{canary}\nVw\ntR.".encode()
    seen(load({"handler.py": ECHO}), item(pickled, content_type))
    assert not canary.exists()
