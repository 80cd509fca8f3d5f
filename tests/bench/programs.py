"""The programs that are measured, as child processes, and what the kernel knows of them."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
PYTHON = ROOT / ".venv/bin/python"
EXAMPLE = ROOT / "examples/image_classifier"
CORES = len(os.sched_getaffinity(0))
START_LIMIT_S = 60
# Under load before the seconds that are counted.
WARM_UP_S = 0.25


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the project's interpreter in front."""
    found = {
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "PATH": f"{PYTHON.parent}:{os.environ.get('PATH', '')}",
    }
    return {**os.environ, **found, **more}


def benchmark(name: str) -> dict:
    """What one of the Rust benchmarks prints, all of which are built with the same features."""
    command = ["cargo", "bench", "--quiet", "--locked"]
    command += ["--features", "ts-server/bench,ts-serving/bench", "--bench", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


class Program:
    """A child process. Ends with the `with` block."""

    def __init__(self, command: list[object], **popen: object) -> None:
        self.process = subprocess.Popen([str(part) for part in command], **popen)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def family(self) -> list[int]:
        """Its process id and those of all it started."""
        found = [self.process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time used so far: by the process itself, and by all it started."""
        pid, *started = self.family()
        return cpu_seconds(pid), sum(map(cpu_seconds, started))


class Echo(Program):
    """The bare echo server."""

    def __init__(self) -> None:
        command = [BINARIES / "ts-bench", "echo", "--threads", CORES]
        super().__init__(command, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}/"


class Server(Program):
    """The server with an empty store in a folder of its own."""

    def __init__(self, folder: Path, config: list[str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for needed in ("store", "tmp"):
            (folder / needed).mkdir(parents=True)
        self.store = folder / "store"
        inference, management, metrics = free_ports(3)
        lines = [
            f"inference_address=http://127.0.0.1:{inference}",
            f"management_address=http://127.0.0.1:{management}",
            f"metrics_address=http://127.0.0.1:{metrics}",
            f"number_of_netty_threads={CORES}",
            *config,
        ]
        (folder / "config.properties").write_text("\n".join(lines))
        self.inference = f"http://127.0.0.1:{inference}"
        self.management = f"http://127.0.0.1:{management}"
        self.log = folder / "server.log"
        command = [BINARIES / "torchserve", "--start", "--foreground", "--ncs"]
        command += ["--model-store", self.store, "--ts-config", folder / "config.properties"]
        command += ["--disable-token-auth", "--enable-model-api"]
        self.started = time.monotonic()
        with self.log.open("w") as log:
            super().__init__(
                command,
                cwd=folder,
                env=environment(TMPDIR=str(folder / "tmp")),
                stdout=log,
                stderr=log,
            )
        self.answered_ms = self.first_ping()

    def first_ping(self) -> float:
        """Milliseconds from the start of the process to its first healthy answer."""
        while time.monotonic() < self.started + START_LIMIT_S:
            try:
                answer(f"{self.inference}/ping")
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.001)
            else:
                return (time.monotonic() - self.started) * 1000
        raise SystemExit(f"the server did not start:\n{self.log.read_text()}")

    def register(self, archive: str, model: str) -> float:
        """Registers an archive of the store; seconds until its workers are ready."""
        began = time.monotonic()
        answer(f"{self.management}/models?url={archive}&synchronous=true", method="POST")
        took = time.monotonic() - began
        states = [worker["status"] for worker in self.describe(model)["workers"]]
        if not states or set(states) != {"READY"}:
            raise SystemExit(f"workers of {model} are {states}:\n{self.log.read_text()[-4000:]}")
        return took

    def describe(self, model: str) -> dict:
        """What the management API says about a model."""
        return json.loads(answer(f"{self.management}/models/{model}"))[0]

    def batching(self, model: str) -> dict:
        """What the management API says about how a model's batches came about."""
        return json.loads(answer(f"{self.management}/models/{model}/batching"))

    def hosts(self, model: str) -> set[int]:
        """Processes that a model's workers live in."""
        return {worker["pid"] for worker in self.describe(model)["workers"]}


class PlainLoop:
    """`plain_loop.py`, in one process of several threads or in several of one."""

    def __init__(self, model: Path, photo: Path, processes: int, threads: int) -> None:
        env = environment(
            PYTHONPATH=f"{EXAMPLE}:{ROOT / 'handlers'}", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
        )
        command = [PYTHON, ROOT / "tests/bench/plain_loop.py", model, photo, threads]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self.programs = [Program(command, **pipes) for _ in range(processes)]
        for program in self.programs:
            if program.process.stdout.readline() != "ready\n":
                raise SystemExit("the plain loop did not start")

    def __enter__(self) -> "PlainLoop":
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.__exit__()

    def run(self, seconds: float) -> dict[str, float]:
        """Photos per second over so many seconds, and processor time of each."""
        began, used_before = time.monotonic(), self.cpu_seconds()
        for program in self.programs:
            program.process.stdin.write(f"{seconds}\n")
            program.process.stdin.flush()
        count = sum(int(program.process.stdout.readline()) for program in self.programs)
        used = self.cpu_seconds() - used_before
        took = time.monotonic() - began
        return {"per_second": count / took, "models_us": used / count * 1e6}

    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        return sum(sum(program.cpu_seconds()) for program in self.programs)


def load(url: str, connections: int, seconds: float, *more: object) -> dict:
    """Loads a server and returns what `ts-bench load` counted."""
    command = [BINARIES / "ts-bench", "load", "--json", "--url", url]
    command += ["--connections", connections, "--seconds", seconds, "--warm-up", WARM_UP_S, *more]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise SystemExit(f"loading {url} failed")
    return json.loads(done.stdout)


def answer(url: str, method: str = "GET") -> str:
    """The body of a reply; an HTTP error ends the run with what it said."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=START_LIMIT_S) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{method} {url}: {error}: {error.read().decode()}") from None


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [open_socket.getsockname()[1] for open_socket in sockets]
    for open_socket in sockets:
        open_socket.close()
    return ports


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> dict[str, float]:
    """What a process has in memory: `rss` all of it, `pss` with shared pages divided."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {
        name: int(rest.split()[0]) / 1000 * 1.024
        for name, _, rest in (line.partition(":") for line in rollup.splitlines()[1:])
    }
    return {"rss": sizes["Rss"], "pss": sizes["Pss"]}
