"""Servers for the tests, a limit on the time of each, and the server's output beside a failure."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import ARCHIVER, PLUGIN, SERVER, SOAK, Server

# No test may hang, whatever the server does; the marker `seconds` sets another limit.
TEST_SECONDS = 120

# Those that a test or module has now.
STARTED: list[Server] = []


def pytest_sessionstart() -> None:
    missing = [str(path) for path in (SERVER, ARCHIVER, PLUGIN) if not path.exists()]
    if missing:
        pytest.exit(f"not built: {', '.join(missing)}; run `make build`", returncode=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("seconds")
    seconds = int(marker.args[0]) if marker else TEST_SECONDS * SOAK

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"{item.nodeid} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report = yield
    if report.failed:
        for server in STARTED:
            report.sections.append(("output of the server", server.output[-20_000:]))
    return report


class Starter:
    """Makes servers that end with the test or module that asked for them."""

    def __init__(self, folder: Callable[[], Any], stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def make(self, *args: Any, **options: Any) -> Server:
        """A server that is not started yet."""
        server = Server(options.pop("folder", None) or self._folder(), *args, **options)
        STARTED.append(server)
        self._stack.callback(STARTED.remove, server)
        self._stack.callback(server.stop)
        return server

    def __call__(self, *args: Any, **options: Any) -> Server:
        return self.make(*args, **options).start()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts servers for one test."""
    with ExitStack() as stack:
        yield Starter(lambda: tmp_path_factory.mktemp("server"), stack)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that the tests of a module share; it has the model `scripted`."""
    with ExitStack() as stack:
        server = Starter(lambda: tmp_path_factory.mktemp("server"), stack)()
        server.serve("scripted")
        yield server
