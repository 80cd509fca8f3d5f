"""Where output of a handler goes: the two pipes that the server reads into the model's log.

The server sees bytes. What they cannot say is put before them as a mark: for which requests a
record was written, and how many lines of one `print` or one traceback belong together. A line that
has neither is written as it is, as is what libraries write past Python.
"""

import io
import logging
import os
import sys
import threading
from contextvars import ContextVar
from typing import BinaryIO

# The requests that the running code works for, as `REQUEST_IDS` of a thread or a task.
REQUEST_IDS: ContextVar[str] = ContextVar("REQUEST_IDS", default="")

# As in `crates/serving/src/pool/logs.rs`.
_MARK = "\x1e"
_MARK_END = "\x1f"

# Of a longer line what there is of it is written.
_MAX_PARTIAL_CHARS = 16_384

# Of a batch with more ids the rest is counted.
_MAX_IDS_CHARS = 2_000


def ids_for_log(ids: str) -> str:
    """The ids between commas, or as many as a line should have and the number of the others."""
    if len(ids) <= _MAX_IDS_CHARS:
        return ids
    shown = ids[: ids.rindex(",", 0, _MAX_IDS_CHARS)]
    return f"{shown},+{ids.count(',') - shown.count(',')}"


class _Partial(threading.local):
    """What a thread has written of a line that has not ended."""

    text = ""
    ids = ""


class RecordStream(io.TextIOWrapper):
    """Writes whole lines, each with what the server is to know of it.

    A line belongs to the thread that writes it, however many pieces it comes in; two threads do
    not mix theirs.
    """

    def __init__(self, buffer: BinaryIO) -> None:
        # A pipe is block-buffered otherwise, and a crash would take the last lines with it. A lone
        # surrogate must not raise from a `print`.
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.after_fork()

    def after_fork(self) -> None:
        """Forgets what the other threads of the parent were about."""
        # A signal's handler may write while its thread does.
        self._writing = threading.RLock()
        self._partial = _Partial()
        # Whose line is written and has not ended.
        self._open: tuple[int, str] | None = None

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        partial = self._partial
        ids = REQUEST_IDS.get()
        if partial.text and partial.ids != ids:
            # Of another task in this thread.
            self._write_record(self._take(partial) + "\n", partial.ids)
        lines = partial.text + text
        end = lines.rfind("\n") + 1
        if len(lines) - end > _MAX_PARTIAL_CHARS:
            end = len(lines)
        partial.text, partial.ids = lines[end:], ids
        if end:
            self._write_record(lines[:end], ids)
        return len(text)

    def flush(self) -> None:
        """Writes what there is, also of a line that has not ended: it may be the last before a
        crash."""
        partial = self._partial
        if partial.text:
            self._write_record(self._take(partial), partial.ids)
        super().flush()

    @staticmethod
    def _take(partial: _Partial) -> str:
        text, partial.text = partial.text, ""
        return text

    def _write_record(self, text: str, ids: str) -> None:
        writer = (threading.get_ident(), ids)
        with self._writing:
            head = ""
            if self._open == writer:
                # The rest of its line; what follows is a record of its own.
                head, newline, text = text.partition("\n")
                head += newline
                if not newline:
                    super().write(head)
                    return
            elif self._open is not None:
                head = "\n"
            self._open = None if not text or text.endswith("\n") else writer
            super().write(head + _marked(text, ids))


def _marked(text: str, ids: str) -> str:
    more = text.count("\n", 0, -1)
    if not text or not (ids or more or _MARK in text):
        return text
    return f"{_MARK}{more};{ids}{_MARK_END}{text}"


class _BelowWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING


def _record_stream(stream: object) -> RecordStream | None:
    # Anything else was put there by whoever embeds this.
    if type(stream) is not io.TextIOWrapper:
        return None
    made = RecordStream(stream.detach())
    os.register_at_fork(after_in_child=made.after_fork)
    return made


def start() -> None:
    """Makes both streams UTF-8 whatever the locale, and sends logging and warnings to them."""
    if (out := _record_stream(sys.stdout)) is not None:
        sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    if (err := _record_stream(sys.stderr)) is not None:
        sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
    below = logging.StreamHandler(sys.stdout)
    below.addFilter(_BelowWarning())
    above = logging.StreamHandler(sys.stderr)
    above.setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO,
        format="%(levelname)s %(name)s - %(message)s",
        handlers=[below, above],
    )
    # Python's own filters show each warning once per place and hide deprecations of libraries.
    logging.captureWarnings(True)
