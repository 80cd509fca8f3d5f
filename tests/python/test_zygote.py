"""Hosts forked from the zygote: they behave as executed ones, and nothing depends on it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import (
    LIMIT,
    SCRIPTED,
    Server,
    at_once,
    is_running,
    process_name,
    wait_until,
    write_model,
)

# Names torch, so that the zygote imports it.
WITH_TORCH = "import torch\n" + SCRIPTED
WITH_NUMPY = "import numpy\n" + SCRIPTED


def zygote(server):
    [pid] = server.zygotes()
    return pid


def stat(pid):
    """State, parent and group of a process."""
    state, parent, group, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent), int(group)


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def scale(server, model, workers):
    answer = server.manage(
        "PUT",
        f"/models/{model}?min_worker={workers}&max_worker={workers}&synchronous=true",
    )
    assert answer.status_code == 200, answer.text
    return server.worker_pids(model)


def of_each(server, model, code, workers):
    """What code answers in each worker, by its process."""
    found = {}
    busy = "import os, time; time.sleep(0.05)\n" + code

    def all_have_answered():
        answers = at_once([lambda: server.run(busy, model)] * (2 * workers))
        found.update({answer.json()[0]: answer.json()[1] for answer in answers})
        return len(found) == workers

    wait_until("each worker has answered", all_have_answered)
    return found


# Whatever could tell a forked host from one of its own making.
PORTRAIT = """
import faulthandler, json, os, resource, signal, socket, sys, threading, torch
def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except FileNotFoundError:
        return "the listing itself"
status = open("/proc/self/status").read().splitlines()
signals = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs"))]
native = open("/proc/self/comm").read().strip()
result = [json.dumps({
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "descriptors": sorted(target(fd) for fd in os.listdir("/proc/self/fd")),
    "stdin": os.readlink("/proc/self/fd/0"),
    "signals": signals,
    "leads its group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getsid(os.getppid()),
    "parent": open(f"/proc/{os.getppid()}/comm").read(),
    "name": native,
    "command": open("/proc/self/cmdline").read().split(chr(0))[1:],
    "path": sys.path,
    "executable": sys.executable,
    "arguments": sys.argv,
    "prefix": sys.prefix,
    "encoding": [sys.stdout.encoding, sys.stdout.line_buffering],
    "faulthandler": faulthandler.is_enabled(),
    "main thread": [threading.main_thread().is_alive(), threading.active_count()],
    "threads": len(os.listdir("/proc/self/task")),
    "torch threads": torch.get_num_threads(),
    "umask": [os.umask(0o22), os.umask(0o22)],
    "nice": os.nice(0),
    "cores": sorted(os.sched_getaffinity(0)),
    "limits": [resource.getrlimit(limit) for limit in range(16)],
})]
"""


def test_a_forked_host_is_what_an_executed_one_is(start):
    portraits = []
    for setting in ("true", "false"):
        server = start(
            [f"zygote={setting}", "blacklist_env_vars=SECRET.*"], env={"SECRET_ONE": "1"}
        )
        server.serve("scripted", WITH_TORCH)
        answer = server.run(PORTRAIT)
        assert answer.status_code == 200, answer.text
        assert len(server.zygotes()) == (setting == "true")
        portraits.append(json.loads(answer.text.replace(str(server.folder), "FOLDER")))
    assert portraits[0] == portraits[1]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_hosts_come_from_the_zygote_and_belong_to_the_server(start, isolation):
    server = start([f"worker_isolation={isolation}"])
    server.serve("scripted", SCRIPTED, initial_workers=2)
    source = zygote(server)
    for pid in set(server.worker_pids("scripted")):
        _, parent, group = stat(pid)
        assert (process_name(pid), parent, group) == ("ts-host", server.pid, pid)
        # It has the code and data of its source, which no program started on its own would.
        maps = [Path(f"/proc/{of}/maps").read_text().split()[0] for of in (pid, source)]
        assert maps[0] == maps[1]


def test_the_words_of_each_host_stand_in_the_log_under_its_name(start):
    server = start()
    server.serve("scripted", SCRIPTED, initial_workers=2)
    code = (
        "import sys; print('to out', os.getpid()); print('to err', os.getpid(), file=sys.stderr)\n"
        "os.system('echo from a child'); result = [json.dumps([os.getpid(), 0])]"
    )
    pids = of_each(server, "scripted", "import json\n" + code, 2)
    workers = {worker["pid"]: worker["id"] for worker in server.describe("scripted")["workers"]}
    for pid in pids:
        for stream, text in (("stdout", f"to out {pid}"), ("stderr", f"to err {pid}")):
            output = server.wait_for_output(text)
            [line, *_] = [line for line in output.splitlines() if text in line]
            assert f"W-{workers[pid]}-scripted_1.0" in line
            assert stream in line
    server.wait_for_output("from a child")


def test_workers_draw_different_random_numbers(start):
    server = start()
    server.serve("m", WITH_NUMPY, initial_workers=3)
    code = (
        "import json, random, tempfile, uuid, numpy\n"
        "drawn = [numpy.random.rand(), random.random(), str(uuid.uuid4()), tempfile.mktemp()]\n"
        "result = [json.dumps([os.getpid(), drawn])]"
    )
    drawn = of_each(server, "m", code, 3).values()
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3, numbers


FORWARD = """
import json, numpy, torch
layer = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3))
torch.set_num_threads(4)
with torch.no_grad():
    shapes = [list(layer(torch.ones(8, 3, 96, 96)).shape) for _ in range(3)]
total = (torch.ones(700, 700) @ torch.ones(700, 700)).sum().item()
loss = layer(torch.ones(1, 3, 32, 32)).sum()
loss.backward()
blas = float((numpy.ones((700, 700)) @ numpy.ones((700, 700))).sum())
threads = len(os.listdir("/proc/self/task"))
result = [json.dumps([os.getpid(), [shapes[2], total, blas, threads > 4]])]
"""


def test_forked_workers_compute_with_many_threads(start):
    # With two cores for each worker, so that BLAS has threads as well.
    server = start()
    server.serve("m", "import numpy\n" + WITH_TORCH, initial_workers=2)
    for answer in of_each(server, "m", FORWARD, 2).values():
        assert answer == [[8, 8, 92, 92], 700.0**3, 700.0**3, True]


def test_what_handlers_start_works_and_leaves_no_zombie_wk_04(start):
    server = start()
    server.serve("scripted")
    code = (
        "import subprocess, sys\n"
        "text = subprocess.check_output([sys.executable, '-c', 'print(40 + 2)'])\n"
        # Ends long after its parent, in a group of its own.
        "subprocess.run(['setsid', '-f', 'sh', '-c', 'sleep 0.3; echo orphan ends'])\n"
        "result = [text]"
    )
    assert server.run(code).text == "42\n"
    server.wait_for_output("orphan ends")

    def children():
        lists = Path(f"/proc/{server.pid}/task").glob("*/children")
        return {int(pid) for children in lists for pid in children.read_text().split()}

    known = {zygote(server), *server.worker_pids("scripted")}
    wait_until("the orphan is reaped", lambda: children() == known, 5)


def test_the_server_goes_on_without_its_zygote(start):
    server = start()
    server.serve("scripted")
    first = zygote(server)
    host = server.worker_pids("scripted")
    os.kill(first, signal.SIGKILL)
    wait_until("the zygote is gone", lambda: not is_running(first))
    assert server.run("result = ['still']").text == "still"
    assert server.worker_pids("scripted") == host
    # The first loss is made good at once; after the next there is a pause.
    assert len(scale(server, "scripted", 2)) == 2
    second = zygote(server)
    assert second != first
    assert "the zygote is lost: it was killed by signal 9" in server.output
    os.kill(second, signal.SIGKILL)
    wait_until("it is gone, too", lambda: not is_running(second))
    assert len(scale(server, "scripted", 4)) == 4


def test_a_stopped_zygote_holds_nothing_up(start):
    server = start(["default_startup_timeout=4"])
    server.serve("scripted")
    pid = zygote(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        before = time.monotonic()
        assert len(scale(server, "scripted", 2)) == 2
        assert time.monotonic() - before < 12
        assert server.run("result = ['served']").text == "served"
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGCONT)


def test_all_ends_with_a_killed_server(start):
    server = start()
    server.serve("scripted", WITH_TORCH, initial_workers=2)
    processes = server.children()
    assert len(processes) == 3
    server.kill()
    wait_until("all are gone", lambda: not any(map(is_running, processes)), 5)


def test_thirty_killed_workers_leave_nothing_wk_04_rs_14(start):
    server = start()
    server.serve("scripted", SCRIPTED, initial_workers=6)

    def kill_all():
        old = set(server.worker_pids("scripted"))
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        def replaced():
            workers = server.describe("scripted")["workers"]
            return all(
                worker["status"] == "READY" and worker["pid"] not in old for worker in workers
            )

        wait_until("all are replaced", replaced)

    def descriptors(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    kill_all()
    processes = server.pid, zygote(server)
    before = [descriptors(pid) for pid in processes]
    memory = [resident(pid) for pid in processes]
    for _ in range(5):
        kill_all()
    wait_until(
        "descriptors are given back", lambda: [descriptors(pid) for pid in processes] <= before, 5
    )
    assert zygote(server) == processes[1], "it forked all of them"
    grown = [resident(pid) - old for pid, old in zip(processes, memory, strict=True)]
    assert max(grown) < 4 << 20, "memory grows with each host"
    states = [stat(pid)[0] for pid in {zygote(server), *server.worker_pids("scripted")}]
    assert "Z" not in states
    assert len(server.children()) == 7


def test_only_what_models_name_is_imported(start):
    server = start()
    server.serve("scripted")
    loaded = "import json, sys; result = [json.dumps(['torch' in sys.modules])]"
    assert server.run(loaded).json() == [False]
    server.serve("m", WITH_TORCH)
    assert "the zygote has imported torch " in server.output
    # A model that does not name it gets it along, and does no worse for it.
    server.serve("other", SCRIPTED)
    assert server.run(loaded, "other").json() == [True]


@pytest.mark.parametrize("zygote_has_it", [True, False])
def test_a_module_of_the_model_comes_before_one_imported_ahead(start, zygote_has_it):
    server = start()
    if zygote_has_it:
        # With torch come `timeit` and `torchgen`, among many others.
        server.serve("first", WITH_TORCH)
    files = {
        "handler.py": SCRIPTED,
        "timeit.py": "WHO = 'the model'\n",
        "torchgen/__init__.py": "WHO = 'the model, too'\n",
    }
    server.serve("m", files)
    code = "import json, timeit, torchgen; result = [json.dumps([timeit.WHO, torchgen.WHO])]"
    assert server.run(code, "m").json() == ["the model", "the model, too"]
    told = "the zygote has imported another" in server.output
    assert told == zygote_has_it


THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("source", "warning", "workers_forked"),
    [
        (THREADED, "importing `ahead` has started 1 threads", False),
        ("raise ValueError('no')\n", "cannot import ahead: ValueError: no", True),
        ("import sys\nsys.exit(3)\n", "cannot import ahead: SystemExit: 3", True),
    ],
)
def test_a_module_that_cannot_be_imported_ahead_is_told_once(
    start, tmp_path, source, warning, workers_forked
):
    (tmp_path / "ahead.py").write_text(source)
    server = start(["preload_modules=ahead,not_installed"], env={"PYTHONPATH": tmp_path})
    handler = "def late():\n    import ahead, not_installed\n" + SCRIPTED
    server.serve("scripted", handler, initial_workers=2)
    server.serve("other", handler)
    for model in ("scripted", "other"):
        assert server.run("result = ['served']", model).text == "served"
    warnings = [line for line in server.output.splitlines() if "ts_serving::pool::zygote" in line]
    assert [warning in line for line in warnings].count(True) == 1
    assert "cannot import not_installed" not in server.output
    assert len(server.zygotes()) == int(workers_forked)


def test_the_setting_switches_it_off(start):
    server = start(["zygote=false"])
    server.serve("scripted", SCRIPTED, initial_workers=2)
    assert sorted(server.children()) == sorted(server.worker_pids("scripted"))


def test_a_model_without_python_starts_none(start):
    server = start()
    write_model(server.store, "m", {}, handler="echo")
    assert server.register("m", runtime="echo").status_code == 200
    assert server.predict("m", b"x").content == b"x"
    assert server.zygotes() == []


# Process 1 of a container gets every orphan there is.
IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
may_unshare = subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode == 0


class Container(Server):
    """A server that is process 1; what runs out here is the program that has made it so."""

    def command(self, *more):
        return [*IN_A_CONTAINER, *super().command(*more)]

    def stop(self):
        if self.process.poll() is None:
            for pid in self.children():
                os.kill(pid, signal.SIGTERM)
            assert self.process.wait(LIMIT) == 0, self.output


ZOMBIES = """
import glob
stats = [open(path).read().rpartition(")")[2].split() for path in glob.glob("/proc/[0-9]*/stat")]
result = [str([stat for stat in stats if stat[0] == "Z"])]
"""


@pytest.mark.skipif(not may_unshare, reason="takes the right to make a namespace of processes")
def test_it_works_as_process_1_wk_04(start, monkeypatch):
    monkeypatch.setattr("conftest.Server", Container)
    server = start()
    server.serve("scripted", SCRIPTED, initial_workers=2)
    code = (
        "import json, os, subprocess\n"
        "subprocess.run(['setsid', '-f', 'sh', '-c', 'sleep 0.1; echo orphan ends'])\n"
        "result = [json.dumps(os.getppid())]"
    )
    assert server.run(code).json() == 1
    server.wait_for_output("orphan ends")
    for _ in range(3):
        assert server.run("import os; os.kill(os.getpid(), 9)").status_code == 507
    server.wait_for_workers("scripted")
    wait_until("no zombie is left", lambda: server.run(ZOMBIES).text == "[]", 5)
    # Its pid file names process 1, which the next one is, too.
    server.kill()
    again = start(folder=server.folder)
    assert again.models() == []
