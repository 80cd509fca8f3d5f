"""Starts and stops a server from Python, as notebooks and test suites do."""

import collections
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import requests

# Names the executable where it is neither on the path nor beside the interpreter.
VARIABLE = "TORCHSERVE"
STARTED = "Model server started"
MODELS = "http://localhost:8081/models"

# Until then a server must have started. Archives named at its start may have to be fetched first.
START_SECONDS = 600.0
# A server ends within 60 seconds of being asked to.
STOP_SECONDS = 90.0
# The server ends a registration itself, by the model's start-up time-out.
REGISTER_SECONDS = 3600.0
# Lines that wait for a reader; of more, the oldest are dropped.
KEPT_LINES = 10_000
# Lines that the error of a failed start repeats.
TOLD_LINES = 20


def start(
    model_store: str | os.PathLike[str] | None = None,
    snapshot_file: str | os.PathLike[str] | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | os.PathLike[str] | None = None,
    disable_token: bool = False,
    models: str | Sequence[str] | None = None,
    enable_model_api: bool = False,
) -> queue.Queue[str | None]:
    """Stops the server that runs, starts another one and waits until it serves.

    `snapshot_file` is what `--ts-config` takes: a snapshot or any other configuration. The queue
    gets the lines that the server writes from then on, and `None` when it has ended, so that
    `iter(lines.get, None)` reads them all. Its handlers run in the Python that calls.

    Raises `RuntimeError` with what the server said if it ends instead of starting, and
    `TimeoutError` after `START_SECONDS`.
    """
    stop(wait=True)
    server = subprocess.Popen(
        command(
            model_store=model_store,
            snapshot_file=snapshot_file,
            no_config_snapshots=no_config_snapshots,
            plugin_folder=plugin_folder,
            disable_token=disable_token,
            models=models,
            enable_model_api=enable_model_api,
        ),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
    )
    output = _Output(server)
    output.start()
    output.wait_until_started()
    return output.lines


def stop(wait: bool = True) -> None:
    """Stops the server that runs, if one does; `wait` returns once it has ended."""
    line = [executable(), "--stop"] + (["--foreground"] if wait else [])
    subprocess.run(line, check=True, stdin=subprocess.DEVNULL, timeout=STOP_SECONDS)


def register_model(model_name: str, url: str) -> "requests.Response":
    """Registers a model with one worker, and returns when that is ready."""
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    )


def register_model_with_params(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> "requests.Response":
    """Registers a model by the query parameters of `POST /models`."""
    import requests

    with requests.Session() as session:
        session.trust_env = False  # no proxy of the environment stands between us and this machine
        parameters = dict(params)
        return session.post(MODELS, params=parameters, timeout=REGISTER_SECONDS)


def command(
    *,
    model_store: str | os.PathLike[str] | None = None,
    snapshot_file: str | os.PathLike[str] | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | os.PathLike[str] | None = None,
    disable_token: bool = False,
    models: str | Sequence[str] | None = None,
    enable_model_api: bool = False,
    foreground: bool = False,
) -> list[str]:
    """The command line that starts a server; the parameters are those of `start`."""
    line = [executable(), "--start"]
    for option, value in (
        ("--model-store", model_store),
        ("--ts-config", snapshot_file),
        ("--plugins-path", plugin_folder),
    ):
        if value is not None:
            line += [option, os.fspath(value)]
    for option, is_on in (
        ("--no-config-snapshots", no_config_snapshots),
        ("--disable-token-auth", disable_token),
        ("--enable-model-api", enable_model_api),
        ("--foreground", foreground),
    ):
        if is_on:
            line.append(option)
    if models:
        line += ["--models", *([models] if isinstance(models, str) else models)]
    return line


def executable() -> str:
    """The server's executable: what `TORCHSERVE` names, that of the path, or one beside Python."""
    if named := os.environ.get(VARIABLE):
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(
                f"`{VARIABLE}` names `{named}`, which is no executable; "
                "name the file `torchserve` or unset it"
            )
        return named
    beside = os.path.dirname(sys.executable)
    if found := shutil.which("torchserve") or shutil.which("torchserve", path=beside):
        return found
    raise FileNotFoundError(
        f"`torchserve` is neither on the path nor in `{beside}`; "
        f"put it there or name it by `{VARIABLE}`"
    )


def environment() -> dict[str, str]:
    """The environment of a server whose handlers run in this Python."""
    folder = os.path.dirname(sys.executable)
    path = os.environ.get("PATH")
    own = {"PATH": f"{folder}{os.pathsep}{path}" if path else folder}
    if sys.prefix != sys.base_prefix:
        own["VIRTUAL_ENV"] = sys.prefix
    return os.environ | own


class _Output(threading.Thread):
    """Reads what a server writes, and never makes it wait."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        super().__init__(name="ts-server-output", daemon=True)
        # What follows the start, and `None` at the end.
        self.lines: queue.Queue[str | None] = queue.Queue(KEPT_LINES)
        self._server = server
        self._told: collections.deque[str] = collections.deque(maxlen=TOLD_LINES)
        self._is_decided = threading.Event()
        self._has_started = False

    def run(self) -> None:
        """Ends with the server; the command that has left it in the background is reaped then."""
        with self._server:
            for line in map(str.rstrip, self._server.stdout or ()):
                if self._has_started:
                    self._put(line)
                elif STARTED in line:
                    self._has_started = True
                    self._is_decided.set()
                else:
                    self._told.append(line)
        self._put(None)
        self._is_decided.set()

    def wait_until_started(self) -> None:
        if not self._is_decided.wait(START_SECONDS):
            stop(wait=True)
            limit = f"`torchserve` has not started within {START_SECONDS:g} s"
            raise TimeoutError("\n".join([f"{limit}, and was stopped:", *self._told.copy()]))
        if not self._has_started:
            raise RuntimeError("\n".join(["`torchserve` ended instead of starting:", *self._told]))

    def _put(self, line: str | None) -> None:
        while True:
            try:
                return self.lines.put_nowait(line)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self.lines.get_nowait()
