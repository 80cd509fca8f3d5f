"""A handler's place in a trace."""

import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import pytest

HANDLER = """
class Place:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        names = ("traceparent", "tracestate")
        return [{n: context.get_request_header(i, n) for n in names} for i in range(len(data))]
"""

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=1"}


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_handler_goes_on_from_the_servers_span(start, collector):
    server = start(env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector})
    server.serve("place", HANDLER)
    answer = server.predict("place", b"x", headers=CLIENT)
    told = answer.json()
    assert told["traceparent"] == answer.headers["traceparent"]
    assert told["traceparent"].split("-")[1] == TRACE
    assert told["traceparent"] != CLIENT["traceparent"]
    assert told["tracestate"] == "vendor=1"
    begun = server.predict("place", b"x")
    assert begun.json()["traceparent"] == begun.headers["traceparent"]
    assert TRACE not in begun.headers["traceparent"]


def test_without_traces_the_clients_place_is_passed_on(start):
    server = start()
    server.serve("place", HANDLER)
    answer = server.predict("place", b"x", headers=CLIENT)
    assert answer.json() == CLIENT
    assert answer.headers["traceparent"] == CLIENT["traceparent"]
    lost = server.predict("place", b"x", headers=CLIENT | {"traceparent": "none"})
    assert lost.json() == {"traceparent": None, "tracestate": None}
