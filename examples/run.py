#!/usr/bin/env python3
"""Makes, packs, serves and asks examples; fails unless the answers are right.

    examples/run.py NAME... | all

How an example is made and packed are the commands of the first block in its README. They run in a
copy of its folder, `build/examples/NAME`. Then one server starts with all the archives, on a free
port and with tokens, and the `ask.py` of each example asks it.
"""

import argparse
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build/examples"
BINARIES = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"
VENV = ROOT / ".venv"
NAMES = sorted(path.parent.name for path in HERE.glob("*/ask.py"))
LOG = BUILD / "server.log"
READY_WITHIN_S = 120

# Of the server and of its clients.
ENVIRONMENT = os.environ | {
    "VIRTUAL_ENV": str(VENV),
    "PATH": os.pathsep.join(map(str, (VENV / "bin", BINARIES, os.environ["PATH"]))),
    "NO_PROXY": "127.0.0.1",
    # Nothing here needs a hub, and nothing may come to need one unnoticed.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# What is trained here is too small to be shared between cores: threads would wait for each other,
# and on a busy machine for their turn as well.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def pack(name: str) -> None:
    """Makes an example's model and its archives."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    commands = readme.partition("```bash\n")[2].partition("```")[0]
    environment = ENVIRONMENT | ONE_THREAD
    subprocess.run(["bash", "-euc", commands], cwd=folder, env=environment, check=True)


@contextmanager
def serving(names: Iterable[str], isolation: str = "process") -> Iterator[Mapping[str, str]]:
    """Serves the archives of examples; gives the environment in which they can be asked.

    What the server says goes to `LOG`. Raises if it does not come up, or does not end in order.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="server-", dir=BUILD) as place, free_port() as port:
        folder = Path(place)
        store = folder / "model_store"
        store.mkdir()
        for archive in (path for name in names for path in (BUILD / name).glob("*.mar")):
            os.link(archive, store / archive.name)
        config = folder / "config.properties"
        config.write_text(
            f"""inference_address=http://127.0.0.1:{port}
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
model_store={store}
load_models=all
default_workers_per_model=1
worker_isolation={isolation}
exit_on_model_failure=true
metrics_mode=prometheus
"""
        )
        environment = ENVIRONMENT | {
            # Its pid file lies there, which keeps it and any other server apart.
            "TMPDIR": str(folder),
            "SERVER": f"http://127.0.0.1:{port}",
            "TS_INFERENCE_TOKEN": secrets.token_hex(16),
            "TS_MANAGEMENT_TOKEN": secrets.token_hex(16),
        }
        command = [BINARIES / "torchserve", "--start", "--foreground", "--ncs"]
        with LOG.open("wb") as output:
            server = subprocess.Popen(
                [*command, "--ts-config", config],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_ready(server, environment["SERVER"])
            yield environment
        finally:
            server.terminate()
            status = server.wait(60)
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}")


@contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody listens on, and that the system gives to nobody who asks for any."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def wait_until_ready(server: "subprocess.Popen[bytes]", address: str) -> None:
    """Waits until the server has all its workers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode} at its start")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready within {READY_WITHIN_S} s")
        try:
            with direct.open(f"{address}/v2/health/ready", timeout=5):
                return
        except OSError:  # not listening yet, or not ready
            time.sleep(0.2)


def ask(name: str, environment: Mapping[str, str]) -> str:
    """Lets an example ask its server; what it prints. Raises if it finds an answer wrong."""
    done = subprocess.run(
        ["python", "ask.py"],
        cwd=BUILD / name,
        env=dict(environment) | ONE_THREAD,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Make, pack, serve and ask examples.")
    parser.add_argument("names", nargs="+", metavar="NAME", choices=["all", *NAMES])
    parser.add_argument("--isolation", choices=["process", "thread"], default="process")
    asked = parser.parse_args()
    for needed in (VENV / "bin/python", BINARIES / "torchserve", BINARIES / "libts_plugin.so"):
        if not needed.exists():
            sys.exit(f"{needed} is missing. `make examples` makes it")
    names = NAMES if "all" in asked.names else asked.names
    LOG.unlink(missing_ok=True)
    try:
        for name in names:
            print(f"== {name}: make and pack", flush=True)
            pack(name)
        with serving(names, asked.isolation) as environment:
            for name in names:
                print(f"\n== {name}: ask", flush=True)
                print(ask(name, environment), end="")
    except (RuntimeError, subprocess.SubprocessError) as failed:
        if LOG.exists():
            lines = LOG.read_text(errors="replace").splitlines()
            print(f"-- the last lines of {LOG}:", *lines[-40:], sep="\n", file=sys.stderr)
        sys.exit(f"failed: {failed}")
    print(f"\n== as expected: {', '.join(names)}")


if __name__ == "__main__":
    main()
