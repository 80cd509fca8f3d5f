"""Every example, as its README says: made, packed, and asked in processes and in threads."""

import functools
import subprocess
import sys

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import run

# A few of them are trained, and the first to need all of them may have to wait for that.
pytestmark = pytest.mark.seconds(400)

packed = functools.cache(run.pack)
SAID: dict[str, str] = {}


@pytest.mark.parametrize("name", run.NAMES)
def test_an_example_is_made_and_packed(name):
    packed(name)
    assert list((run.BUILD / name).glob("*.mar"))


@pytest.fixture(scope="module", params=["process", "thread"])
def served(request):
    """The environment of clients of a server with all examples."""
    for name in run.NAMES:
        packed(name)
    with run.serving(run.NAMES, request.param) as environment:
        yield environment


@pytest.mark.parametrize("name", run.NAMES)
def test_an_example_gets_right_answers_and_the_same_from_processes_and_threads(served, name):
    try:
        said = run.ask(name, served)
    except subprocess.SubprocessError:
        print(run.LOG.read_text(errors="replace")[-20_000:])
        raise
    assert said == SAID.setdefault(name, said) != ""


def test_the_table_of_examples_has_each_of_them():
    table = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    folders = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))
    assert [name for name in folders if f"[{name}]({name}/README.md)" not in table] == []
