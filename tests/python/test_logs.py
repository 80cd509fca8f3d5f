"""What a handler prints and logs reaches the server's output, whatever the locale."""

import pytest
from harness import SCRIPTED

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
