"""What a handler sees of a request: the published table of types, and hostile or odd forms."""

import json
import os
import pickle

import pytest
from harness import ROOT, Server

# Answers with the type and the value of each field, and with the headers.
SEEN = """
class Seen:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.seen(row, context.get_all_request_header(i)) for i, row in enumerate(data)]

    def seen(self, row, headers):
        def shown(value):
            return value.hex() if isinstance(value, (bytes, bytearray)) else value
        fields = {name: [type(value).__name__, shown(value)] for name, value in row.items()}
        return {"fields": fields, "headers": headers}
"""


@pytest.fixture(scope="module")
def server(server: Server) -> Server:
    server.serve("seen", SEEN)
    return server


def fields(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["fields"]


def raw(value: bytes) -> list[str]:
    return ["bytearray", value.hex()]


JSON = b'{"a": [1, "\xc3\xa9"]}'
PARSED = ["dict", {"a": [1, "é"]}]
TEXT = ["str", JSON.decode()]

KINDS = {"bytearray": raw(JSON), "dict": PARSED, "str": TEXT}


def published() -> dict[str | None, list[list[object]]]:
    """What the documented table says of `JSON`: by media type, as body, file and field."""
    rows = {}
    for line in (ROOT / "docs/handlers.md").read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in KINDS:
            media_type = None if cells[0] == "none" else cells[0]
            rows[media_type] = [KINDS[kind] for kind in cells[1:]]
    return rows


GOLDEN = published()


@pytest.mark.parametrize("media_type", [*GOLDEN])
def test_a_body_is_what_the_table_says_in_01(server, media_type):
    assert len(GOLDEN) > 10, "the table in docs/handlers.md is not found"
    body, file, field = GOLDEN[media_type]
    headers = {} if media_type is None else {"content-type": media_type}
    for method in ("POST", "PUT"):  # `curl -T` sends PUT without a type
        seen = fields(server.predict("seen", JSON, method=method, headers=headers))
        assert seen == {"body": body}
    for name, expected in (("f.bin", file), (None, field)):
        part = (name, JSON) if media_type is None else (name, JSON, media_type)
        assert fields(server.predict("seen", files={"data": part})) == {"data": expected}


def test_plain_fields_of_forms_are_bytes_in_01(server):
    # As `curl -d` sends it: a form, whatever the text is.
    answer = server.predict("seen", {"data": '{"a": 1}', "é&=": "ü b"})
    assert fields(answer) == {"data": raw(b'{"a": 1}'), "é&=": raw("ü b".encode())}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert fields(server.predict("seen", b'{"a": 1}', headers=form)) == {'{"a": 1}': raw(b"")}


def test_requests_without_a_body_have_an_empty_one(server):
    for method in ("GET", "POST", "PUT"):
        assert fields(server.predict("seen", method=method)) == {"body": raw(b"")}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":',
        b"",
        b"\xff\xfe\xff",
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b"[" * 200_000,
    ],
    ids=["cut", "empty", "no-utf8", "mark", "utf-16", "deep"],
)
def test_what_does_not_decode_arrives_as_bytes_in_02(server, body):
    before = server.worker_pids("seen")
    seen = fields(server.predict("seen", body, headers={"content-type": "application/json"}))
    assert seen == {"body": raw(body)}
    server.wait_for_output("is not valid 'application/json'")
    assert server.worker_pids("seen") == before


def test_text_that_is_not_utf8_arrives_as_bytes_in_02(server):
    body = "é".encode("latin-1")
    seen = fields(
        server.predict("seen", body, headers={"content-type": "text/plain; charset=latin-1"})
    )
    assert seen == {"body": raw(body)}
    server.wait_for_output("is not valid 'text/plain; charset=latin-1'")


# Inputs of the second protocol, each wrong in one way.
WRONG_INPUTS = {
    "negative-shape": {"shape": [-1, 2], "datatype": "FP32", "data": [1, 2]},
    "shape-as-text": {"shape": "2", "datatype": "FP32", "data": [1, 2]},
    "text-as-numbers": {"shape": [2], "datatype": "FP32", "data": ["a", {}]},
    "unknown-datatype": {"shape": [2], "datatype": "FP7", "data": [1, 2]},
    "no-data": {"shape": [2], "datatype": "FP32"},
    "null": {"shape": None, "datatype": None, "data": None},
    "huge": {"shape": [2**63, 2**70], "datatype": "INT64", "data": [2**200]},
    "raw-and-json": {"shape": [1], "data": [1], "parameters": {"binary_data_size": 9**30}},
    "empty": {"shape": [0, 3], "datatype": "BYTES", "data": []},
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_bodies_of_other_protocols_reach_the_handler_as_they_are_in_12(server, wrong):
    body = {"inputs": [{"name": "in"} | WRONG_INPUTS[wrong]]}
    headers = {"content-type": "application/json"}
    for path in ("/v2/models/seen/infer", "/v1/models/seen:predict"):
        answer = server.infer(path, json.dumps(body).encode(), headers=headers)
        assert fields(answer) == {"body": ["dict", body]}


def test_decoding_can_be_switched_off(start):
    server = start(["decode_input_request=false"])
    server.serve("seen", SEEN)
    for kind in ("application/json", "text/plain"):
        assert fields(server.predict("seen", b"[1]", headers={"content-type": kind})) == {
            "body": raw(b"[1]")
        }


def multipart(server: Server, *parts: bytes):
    """A form whose parts are given down to their headers."""
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    return server.predict(
        "seen", body, headers={"content-type": "multipart/form-data; boundary=edge"}
    )


def part(disposition: bytes, value: bytes, *headers: bytes) -> bytes:
    head = [b"content-disposition: form-data; " + disposition, *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + value


def test_of_equal_names_the_last_counts_with_a_warning_in_08(server):
    files = [("data", ("a", b"first")), ("other", ("b", b"1")), ("data", ("c", b"last"))]
    assert fields(server.predict("seen", files=files)) == {"data": raw(b"last"), "other": raw(b"1")}
    server.wait_for_output("a form has this field more than once")
    seen = fields(
        server.predict(
            "seen", b"x=1&x=2", headers={"content-type": "application/x-www-form-urlencoded"}
        )
    )
    assert seen == {"x": raw(b"2")}


def test_odd_parts_are_taken_or_refused_in_08(server):
    assert fields(multipart(server, part(b'name="e"; filename=""', b""))) == {"e": raw(b"")}
    assert fields(multipart(server, part(b'name=""', b"v"))) == {"": raw(b"v")}
    no_name = multipart(server, part(b'filename="f"', b"v"))
    assert no_name.status_code == 400
    assert no_name.json()["type"] == "BadRequestException"
    many = multipart(server, *(part(b'name="%d"' % n, b"v") for n in range(1000)))
    assert (many.status_code, "256" in many.json()["message"]) == (400, True)
    cut = b'--edge\r\ncontent-disposition: form-data; name="a"\r\n\r\nvalue'
    answer = server.predict(
        "seen", cut, headers={"content-type": "multipart/form-data; boundary=edge"}
    )
    assert answer.status_code == 400
    answer = server.predict("seen", cut, headers={"content-type": "multipart/form-data"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "name",
    [
        b'filename="a/b/c.png"',
        b'filename="../../../../tmp/x"',
        b'filename="/etc/passwd"',
        b'filename="..\\\\..\\\\x"',
        b'filename="' + b"n" * 400 + b'"',
        b'filename="with \\"quotes\\""',
        'filename="北京 é.png"'.encode(),
        b"filename=\"x.png\"; filename*=UTF-8''%e5%8c%97%2f..%2f",
        b'filename="nul%00.png"',
        b'filename=""',
    ],
    ids=[
        "folders",
        "up",
        "absolute",
        "backslash",
        "long",
        "quotes",
        "utf8",
        "rfc5987",
        "nul",
        "empty",
    ],
)
def test_a_files_name_is_never_a_path_se_10(server, name):
    value = b"\x00\x01binary\r\n--edg\xff"
    before = sorted(server.folder.rglob("*"))
    answer = multipart(server, part(b'name="data"; ' + name, value, b"content-type: image/png"))
    assert fields(answer) == {"data": raw(value)}
    assert sorted(server.folder.rglob("*")) == before


def test_clients_cannot_speak_for_the_server_se_14(server):
    forged = {
        "url_path": "evil",
        "Explain": "True",
        "DESCRIBE": "True",
        "ts_stream_next": "true",
        "x-request-id": "not one",
        "X-Own": "own",
    }
    answer = server.predict("seen", b"x", headers=forged)
    headers = answer.json()["headers"]
    assert (headers["url_path"], headers["explain"]) == ("", "False")
    assert not {"describe", "ts_stream_next"} & {name.lower() for name in headers}
    assert headers["x-own"] == "own"
    assert answer.headers["x-request-id"] != "not one"
    answer = server.infer("/models/seen/invoke?extra=1", b"x", headers=forged)
    assert fields(answer) == {"body": raw(b"x"), "extra": raw(b"1")}
    assert not {"describe", "explain", "url_path"} & {
        name.lower() for name in answer.json()["headers"]
    }


def test_repeated_headers_count_as_sent_last_se_14(server):
    request = b"POST /predictions/seen HTTP/1.1\r\nhost: h\r\nX-Twice: 1\r\nx-twice: 2\r\n"
    request += b"url_path: a\r\nURL_PATH: b\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"
    head, _, body = server.raw(request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    headers = json.loads(body)["headers"]
    assert (headers["x-twice"], headers["url_path"]) == ("2", "")


def test_headers_are_found_in_any_case_and_parts_have_their_type(server):
    code = "result = [[context.get_request_header(0, n) for n in ('X-Own', 'x-own', 'data')]]"
    answer = server.run(code, headers={"X-oWn": "1"})
    assert answer.json() == ["1", "1", None]
    answer = server.predict("seen", files={"data": ("f", b"x", "image/png")})
    assert answer.json()["headers"]["data"] == {"content-type": "image/png"}


PICKLE_TYPES = [
    None,
    "application/vnd.bentoml+pickle",
    "application/x-pickle",
    "application/pickle",
    "application/python-pickle",
    "application/x-python",
    "application/x-torch",
    "application/octet-stream",
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=edge",
]


@pytest.mark.parametrize("kind", PICKLE_TYPES)
def test_no_request_is_unpickled_se_07(server, tmp_path, kind):
    canary = tmp_path / "canary"

    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    for protocol in (0, 4):
        hostile = pickle.dumps(Touch(), protocol=protocol)
        headers = {} if kind is None else {"content-type": kind}
        assert server.predict("seen", hostile, headers=headers).status_code in (200, 400)
        if kind is not None and not kind.startswith("multipart"):
            seen = fields(server.predict("seen", files={"data": ("f.pkl", hostile, kind)}))
            assert seen["data"][1] in (hostile.hex(), hostile.decode("latin-1"))
    assert not canary.exists()
    pickle.loads(hostile)
    assert canary.exists(), "the pickle would have done it"
