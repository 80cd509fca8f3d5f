"""Marks in what handlers print: which requests a record is of, and which lines belong together."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ts._runtime import logs

HANDLERS = Path(__file__).resolve().parents[1]


class Pipe(io.BytesIO):
    """Keeps what was written, also once the stream is gone."""

    def close(self) -> None:
        pass


@pytest.fixture
def stream():
    pipe = Pipe()
    stream = logs.RecordStream(pipe)
    stream.written = lambda: pipe.getvalue().decode()
    return stream


def marked(more: int, ids: str, text: str) -> str:
    return f"\x1e{more};{ids}\x1f{text}"


@pytest.fixture
def working():
    tokens = []
    yield lambda ids: tokens.append(logs.REQUEST_IDS.set(ids))
    for token in reversed(tokens):
        logs.REQUEST_IDS.reset(token)


def test_a_line_outside_of_requests_is_written_as_it_is(stream):
    print("a", 1, file=stream)
    stream.writelines(["b\n", "c\n"])
    assert stream.written() == "a 1\nb\nc\n"


def test_a_line_of_a_batch_names_its_requests(stream, working):
    working("x,y")
    print("a", "b", file=stream)
    assert stream.written() == marked(0, "x,y", "a b\n")


def test_lines_of_one_write_are_one_record(stream, working):
    stream.write("first\nsecond\n\nlast\n")
    working("x")
    stream.write("one\ntwo\n")
    assert stream.written() == marked(3, "", "first\nsecond\n\nlast\n") + marked(
        1, "x", "one\ntwo\n"
    )


def test_a_handler_cannot_pass_a_text_off_as_a_mark(stream):
    print("\x1e5;forged\x1ftext", file=stream)
    assert stream.written() == marked(0, "", "\x1e5;forged\x1ftext\n")


def test_a_line_that_is_flushed_before_its_end_goes_on(stream, working):
    working("x")
    stream.write("without an end")
    assert stream.written() == ""
    stream.flush()
    stream.write(", and")
    stream.flush()
    stream.write(" its end\nnext\n")
    expected = marked(0, "x", "without an end, and its end\n") + marked(0, "x", "next\n")
    assert stream.written() == expected


def test_two_threads_do_not_mix_their_lines(stream, working):
    working("x")
    stream.write("begun")
    stream.flush()
    stream.write(" and held ")
    thread = threading.Thread(target=lambda: print("of another", file=stream))
    thread.start()
    thread.join()
    stream.write("back\n")
    expected = marked(0, "x", "begun\n") + "of another\n" + marked(0, "x", " and held back\n")
    assert stream.written() == expected


def test_tasks_of_one_thread_do_not_mix_their_lines(stream):
    async def task(ids: str) -> None:
        logs.REQUEST_IDS.set(ids)
        stream.write(f"{ids} begins")
        await asyncio.sleep(0)
        print(f"; {ids} ends", file=stream)

    async def both() -> None:
        await asyncio.gather(task("x"), task("y"))

    asyncio.run(both())
    written = stream.written()
    assert written.count("\n") == 4 and logs.REQUEST_IDS.get() == ""
    for ids in "xy":
        for text in (f"{ids} begins", f"; {ids} ends"):
            assert marked(0, ids, f"{text}\n") in written, written


def test_a_line_without_an_end_takes_no_memory_without_one(stream):
    for _ in range(5):
        stream.write("x" * 5_000)
    assert len(stream.written()) == 20_000
    stream.flush()
    assert stream.written() == "x" * 25_000


def test_many_ids_are_counted():
    ids = [f"{number:036}" for number in range(1000)]
    shown = logs.ids_for_log(",".join(ids))
    assert len(shown) < 2_010
    *first, more = shown.split(",")
    assert first == ids[: len(first)] and more == f"+{1000 - len(first)}"
    assert logs.ids_for_log("a,b") == "a,b"


def run(code: str) -> tuple[bytes, bytes]:
    code = f"from ts._runtime import logs; logs.start()\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=HANDLERS, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_streams_stay_what_libraries_expect_of_them():
    out, err = run(
        """
import json, sys
sys.__stdout__.write("original\\n")
sys.stdout.buffer.write(b"raw\\n")
sys.stdout.reconfigure(line_buffering=True)
print(json.dumps([sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty()]))
try:
    sys.stderr.write(b"bytes")
except TypeError as raised:
    print("refused", file=sys.stderr)
"""
    )
    assert out.decode().splitlines() == ["original", "raw", json.dumps([1, "utf-8", False])]
    assert err == b"refused\n"


def test_a_logged_traceback_is_one_record():
    _, err = run(
        """
import logging
logs.REQUEST_IDS.set("x")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("failed")
"""
    )
    lines = err.decode().rstrip("\n").split("\n")
    assert lines[0] == marked(len(lines) - 1, "x", "ERROR root - failed")
    assert lines[-1].startswith("ZeroDivisionError")
    assert err.count(b"\x1e") == 1


def test_a_process_that_a_handler_forks_can_write():
    out, _ = run(
        """
import os, sys, threading, time
sys.stdout.write("held by the parent")
held, go = threading.Event(), threading.Event()
def hold():
    with sys.stdout._writing:
        held.set()
        go.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    print("of the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
holder.join()
print(" and ended")
"""
    )
    assert out.decode().splitlines() == ["of the child", "held by the parent and ended"]


def test_a_logger_of_a_handler_goes_through_the_streams(stream, working):
    handler = logging.StreamHandler(stream)
    record = logging.LogRecord("mine", logging.INFO, __file__, 1, "text", (), None)
    working("x")
    handler.emit(record)
    assert stream.written() == marked(0, "x", "text\n")
    assert os.linesep == "\n"
