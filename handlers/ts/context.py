"""What a handler learns of its model and its requests, and how it shapes its replies."""

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts._runtime.output import Output

# Says whether more parts of a reply follow.
STREAM_NEXT = "ts_stream_next"

# (status, reason, headers) of a reply.
Head = tuple[int, str, list[tuple[str, str]]]
# (name, content type, value) of one field of a body.
Part = tuple[str, str, bytearray]
# (request id, headers, parts) of one request, as the server hands it over.
Item = tuple[str, dict[str, str], list[Part]]


class RequestProcessor:
    """Headers of one request; status and headers of its reply."""

    __slots__ = ("_reason_phrase", "_request_header", "_response_header", "_status_code")

    def __init__(self, request_header: dict[str, Any]) -> None:
        self._status_code = 200
        self._reason_phrase: str | None = None
        self._response_header: dict[str, str] = {}
        self._request_header = request_header

    def get_request_property(self, key: str) -> Any:
        """The header called `key`, in whatever case, or None.

        The server knows names in lower case only; archives ask in the case that clients send.
        """
        found = self._request_header.get(key)
        if found is None:
            wanted = key.lower()
            for name, value in self._request_header.items():
                if name.lower() == wanted:
                    return value
        return found

    def get_request_properties(self) -> dict[str, Any]:
        """All headers, and `{"content-type": …}` under the name of each part of the body."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Sets the reply's status."""
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        """The reply's status, 200 unless set."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """The reply's reason phrase, None unless set."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Sets a header of the reply."""
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """The headers set so far."""
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        """One header set so far, or None."""
        return self._response_header.get(key)

    def reply_head(self) -> Head:
        """Status, reason and headers as the server takes them; numbers become text."""
        code = int(self._status_code)
        if not 100 <= code <= 999:
            raise ValueError(f"`{code}` is no HTTP status")
        headers = [(str(name), str(value)) for name, value in self._response_header.items()]
        return code, str(self._reason_phrase or ""), headers


class Context:
    """One per worker, and the same object for all its batches: attributes set on it persist."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.model_yaml_config = model_yaml_config if model_yaml_config is not None else {}
        self.metrics = metrics
        self.stopping_criteria: Any = None
        self.cl_socket: Any = None
        # Continuous batching: what each request keeps between steps, under its id.
        self.cache: dict[str, Any] = {}
        self.header_key_sequence_id = "ts_request_sequence_id"
        self.header_key_sequence_start = "ts_request_sequence_start"
        self.header_key_sequence_end = "ts_request_sequence_end"
        # The way to the server; None in a handler's own tests.
        self.output: Output | None = None
        self._streamed = False
        self._warned_of_dropped_parts = False
        self._items: list[Item] | None = None
        self._request_ids: dict[int, str] | None = None
        self._request_processor: list[RequestProcessor] | None = None

    # What the server calls. Ids and processors are built when a handler first asks for them:
    # most never do, and each would cost more than the rest of the bridge.

    def begin_batch(self, items: list[Item]) -> None:
        """Called by the server before a batch."""
        self._items = items
        self._request_ids = None
        self._request_processor = None
        self._streamed = False
        self._warned_of_dropped_parts = False

    def part_head(self, idx: int, request_id: str) -> Head:
        """Called by the server for a part of a reply that is not the last."""
        if self.get_request_id(idx) != request_id:
            # Of no request that runs.
            return 200, "", []
        self._streamed = True
        processor = self.request_processor[idx]
        processor.add_response_property(STREAM_NEXT, "true")
        return processor.reply_head()

    def end_parts(self) -> None:
        """Called by the server before the last parts."""
        if self._streamed:
            for processor in self.request_processor:
                if processor.get_response_header(STREAM_NEXT) == "true":
                    processor.add_response_property(STREAM_NEXT, "false")

    def warn_of_dropped_parts(self) -> bool:
        """Called by the server: True once in a batch."""
        warn = not self._warned_of_dropped_parts
        self._warned_of_dropped_parts = True
        return warn

    def of_one_request(self) -> "Context":
        """Called by the server for a request that runs beside others: attributes are shared."""
        own = copy.copy(self)
        own.metrics = copy.copy(self.metrics)
        return own

    def has_left(self, idx: int = 0) -> bool:
        """Whether the caller of a request has left, so that nobody waits for its reply."""
        request_id = self.get_request_id(idx)
        return (
            self.output is not None and request_id is not None and self.output.has_left(request_id)
        )

    def all_have_left(self) -> bool:
        """Whether the callers of all requests of the batch have left."""
        count = len(self.request_ids or {})
        return count > 0 and all(self.has_left(idx) for idx in range(count))

    def used_processors(self) -> list[RequestProcessor] | None:
        """The processors of this batch if the handler touched any."""
        return self._request_processor

    def end_batch(self) -> None:
        """Called by the server after a batch."""
        self._items = self._request_ids = self._request_processor = None

    @property
    def request_ids(self) -> dict[int, str] | None:
        """Ids by index in the batch; None while the model loads."""
        if self._request_ids is None and self._items is not None:
            self._request_ids = {index: item[0] for index, item in enumerate(self._items)}
        return self._request_ids

    @request_ids.setter
    def request_ids(self, request_ids: dict[int, str] | None) -> None:
        self._request_ids = request_ids

    @property
    def request_processor(self) -> list[RequestProcessor]:
        """One processor for each request of the batch, in order."""
        if self._request_processor is None:
            self._request_processor = [
                RequestProcessor(_properties(headers, parts))
                for _, headers, parts in self._items or ()
            ]
        return self._request_processor

    @request_processor.setter
    def request_processor(self, request_processor: list[RequestProcessor]) -> None:
        self._request_processor = request_processor

    def get_request_id(self, idx: int = 0) -> str | None:
        """The id of a request, None where there is none."""
        return (self.request_ids or {}).get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """A request's header in whatever case of its name, or None."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """All headers of a request; names are in lower case."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Sets a reply's content type."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """The content type set so far."""
        return self.request_processor[idx].get_response_header("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Sets the status of one reply. The index comes last."""
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Sets the status of all replies of the batch."""
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Code and phrase set so far."""
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Sets a header of one reply."""
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """The headers of one reply set so far."""
        return self.request_processor[idx].get_response_headers()

    def get_sequence_id(self, idx: int) -> str | None:
        """The id of the sequence that a request belongs to, or None."""
        found = self.get_request_header(idx, self.header_key_sequence_id)
        return found if found is None else str(found)


def _properties(headers: dict[str, str], parts: list[Part]) -> dict[str, Any]:
    properties: dict[str, Any] = {
        name: {"content-type": content_type} for name, content_type, _ in parts
    }
    properties.update(headers)
    return properties
