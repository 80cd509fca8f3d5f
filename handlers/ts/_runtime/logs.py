"""Where output of a handler goes: the two pipes that the server reads into the model's log."""

import io
import logging
import sys


class _BelowWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING


def start() -> None:
    """Makes both streams UTF-8 whatever the locale, and sends logging and warnings to them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Line by line: a pipe is block-buffered otherwise, and a crash would take the last
            # lines with it. A lone surrogate must not raise from a `print`.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    out = logging.StreamHandler(sys.stdout)
    out.addFilter(_BelowWarning())
    err = logging.StreamHandler(sys.stderr)
    err.setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO,
        format="%(levelname)s %(name)s - %(message)s",
        handlers=[out, err],
    )
    # Python's own filters show each warning once per place and hide deprecations of libraries.
    logging.captureWarnings(True)
