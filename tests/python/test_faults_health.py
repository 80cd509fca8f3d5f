"""Faults of health, shutdown and container life (kind K9), each by its entry."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import requests
from harness import (
    LIMIT,
    SCRIPTED,
    archive,
    can_run,
    is_running,
    wait_until,
    write_files,
    write_model,
)

# Loads when a file of the test's is there, and leaves one of its own.
LOADS = """
import os, time

class Loads:
    def initialize(self, context):
        while not os.path.exists({gate!r}):
            time.sleep(0.005)
        open(os.path.join({marks!r}, str(os.getpid())), "w").close()

    def handle(self, data, context):
        return ["loaded"] * len(data)
"""


def ready(server, model):
    """What every probe of a model says. They agree once they are asked at one moment."""

    def told():
        v1 = server.manage("GET", f"/v1/models/{model}")
        paths = (f"/v2/models/{model}/ready", f"/v2/models/{model}/versions/1.0/ready")
        ask = (server.infer, lambda path, method: server.manage(method, path))
        v2 = [of(path, method="GET") for of in ask for path in paths]
        assert all(answer.json()["ready"] == (answer.status_code == 200) for answer in v2)
        return {v1.json()["ready"], *(answer.status_code == 200 for answer in v2)}

    return wait_until("the probes agree", lambda: len(all_say := told()) == 1 and all_say) == {True}


def server_ready(server):
    return server.infer("/v2/health/ready", method="GET").status_code == 200


def pinged(server):
    return server.infer("/ping", method="GET").status_code


def test_a_server_lives_at_once_and_a_model_is_ready_when_it_is_loaded_hl_01_hl_03(start, tmp_path):
    server = start.make(["default_workers_per_model=2", "load_models=slow"])
    gate = tmp_path / "gate"
    source = LOADS.format(gate=str(gate), marks=str(tmp_path))
    write_model(server.store, "slow", source)
    server.start()
    for _ in range(20):
        # As in TorchServe, which counts workers that load: `/ping` tells a lost model from one that
        # may still come.
        assert pinged(server) == 200
        assert not ready(server, "slow"), "nothing is loaded"
        assert not server_ready(server)
        assert server.infer("/v2/health/live", method="GET").status_code == 200
        assert {w["status"] for w in server.describe("slow")["workers"]} == {"UNLOADING"}
    gate.touch()
    # Without a call of the model, and with nobody who would have to make one.
    wait_until("it is ready", lambda: ready(server, "slow"))
    wait_until("all its workers are there", lambda: server_ready(server))
    assert server.predict("slow", b"x").text == "loaded"


DAMAGED = {
    "short.mar": lambda good: good[: len(good) // 2],
    "empty.mar": lambda good: b"",
    "magic.mar": lambda good: b"\x00" * 200,
    "text.mar": lambda good: b"<html>not found</html>",
}


def test_damaged_archives_are_told_loudly_and_the_others_load_hl_02(start, tmp_path):
    server = start.make(["default_workers_per_model=1"])
    write_files(tmp_path, {"handler.py": SCRIPTED})
    flags = ("--version", "1.0", "--handler", tmp_path / "handler.py")
    archive(server.store, "--model-name", "good", *flags)
    good = (server.store / "good.mar").read_bytes()
    for name, damage in DAMAGED.items():
        (server.store / name).write_bytes(damage(good))
    server.args = ["--models", *DAMAGED, "good.mar"]
    server.start()
    server.wait_for_workers("good")
    for name in DAMAGED:
        line = next(line for line in server.output.splitlines() if f"load model: {name}" in line)
        assert re.search(r"\[(WARN|ERROR)", line), line
    assert server.models() == ["good"]
    assert not server_ready(server)
    missed = server.manage("GET", "/v2/health/ready").json()["models"]
    assert {one["name"] for one in missed} == {"short", "empty", "magic", "text"}
    assert {one["reason"] for one in missed} == {"not registered"}
    assert pinged(server) == 200, "as in TorchServe"
    assert server.run("result = ['x']", "good").text == "x"
    assert server.work_folders() and len(server.work_folders()) == 1


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_readiness_follows_the_workers_hl_03_hl_04(server, isolation):
    model = f"lost-{isolation}"
    server.serve(
        model,
        config=f"workerIsolation: {isolation}\nresponseTimeout: 1\nmaxRetryTimeoutInSec: 60\n",
        initial_workers=2,
    )
    assert ready(server, model) and server_ready(server)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        pids = set(server.worker_pids(model))
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            # Two calls, and a worker that stands still is no worker after its limit.
            for pid in pids:
                wait_until("it stands still", lambda p=pid: stat_of(p) == "T")
            calls = [
                threading.Thread(target=lambda: server.run("result = ['x']", model))
                for _ in range(2)
            ]
            for call in calls:
                call.start()
            wait_until("it is not ready", lambda: not ready(server, model), 10)
            assert not server_ready(server)
        else:
            calls = []
            wait_until("it is not ready", lambda: not server_ready(server), 1)
        # It comes back by itself.
        wait_until("it is ready again", lambda: ready(server, model))
        server.wait_for_workers(model)
        assert not any(map(is_running, pids))
        for call in calls:
            call.join(LIMIT)
        assert server.run("result = ['x']", model).text == "x"
        assert pinged(server) == 200
    server.manage("DELETE", f"/models/{model}")


def stat_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_no_worker_is_told_as_ready_that_has_not_loaded_hl_05(server, tmp_path):
    gate, marks = tmp_path / "gate", tmp_path / "marks"
    marks.mkdir()
    write_model(server.store, "told", LOADS.format(gate=str(gate), marks=str(marks)))
    wrong, over, looks = [], threading.Event(), [0]

    def look():
        with requests.Session() as session:
            session.trust_env = False
            while not over.is_set():
                answer = session.get(f"{server.management}/models/told", timeout=LIMIT)
                if answer.status_code != 200:
                    continue
                looks[0] += 1
                for worker in answer.json()[0]["workers"]:
                    if worker["status"] == "READY" and not (marks / str(worker["pid"])).exists():
                        wrong.append(worker)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert server.register("told", synchronous="false").status_code == 202
        wait_until("it is seen while it loads", lambda: looks[0] > 20)
        gate.touch()
        server.wait_for_workers("told")
        for workers in (3, 1, 0, 2):
            how = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
            assert server.manage("PUT", "/models/told", params=how).status_code == 200
            assert len(server.describe("told")["workers"]) == workers
            for pid in server.worker_pids("told")[:1]:
                os.kill(pid, signal.SIGKILL)
                wait_until("it is replaced", lambda p=pid: p not in server.worker_pids("told"))
                server.wait_for_workers("told")
    finally:
        over.set()
        watcher.join(LIMIT)
    assert wrong == []
    server.manage("DELETE", "/models/told")


class Callers:
    """Clients with kept and with new connections, that call until they are told not to."""

    def __init__(self, server, folder):
        self.server = server
        self.log = folder / "run"
        self.log.touch()
        self.over = threading.Event()
        self.heard = {}
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(8)]
        for one in self._threads:
            one.start()
        wait_until("calls are answered", lambda: len(self.heard) > 40)

    def _call(self, number):
        code = (
            "import time\nwith open({!r}, 'a') as log: log.write('{}\\n')\n"
            "time.sleep(0.05); result = ['done']"
        )
        with requests.Session() as session:
            session.trust_env = False
            headers = {"content-type": "application/x-python"}
            headers |= {"connection": "close"} if number % 2 else {}
            for call in itertools.count():
                if self.over.is_set():
                    return
                nonce = f"{number}-{call}"
                try:
                    url = f"{self.server.inference}/predictions/m"
                    body = code.format(str(self.log), nonce).encode()
                    answer = session.post(url, body, headers=headers, timeout=LIMIT)
                except requests.ConnectionError as error:
                    self.heard[nonce] = error
                    return
                self.heard[nonce] = answer.status_code

    def end(self):
        self.over.set()
        for one in self._threads:
            one.join(LIMIT)

    def run(self):
        """The calls that a handler has seen."""
        return set(self.log.read_text().split())


def test_a_signal_drops_no_call_that_was_taken_hl_06(start, tmp_path):
    server = start()
    server.serve("m", SCRIPTED, initial_workers=2)
    callers = Callers(server, tmp_path)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0
    assert time.monotonic() - began < 10
    callers.end()
    answered = {nonce for nonce, heard in callers.heard.items() if heard == 200}
    assert callers.run() == answered, "what was run was answered, and nothing else"
    # The rest was told so, or came when nobody listened any more.
    rest = [heard for nonce, heard in callers.heard.items() if nonce not in answered]
    assert all(heard == 503 or isinstance(heard, requests.ConnectionError) for heard in rest)


def test_with_a_grace_no_call_fails_at_all_hl_06(start, tmp_path):
    server = start(["shutdown_grace=3"])
    server.serve("m", SCRIPTED, initial_workers=2)
    callers = Callers(server, tmp_path)
    server.process.send_signal(signal.SIGTERM)
    wait_until("it is not ready", lambda: pinged(server) == 500, 2)
    assert not ready(server, "m") and not server_ready(server)
    # As a balancer that looks once a second.
    seen = len(callers.heard)
    wait_until("calls are answered in the grace", lambda: len(callers.heard) > seen + 20)
    callers.end()
    assert set(callers.heard.values()) == {200}
    assert callers.run() == set(callers.heard)
    assert server.process.wait(LIMIT) == 0


def test_a_second_signal_ends_the_grace_hl_06(start):
    server = start(["shutdown_grace=600"])
    server.serve("m", SCRIPTED)
    server.process.send_signal(signal.SIGTERM)
    wait_until("it is not ready", lambda: pinged(server) == 500)
    assert server.run("result = ['served']", "m").text == "served"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0


AS_NOBODY = ("setpriv", "--reuid=10001", "--regid=10002", "--clear-groups")


@pytest.mark.skipif(
    os.geteuid() != 0 or not can_run(*AS_NOBODY), reason="only root can become another user"
)
def test_any_user_with_a_read_only_store_can_serve_hl_09(start, tmp_path_factory):
    # Echo: the interpreter of the tests may lie where only their user can look.
    folder = tmp_path_factory.mktemp("foreign")
    for one in (folder, *folder.parents[:2]):
        one.chmod(0o755)
    temp = folder / "tmp"
    server = start.make(
        folder=folder,
        prefix=AS_NOBODY,
        env={"PATH": os.environ["PATH"]},
        inherit_env=False,
    )
    server.env.pop("HOME", None)
    server.ready_file = temp / "ready.json"
    temp.chmod(0o777)
    write_model(server.store, "m", {}, runtime="echo")
    server.start()
    for path in server.store.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    status = Path(f"/proc/{server.pid}/status").read_text()
    assert "Uid:\t10001" in status and "Gid:\t10002" in status
    assert server.register("m").status_code == 200
    assert server.predict("m", b"x").text == "x"
    assert not [path for path in folder.iterdir() if path.stat().st_uid == 10001]
    server.stop()

    # What cannot be written is named, with what to do about it.
    def refusal(command):
        done = subprocess.run(
            command, cwd=folder, env=server.env, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 1
        return done.stdout + done.stderr

    usual = server.command("--foreground")
    assert "--disable-token-auth" in refusal([o for o in usual if o != "--disable-token-auth"])
    server.env["TEMP"] = str(server.store)
    assert re.search(rf"unpacked in `{server.store}`.*`TEMP`", refusal(usual))
    temp.chmod(0o755)
    assert re.search(rf"`TMPDIR`.*{temp}/.model_server.pid", refusal(usual))


# Nothing can be written to but the folder of temporary files.
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'


def read_only_but_for(folder):
    return ("unshare", "--mount", "sh", "-c", READ_ONLY, folder)


@pytest.mark.skipif(
    not can_run(*read_only_but_for("/tmp"), *AS_NOBODY),
    reason="file systems cannot be mounted here",
)
def test_a_read_only_root_will_do_hl_09(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("read-only")
    for one in (folder, *folder.parents[:2]):
        one.chmod(0o755)
    temp = folder / "tmp"
    server = start.make(
        folder=folder,
        prefix=(*read_only_but_for(temp), *AS_NOBODY),
        env={"PATH": os.environ["PATH"]},
        inherit_env=False,
    )
    server.switches.remove("--ncs")
    server.env.pop("HOME", None)
    server.ready_file = temp / "ready.json"
    temp.chmod(0o777)
    write_model(server.store, "m", {}, runtime="echo")
    server.start()
    assert server.register("m", initial_workers=2).status_code == 200
    # A large body goes through shared memory.
    body = os.urandom(300_000)
    assert server.predict("m", body).content == body
    assert server.infer("/v2/health/ready", method="GET").status_code == 200
    assert server.output.count("no snapshot can be written") == 1
    assert not [path for path in folder.iterdir() if path.stat().st_uid == 10001]
    server.stop()
    assert server.process.returncode == 0


ONE_CORE = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))


@pytest.mark.skipif(not can_run(*ONE_CORE), reason="there is no taskset here")
def test_there_is_a_worker_for_each_core_that_may_be_used_hl_11(start):
    server = start.make(["load_models=m"], prefix=ONE_CORE)
    write_model(server.store, "m", SCRIPTED)
    server.start()
    server.wait_for_workers("m")
    description = server.describe("m")
    assert (len(description["workers"]), description["minWorkers"]) == (1, 1)
    threads = json.loads(
        server.run("import os; result = [os.environ['OMP_NUM_THREADS']]", "m").text
    )
    assert threads == 1
