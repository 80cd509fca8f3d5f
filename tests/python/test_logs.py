"""What a handler prints and logs reaches the server's output, whatever the locale."""

import json
import re

import pytest
from harness import SCRIPTED, at_once, wait_until

WORDS = "北京 é 😀"
TALKS = """
import logging, sys, warnings

class Talks:
    def initialize(self, context):
        print("printed at load WORDS")

    def handle(self, data, context):
        print("printed WORDS")
        print("to stderr WORDS", file=sys.stderr)
        logging.info("logged info WORDS")
        logging.getLogger("mine").warning("logged warning WORDS")
        print("a lone \\ud800 surrogate")
        sys.stdout.write("without an end")
        sys.stdout.flush()
        sys.stdout.write(", and its end\\n")
        return ["talked WORDS"]
""".replace("WORDS", WORDS)


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "LANG": "C", "PYTHONIOENCODING": "ascii"}, {}]
)
def test_words_reach_the_output_in_utf8_without_a_locale_in_18(start, env):
    server = start(env=env, inherit_env=False)
    server.serve("talks", TALKS)
    answer = server.predict("talks", b"x")
    assert answer.content == f"talked {WORDS}".encode()
    output = server.wait_for_output("without an end, and its end")
    for line in ("printed at load", "printed", "to stderr", "logged info", "logged warning"):
        lines = [found for found in output.splitlines() if f"{line} {WORDS}" in found]
        assert len(lines) == 1, f"{line} is told {len(lines)} times"
        assert " MODEL_LOG - " in lines[0]
        assert "W-9000-talks_1.0" in lines[0]
    assert "a lone \\ud800 surrogate" in output


def test_a_traceback_is_told_line_by_line(start):
    server = start()
    source = SCRIPTED + "\n\ndef broken():\n    raise LookupError('of the test')\n"
    server.serve("m", source)
    answer = server.run("from handler import broken; broken()", "m")
    assert answer.status_code == 503
    output = server.wait_for_output("LookupError: of the test")
    last = len(source.splitlines())
    assert f'handler.py", line {last}, in broken' in output
    assert "raise LookupError('of the test')" in output


# What a handler says with every request, by all the ways that it has.
SAYS = """
import asyncio, logging, os, sys, threading

def say(name):
    print(name, "printed")
    logging.info("%s logged", name)
    sys.stderr.write(f"{name} first\\n{name} second\\n\\n{name} third\\n")
    os.write(1, f"{name} raw\\n".encode())
"""

SYNCHRONOUS = (
    SAYS
    + """
class Handler:
    def initialize(self, context):
        say("at-load")

    def handle(self, data, context):
        for row in data:
            say(bytes(row["body"]).decode())
        return [b"said"] * len(data)
"""
)

ASYNCHRONOUS = (
    SAYS
    + """
waiting = asyncio.Event()

class Handler:
    def initialize(self, context):
        self.seen = 0

    async def handle(self, data, context):
        name = bytes(data[0]["body"]).decode()
        self.seen += 1
        # Both are at work before either goes on.
        if self.seen == 2:
            waiting.set()
        await waiting.wait()
        print(name, end=" in ")
        await asyncio.sleep(0)
        print("pieces")
        await asyncio.create_task(self.later(name))
        say(name)
        return [b"said"]

    async def later(self, name):
        print(name, "in a task")
"""
)


def file_of(server, name):
    path = server.folder / "logs" / name
    return path.read_text("utf-8") if path.exists() else ""


def records(server):
    """The records of the model log of a server that logs JSON."""
    return [json.loads(line) for line in file_of(server, "model_log.log").splitlines()]


def ids_by_message(server, last):
    wait_until("the last is there", lambda: any(last in r["message"] for r in records(server)))
    return {record["message"]: record.get("request_id") for record in records(server)}


def ask(server, name):
    return server.predict("m", name.encode(), headers={"x-request-id": f"id-{name}"})


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_what_a_handler_says_names_its_request(start, isolation):
    server = start([f"worker_isolation={isolation}", "log_format=json"])
    server.serve("m", SYNCHRONOUS, initial_workers=2)
    names = [f"name-{number}" for number in range(8)]
    at_once([lambda name=name: ask(server, name) for name in names])
    for name in names:
        found = ids_by_message(server, f"{name} raw")
        lines = f"{name} first\n{name} second\n\n{name} third"
        for text in (f"{name} printed", f"INFO root - {name} logged", lines):
            assert found[text] == f"id-{name}", (text, found)
        assert found[f"{name} raw"] is None
    assert found["at-load printed"] is None
    for record in records(server):
        assert record["logger"] == "MODEL_LOG" and record["worker"].startswith("W-90")


def test_a_batch_names_all_its_requests(start):
    server = start(["log_format=json", "batch_gather=fixed"])
    config = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\nmaxBatchDelay: 5000\n"
    server.serve("m", SYNCHRONOUS, config=config)
    at_once([lambda name=name: ask(server, name) for name in ("a", "b")])
    found = ids_by_message(server, "b raw")
    assert sorted(found["a printed"].split(",")) == ["id-a", "id-b"]


def test_requests_of_one_event_loop_do_not_mix(start):
    server = start(["log_format=json"])
    config = "minWorkers: 1\nmaxWorkers: 1\nasyncCommunication: true\n"
    server.serve("m", ASYNCHRONOUS, config=config)
    at_once([lambda name=name: ask(server, name) for name in ("a", "b")])
    for name in ("a", "b"):
        found = ids_by_message(server, f"{name} raw")
        for text in (f"{name} printed", f"{name} in a task"):
            assert found[text] == f"id-{name}", found
        assert any(
            name in text and " in" in text and ids == f"id-{name}" for text, ids in found.items()
        )


def test_plain_lines_of_handlers_stay_what_they_print(start):
    server = start()
    server.serve("m", SYNCHRONOUS)
    ask(server, "a")
    server.wait_for_output("MODEL_LOG - a raw")
    text = file_of(server, "model_log.log")
    date = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
    head = date + r" \[(INFO |WARN )\] W-9000-m_1\.0-std(out|err) MODEL_LOG - "
    assert all(re.match(head, line) for line in text.splitlines()), text
    said = [line.partition(" - ")[2] for line in text.splitlines()]
    lines = ["a printed", "INFO root - a logged", "a first", "a second", "a third", "a raw"]
    assert [line for line in said if line in lines and said.count(line) == 1] and set(lines) <= set(
        said
    )
    assert "\x1e" not in text and "\x1f" not in text
    # What the server itself says of the request has its id.
    access = wait_until(
        "the access line",
        lambda: [
            x for x in file_of(server, "access_log.log").splitlines() if "/predictions/m" in x
        ],
    )
    assert access[0].endswith(" request_id=id-a")


def test_ids_stand_behind_lines_of_handlers_on_demand(start):
    server = start(["log_request_ids=all"])
    server.serve("m", SYNCHRONOUS)
    ask(server, "a")
    server.wait_for_output("MODEL_LOG - a printed request_id=id-a\n")


FORGES = r"""
import os, sys
class Handler:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        os.write(1, b"\x1e0;other-request\x1fits own line\n")
        os.write(1, b"\x1e0;not an id\n\x1fx\n")
        os.write(1, b"\x1e999999999;a\x1fnothing follows\n")
        os.write(2, b"\x1b[31mred\x1b[0m \x1e\x1f \rafter\n")
        print("\x1e3;b\x1fprinted\x1b[0m")
        os.write(1, b"x" * 100_000 + b"\n")
        print("the end")
        return ["said"]
"""


def test_marks_that_a_handler_forges_do_no_harm(start):
    server = start()
    server.serve("m", FORGES)
    assert ask(server, "a").text == "said"
    output = server.wait_for_output("MODEL_LOG - the end")
    text = file_of(server, "model_log.log")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    for line in text.splitlines():
        assert re.match(r"\S+ \[(INFO |WARN )\] W-9000-m_1.0-std", line), line
    assert "nothing follows" in text
    assert r"\u{1b}[31mred" in output
    assert ask(server, "b").text == "said"


def test_tracebacks_of_workers_do_not_mix(start):
    server = start()
    source = SYNCHRONOUS.replace(
        "        for row in data:",
        "        raise LookupError('of ' + bytes(data[0]['body']).decode())\n"
        "        for row in data:",
    )
    server.serve("m", source, initial_workers=2)
    names = [f"name-{number}" for number in range(30)]
    answers = at_once([lambda name=name: ask(server, name) for name in names])
    assert {answer.status_code for answer in answers} == {503}
    server.wait_for_output("LookupError: of name-29")
    wait_until(
        "all are told", lambda: file_of(server, "model_log.log").count("LookupError: of") == 30
    )
    lines = file_of(server, "model_log.log").splitlines()
    for name in names:
        begin = next(
            i
            for i, line in enumerate(lines)
            if f"failed on request id-{name}" in line and line.endswith(f"id-{name}")
        )
        end = next(i for i, line in enumerate(lines) if line.endswith(f"LookupError: of {name}"))
        workers = {line.split(" ")[2 + (line.split(" ")[2] == "]")] for line in lines[begin:end]}
        assert begin < end and len(workers) == 1, lines[begin : end + 1]
        assert sum("Traceback" in line for line in lines[begin:end]) == 1


def test_a_failure_is_told_in_the_log_and_not_to_the_client_se_12(start):
    server = start(["log_format=json"])
    source = SYNCHRONOUS.replace(
        "        for row in data:",
        "        raise OSError('/secret/place')\n        for row in data:",
    )
    server.serve("m", source)
    answer = ask(server, "a")
    assert "secret" not in answer.text
    found = wait_until(
        "the traceback", lambda: [r for r in records(server) if "/secret/place" in r["message"]]
    )
    assert found[0]["request_id"] == "id-a" and "Traceback" in found[0]["message"]
