"""Faults of worker supervision (kind K4), each by its entry: deaths, limits, scaling."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import (
    LIMIT,
    at_once,
    can_run,
    descriptors,
    is_running,
    started_by,
    wait_until,
    write_model,
)

HANG = "import time; time.sleep(600)"


def generations(server, model):
    return [worker["generation"] for worker in server.describe(model)["workers"]]


def states(server):
    """State letter of each process that the server has started and not reaped."""
    found = {}
    for pid in started_by(server.pid):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        found[pid] = stat.rpartition(")")[2].split()[0]
    return found


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_slow_calls_do_not_start_a_loop_of_restarts_wk_01(server, isolation):
    model = f"slow-{isolation}"
    server.serve(model, config=f"workerIsolation: {isolation}\n", response_timeout=1)
    slow = [lambda: server.run(HANG, model)] * 3
    assert [answer.status_code for answer in at_once(slow)] == [500] * 3
    assert server.run("result = ['quick']", model).text == "quick"

    [pid] = server.worker_pids(model)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(server.run, f"print('{model} runs', flush=True); {HANG}", model)
        server.wait_for_output(f"{model} runs")
        os.kill(pid, signal.SIGKILL)
        assert call.result().status_code == 507
    assert server.run("result = ['quick']", model).text == "quick"

    before = generations(server, model)
    assert before == [5], "one restart for each call that was ended"
    for _ in range(20):
        assert server.run("result = ['quick']", model).text == "quick"
    [pid] = server.worker_pids(model)
    assert generations(server, model) == before and is_running(pid)
    server.manage("DELETE", f"/models/{model}")


def test_a_worker_that_never_loads_is_given_up_when_its_window_is_over_wk_02(server):
    source = "raise OSError('the weights are on another disk')\n"
    write_model(server.store, "never", source, config="maxRetryTimeoutInSec: 2\n")
    assert server.register("never", synchronous="false").status_code == 202
    tried = "the weights are on another disk"
    server.wait_for_output("the worker is not started again")
    [worker] = server.describe("never")["workers"]
    assert (worker["status"], tried in worker["lastFailure"]) == ("UNLOADING", True)
    # Tried within the window and not after it: nothing of it starts any more.
    attempts = worker["generation"]
    refused = server.predict("never", b"x")
    assert (refused.status_code, refused.headers["x-refusal-reason"]) == (503, "quarantined")
    assert server.infer("/ping", method="GET").status_code == 500
    assert generations(server, "never") == [attempts]
    server.manage("DELETE", "/models/never")
    assert server.infer("/ping", method="GET").status_code == 200


def test_thirty_deaths_leave_no_defunct_process_wk_04(server):
    server.serve_echo("mortal", "workerIsolation: process\n", initial_workers=6)

    def die():
        before = server.worker_pids("mortal")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until("they are gone", lambda: not any(map(is_running, before)))
        wait_until(
            "others serve",
            lambda: len(set(server.worker_pids("mortal")) - {None} - set(before)) == 6,
        )
        server.wait_for_workers("mortal")

    die()
    base = descriptors(server.pid)
    for _ in range(4):
        die()
    wait_until("all are reaped", lambda: "Z" not in states(server).values(), 1)
    wait_until("descriptors are given back", lambda: descriptors(server.pid) <= base + 4, 5)
    server.manage("DELETE", "/models/mortal")


@pytest.mark.parametrize("zygote", ["true", "false"])
def test_what_a_handler_has_started_ends_with_its_worker(start, zygote):
    server = start([f"zygote={zygote}"])
    server.serve("scripted")
    # In a group of its own, and with a child that is, too.
    child = "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)"
    answer = server.run(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "while not (below := open(f'/proc/{child.pid}/task/{child.pid}/children').read()):\n"
        "    time.sleep(0.01)\n"
        "result = [f'{child.pid} {below}']",
        "scripted",
    )
    started = [int(pid) for pid in answer.text.split()]
    assert len(started) == 2 and all(is_running(pid) for pid in started)
    how = {"min_worker": 0, "max_worker": 0, "synchronous": "true"}
    assert server.manage("PUT", "/models/scripted", params=how).status_code == 200
    wait_until("all of it has ended", lambda: not any(is_running(pid) for pid in started), 5)


INIT = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
# Its father ends at once, so that whoever is process 1 has to reap it.
ORPHAN = """
import os, subprocess, sys
code = (
    "import os, time\\n"
    "if os.fork() == 0:\\n"
    "    os.setsid()\\n"
    "    while not os.path.exists({!r}): time.sleep(0.01)"
)
subprocess.run([sys.executable or "python3", "-c", code], check=True)
result = ["left behind"]
"""


needs_namespaces = pytest.mark.skipif(
    not can_run(*INIT), reason="this machine does not permit namespaces"
)


def number_inside(pid):
    """The number that a process has in its own container."""
    return (
        Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1]
    )


@needs_namespaces
def test_as_process_1_of_a_container_it_reaps_and_stops_wk_04(start, tmp_path):
    server = start(prefix=INIT)
    [first] = server.children()
    assert number_inside(first) == "1"
    server.serve("mortal")

    def processes(father=first):
        """What runs in the container or has ended there and was not reaped."""
        own = set(started_by(father))
        return own.union(*(processes(pid) for pid in own))

    for _ in range(3):
        assert server.run("import os; os._exit(1)", "mortal").status_code == 500
    server.wait_for_workers("mortal")
    usual = wait_until("server and host are left", lambda: len(p := processes()) == 2 and p)
    gate = tmp_path / "gate"
    for _ in range(3):
        assert server.run(ORPHAN.replace("{!r}", repr(str(gate))), "mortal").text == "left behind"
    wait_until("the orphans are children of process 1", lambda: len(processes() - usual) == 3)
    gate.touch()
    wait_until("the orphans have ended and are reaped", lambda: processes() == usual, 5)
    os.kill(first, signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0


@needs_namespaces
def test_a_container_that_was_killed_starts_again_wk_09(start):
    server = start(prefix=INIT)
    pid_file = Path(server.env["TMPDIR"]) / ".model_server.pid"
    for left in (pid_file.read_text(), "1"):
        server.kill()
        pid_file.write_text(left)
        server = start(folder=server.folder, prefix=INIT)
        assert server.infer("/ping", method="GET").status_code == 200
    os.kill(server.children()[0], signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_scaling_down_lets_running_calls_finish_wk_05(server, isolation):
    model = f"shrinks-{isolation}"
    server.serve(model, config=f"workerIsolation: {isolation}\n", initial_workers=2)
    code = f"import time; print('{model} runs', flush=True); time.sleep(0.4); result = ['done']"
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(at_once, [lambda: server.run(code, model)] * 7)
        wait_until("two run", lambda: server.output.count(f"{model} runs") >= 2)
        wait_until(
            "five wait", lambda: server.describe(model)["jobQueueStatus"]["pendingRequests"] == 5
        )
        # Down to one: all seven are answered by it.
        how = {"min_worker": 1, "max_worker": 1, "synchronous": "true"}
        assert server.manage("PUT", f"/models/{model}", params=how).status_code == 200
        answers = [answer.status_code for answer in calls.result()]
    assert answers == [200] * 7
    server.manage("DELETE", f"/models/{model}")


def test_without_workers_a_model_says_what_to_do_and_comes_back_wk_06(server):
    server.serve("sleeps")
    [pid] = server.worker_pids("sleeps")

    def scale(workers):
        how = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
        return server.manage("PUT", "/models/sleeps", params=how).status_code

    assert scale(0) == 200
    wait_until("its process is gone", lambda: not is_running(pid), 5)
    answer = server.run("result = ['x']", "sleeps")
    assert answer.status_code == 503
    assert "Please use scale workers API to add workers" in answer.json()["message"]
    assert scale(1) == 200
    assert server.run("result = ['x']", "sleeps").text == "x"
    server.manage("DELETE", "/models/sleeps")


# Every descriptor of the host but its output, the sockets to the server among them.
CLOSES = "import os; os.closerange(3, 4096)"


def test_a_load_that_closes_the_way_to_the_server_ends_wk_08(server):
    source = f"class Cut:\n    def initialize(self, context):\n        {CLOSES}\n"
    write_model(server.store, "cut", source + "    def handle(self, data, context): return data\n")
    others = set(started_by(server.pid))
    started = time.monotonic()
    answer = server.register("cut", startup_timeout=5)
    assert (answer.status_code, time.monotonic() - started < 15) == (500, True)
    assert "cut" not in server.models()
    wait_until("its host is gone", lambda: set(started_by(server.pid)) <= others, 5)


def test_a_call_that_closes_the_way_to_the_server_costs_only_its_worker_wk_08(server):
    server.serve("cuts", response_timeout=5)
    [before] = server.worker_pids("cuts")
    answer = server.run(f"{CLOSES}; result = ['x']", "cuts")
    assert (answer.status_code, answer.json()["message"]) == (500, "Worker died.")
    assert server.run("result = ['back']", "cuts").text == "back"
    assert not is_running(before)
    server.manage("DELETE", "/models/cuts")


def test_memory_that_a_limit_refuses_is_told_and_costs_no_worker_wk_10(server):
    server.serve("greedy")
    before = server.worker_pids("greedy")
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34)); {}"
    answer = server.run(code.format("bytearray(1 << 36)"), "greedy")
    assert answer.status_code == 507
    assert server.run("result = ['alive']", "greedy").text == "alive"
    assert server.worker_pids("greedy") == before
    server.manage("DELETE", "/models/greedy")


def test_a_worker_that_stands_still_is_ended_by_the_response_limit_wk_10(server):
    server.serve("still", response_timeout=1)
    [pid] = server.worker_pids("still")
    os.kill(pid, signal.SIGSTOP)
    wait_until("it stands still", lambda: states(server)[pid] == "T")
    assert server.run("result = ['x']", "still").status_code == 500
    wait_until("it is gone", lambda: not is_running(pid), 5)
    assert server.run("result = ['x']", "still").text == "x"
    worker = server.describe("still")["workers"][0]
    assert "no answer within 1 s" in worker["lastFailure"] and worker["generation"] == 2
    server.manage("DELETE", "/models/still")
