"""The release server and archiver as child processes, and the models that tests give them."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import page
import requests

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"
SERVER = TARGET / "torchserve"
ARCHIVER = TARGET / "torch-model-archiver"
PLUGIN = TARGET / "libts_plugin.so"

# How long anything may take before its test fails.
LIMIT = 40.0

# How many times longer than usual the tests for slow leaks are.
SOAK = int(os.environ.get("SOAK") or 1)

# Runs the code that a request brings: most tests need no handler of their own.
SCRIPTED = """
class Scripted:
    def initialize(self, context):
        self.kept = {}

    def handle(self, data, context):
        scope = {"self": self, "data": data, "context": context}
        exec(bytes(data[0]["body"]).decode(), scope)
        return scope["result"]
"""


def wait_until(what: str, holds: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Polls until `holds` returns something true, and returns that."""
    deadline = time.monotonic() + limit
    while not (found := holds()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
    return found


def at_once(calls: Iterable[Callable[[], Any]], callers: int = 64) -> list[Any]:
    """Runs calls at the same time and returns their results in order."""
    with ThreadPoolExecutor(callers) as pool:
        return [call.result() for call in [pool.submit(call) for call in calls]]


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_model(
    store: Path,
    name: str,
    files: str | Mapping[str, str | bytes],
    handler: str = "handler.py",
    config: str = "",
    version: str = "1.0",
    runtime: str = "python",
    **entry: str,
) -> Path:
    """Puts an unpacked model into a store; one text is the source of `handler.py`."""
    folder = store / name
    files = {"handler.py": files} if isinstance(files, str) else dict(files)
    model = {"modelName": name, "modelVersion": version, "handler": handler} | entry
    if config:
        model["configFile"] = "model-config.yaml"
        files["model-config.yaml"] = config
    manifest = {"runtime": runtime, "model": model}
    write_files(folder, files | {"MAR-INF/MANIFEST.json": json.dumps(manifest)})
    return folder


def archive(export_path: Path, *flags: str | Path) -> None:
    """Runs the archiver where it must succeed."""
    command = [ARCHIVER, "--export-path", export_path, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def can_run(*command: str | Path) -> bool:
    """Whether this machine lets the tests run a command, such as one that makes namespaces."""
    try:
        return (
            subprocess.run([*command, "true"], capture_output=True, timeout=LIMIT).returncode == 0
        )
    except FileNotFoundError:
        return False


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not stat.rpartition(")")[2].lstrip().startswith("Z")


def started_by(pid: int) -> list[int]:
    """Children of any thread of a process, those that nobody has reaped too."""
    pids = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids += [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # the thread has ended
    return pids


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def processes_of(server: "Server") -> set[int]:
    """Every process with its environment, whoever its parent is now, and what it has not reaped."""
    mark = f"TMPDIR={server.env['TMPDIR']}".encode()
    found = set(started_by(server.pid))
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue  # it ended, or is none of ours to look into
    return found


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Server:
    """A server with a store of its own, free ports, no tokens and the model API on."""

    def __init__(
        self,
        folder: Path,
        config: Iterable[str] = (),
        args: Iterable[str | Path] = (),
        env: Mapping[str, str | Path] | None = None,
        inherit_env: bool = True,
        prefix: Iterable[str | Path] = (),
    ) -> None:
        self.folder = folder
        # A command that becomes the server once it has changed the server's surroundings.
        self.prefix = list(prefix)
        self.store = folder / "store"
        # Where its own temporary files go; the pid file lies in `TMPDIR` whatever `TEMP` says.
        self.temp = Path((env or {}).get("TEMP") or folder / "tmp")
        for path in (self.store, folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        ports = [
            f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")
        ]
        if not TARGET.is_relative_to(ROOT):
            # Built elsewhere, and the environment's variables may be hidden from it.
            ports.append(f"python={ROOT / '.venv/bin/python'}")
        self.config_file = folder / "config.properties"
        self.config_file.write_text("\n".join([*ports, *config]) + "\n")
        # The configuration it is told to read, and the usual departures from what is safe.
        self.told_config: list[str | Path] = ["--ts-config", self.config_file]
        self.switches = ["--ncs", "--disable-token-auth", "--enable-model-api"]
        self.args = list(args)
        hidden = ("TS_", "TEMP", "LOG_LOCATION", "METRICS_LOCATION")
        inherited = os.environ if inherit_env else {}
        self.env = {name: text for name, text in inherited.items() if not name.startswith(hidden)}
        self.env |= {"TMPDIR": str(folder / "tmp")} | {
            key: str(text) for key, text in (env or {}).items()
        }
        self.output_file = folder / "output.log"
        self.ready_file = folder / "ready.json"
        self.process: subprocess.Popen[bytes] | None = None
        # The certificate that its clients believe, where it speaks TLS.
        self.authority: Path | None = None
        self._sessions = threading.local()

    def speak_tls(self) -> "Server":
        """Gives it a key, and lets all its listeners speak TLS."""
        key, certificate = self.folder / "key.pem", self.folder / "cert.pem"
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-subj", "/CN=localhost", "-addext", names]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
        self.authority = certificate
        text = self.config_file.read_text().replace("=http://127.0.0.1:0", "=https://127.0.0.1:0")
        self.config_file.write_text(
            f"{text}private_key_file={key}\ncertificate_file={certificate}\n"
        )
        return self

    def command(self, *more: str | Path) -> list[str | Path]:
        """The command line that starts it, in the foreground unless `--foreground` is taken out."""
        paths = ["--model-store", self.store, *self.told_config, "--ready-file", self.ready_file]
        return [*self.prefix, SERVER, "--start", *self.switches, *paths, *self.args, *more]

    def start(self) -> "Server":
        """Starts it in the foreground and waits until it listens."""
        self.ready_file.unlink(missing_ok=True)
        with self.output_file.open("ab") as output:
            self.process = subprocess.Popen(
                self.command("--foreground"),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.wait_ready(lambda: self.process.poll() is None)
        return self

    def wait_ready(self, lives: Callable[[], bool] = lambda: True) -> None:
        """Waits until it has told its addresses."""

        def told() -> bool:
            assert lives(), f"the server ended at its start:\n{self.output}"
            return self.ready_file.exists()

        wait_until("the server listens", told)
        addresses = json.loads(self.ready_file.read_text())
        self.inference, self.management, self.metrics_api = (
            addresses["urls"][api] for api in ("inference", "management", "metrics")
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def output(self) -> str:
        """Everything that the server has written so far."""
        if not self.output_file.exists():
            return ""
        return self.output_file.read_text(encoding="utf-8", errors="backslashreplace")

    def wait_for_output(self, text: str) -> str:
        """Waits until a text was written, and returns all output."""
        return wait_until(
            f"the output holds {text!r}", lambda: (o := self.output) and text in o and o
        )

    @property
    def session(self) -> requests.Session:
        """A client of the calling thread."""
        if not hasattr(self._sessions, "session"):
            self._sessions.session = requests.Session()
            # Neither proxies nor credentials of the machine.
            self._sessions.session.trust_env = False
            self._sessions.session.verify = str(self.authority) if self.authority else True
        return self._sessions.session

    def infer(
        self, path: str, data: Any = None, method: str = "POST", **options: Any
    ) -> requests.Response:
        url = self.inference + path
        return self.session.request(method, url, data=data, timeout=LIMIT, **options)

    def predict(self, model: str, data: Any = None, **options: Any) -> requests.Response:
        return self.infer(f"/predictions/{model}", data, **options)

    def run(self, code: str, model: str = "scripted", **options: Any) -> requests.Response:
        """Lets the model run code that leaves its answers in `result`."""
        kind = {"content-type": "application/x-python"} | options.pop("headers", {})
        return self.predict(model, code.encode("utf-8", "surrogatepass"), headers=kind, **options)

    def manage(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.management + path, timeout=LIMIT, **options)

    def metrics(self) -> str:
        """The page of metrics, which is well-formed whichever test asks for it."""
        answer = self.session.get(f"{self.metrics_api}/metrics", timeout=LIMIT)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        page.read(answer.text)
        return answer.text

    def page(self) -> page.Page:
        """The same, read."""
        return page.read(self.metrics())

    def metric_lines(self, log: str) -> list[str]:
        """Lines of `TS_METRICS` or `MODEL_METRICS`, from its file if there is one."""
        file = self.folder / "logs" / f"{log.lower()}.log"
        text = file.read_text(encoding="utf-8") if file.exists() else self.output
        mark = " - " if file.exists() else f" {log} - "
        return [line.partition(mark)[2] for line in text.splitlines() if mark in line]

    def register(self, url: str | Path, **parameters: Any) -> requests.Response:
        parameters = {"url": url, "initial_workers": 1} | parameters
        return self.manage("POST", "/models", params=parameters)

    def serve(
        self, name: str, files: str | Mapping[str, str | bytes] = SCRIPTED, **options: Any
    ) -> None:
        """Writes a model and registers it where that must succeed; see `write_model`."""
        asked = {
            key: options.pop(key)
            for key in ("initial_workers", "response_timeout")
            if key in options
        }
        write_model(self.store, name, files, **options)
        answer = self.register(name, **asked)
        assert answer.status_code == 200, answer.text

    def serve_echo(self, name: str, config: str = "", **asked: Any) -> None:
        """Registers a model for the echo backend, which runs no Python."""
        write_model(self.store, name, {}, config=config, runtime="echo")
        answer = self.register(name, **asked)
        assert answer.status_code == 200, answer.text

    def describe(self, model: str, **parameters: Any) -> dict[str, Any]:
        answer = self.manage("GET", f"/models/{model}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()[0]

    def models(self) -> list[str]:
        return [entry["modelName"] for entry in self.manage("GET", "/models").json()["models"]]

    def worker_pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in self.describe(model)["workers"]]

    def wait_for_workers(self, model: str) -> None:
        def ready() -> bool:
            answer = self.manage("GET", f"/models/{model}")
            workers = answer.json()[0]["workers"] if answer.status_code == 200 else []
            return bool(workers) and all(worker["status"] == "READY" for worker in workers)

        wait_until(f"the workers of {model} are ready", ready)

    def raw(self, request: bytes, api: str = "inference") -> bytes:
        """Sends bytes as they are, and returns all that comes back until the server closes."""
        host, port = getattr(self, api).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def work_folders(self) -> list[str]:
        """Models that are unpacked now."""
        return sorted(str(path) for path in self.temp.glob("models-*/*"))

    def children(self) -> list[int]:
        """Processes that any of its threads has started and that still run."""
        return [pid for pid in started_by(self.pid) if is_running(pid)]

    def zygotes(self) -> list[int]:
        """The process that hosts are forked from, if there is one."""
        return [pid for pid in self.children() if process_name(pid) == "ts-zygote"]

    def hosts(self) -> list[int]:
        """Processes that models live in."""
        return [pid for pid in self.children() if process_name(pid) == "ts-host"]

    def kill(self) -> None:
        """Ends it without a chance to clean up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT)

    def stop(self) -> None:
        """Ends it in order, and checks that it leaves nothing behind."""
        if self.process is None or self.process.poll() is not None:
            return
        hosts = self.children()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert status == 0, self.output
        own = [path.name for path in self.temp.iterdir() if f"-{self.pid}-" in path.name]
        assert own == [], "its temporary files are its own to remove"
        assert not (Path(self.env["TMPDIR"]) / ".model_server.pid").exists()
        wait_until("the hosts are gone", lambda: not any(map(is_running, hosts)), 5)
