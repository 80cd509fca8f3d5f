"""Handlers that do not load, die, hang or talk too much: what clients hear, and what is left."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import is_running, wait_until, write_model


def loading(code: str) -> str:
    """A handler whose `initialize` runs some code."""
    lines = "".join(f"        {line}\n" for line in code.splitlines())
    return f"class Handler:\n    def initialize(self, context):\n{lines}\n" + (
        "    def handle(self, data, context):\n        return ['loaded'] * len(data)\n"
    )


TWO_CLASSES = loading("pass") + "\nclass Other:\n    pass\n"
# Handler → status and what the message has to hold: the last line of the exception.
NOT_LOADED = {
    "raises": (
        loading("raise ValueError('weights are upside down')"),
        500,
        "ValueError: weights are upside down",
    ),
    "import-error": ("import no_such_package\n", 500, "No module named 'no_such_package'"),
    "syntax-error": ("def handle(:\n", 500, "SyntaxError: "),
    "two-classes": (TWO_CLASSES, 500, "Expected only one class"),
    "nothing": ("x = 1\n", 500, "Expected only one class"),
    "no-handle": (
        "class Handler:\n    def initialize(self, context): pass\n",
        500,
        "Expect handle method",
    ),
    "exits": (loading("import os; os._exit(3)"), 500, "exited with status 3"),
    "segfault": (loading("import ctypes; ctypes.string_at(0)"), 500, "signal 11"),
    "sys-exit": (loading("import sys; sys.exit('enough')"), 500, "SystemExit: enough"),
    "memory": (loading("raise MemoryError('of weights')"), 507, "MemoryError: of weights"),
    "own-path": (
        loading("raise ValueError(f'cannot read {__file__}')"),
        500,
        "cannot read handler.py",
    ),
    "missing-file": (loading("open('weights.pt')"), 500, "FileNotFoundError"),
}


def nothing_is_left(server, model, children):
    assert model not in server.models()
    assert server.manage("GET", f"/models/{model}").status_code == 404
    wait_until("the hosts have ended", lambda: set(server.children()) <= children, 5)


@pytest.mark.parametrize("fault", NOT_LOADED)
def test_a_registration_that_fails_says_why_and_leaves_nothing_wk_02(server, fault):
    source, status, reason = NOT_LOADED[fault]
    write_model(server.store, fault, source)
    children, folders = set(server.children()), server.work_folders()
    answer = server.register(fault)
    body = answer.json()
    assert (answer.status_code, body["code"], body["type"]) == (
        status,
        status,
        "InternalServerException",
    )
    assert f"Failed to start workers for model {fault} version: 1.0" in body["message"]
    assert reason in body["message"]
    assert str(server.folder) not in body["message"], "where models lie is no client's business"
    nothing_is_left(server, fault, children)
    assert server.work_folders() == folders
    # The same name is free for the next try.
    write_model(server.store, fault, loading("pass"))
    answer = server.register(fault)
    assert answer.status_code == 200, answer.text
    assert server.predict(fault, b"x").text == "loaded"
    assert server.manage("DELETE", f"/models/{fault}").status_code == 200


@pytest.mark.parametrize("handler", ["absent.py", "absent", "absent:function", "pkg.absent"])
def test_a_handler_that_is_not_there(server, handler):
    write_model(server.store, "absent", {"other.py": ""}, handler=handler)
    children = set(server.children())
    answer = server.register("absent")
    assert answer.status_code == 500
    assert "absent" in answer.json()["message"]
    nothing_is_left(server, "absent", children)


def test_a_load_without_end_is_ended_at_its_limit_wk_07_wk_08(server):
    write_model(server.store, "endless", loading("import time\nwhile True: time.sleep(60)"))
    children = set(server.children())
    started = time.monotonic()
    answer = server.register("endless", startup_timeout=2)
    assert 1.9 < time.monotonic() - started < 6
    assert answer.status_code == 500
    assert "2 s" in answer.json()["message"]
    # The two lines as TorchServe prints them: people's alerts look for them.
    reason = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond"
    server.wait_for_output(f"{reason} in given time")
    assert re.search(rf"Backend worker error[^\n]*\n[^\n]*{re.escape(reason)}", server.output)
    nothing_is_left(server, "endless", children)


def test_a_load_that_talks_much_or_closes_its_output_still_ends_wk_08(server):
    talks = loading(
        "line = 'x' * 1023\nfor _ in range(20 * 1024): print(line)\nprint('y' * (1 << 20))"
    )
    write_model(server.store, "talks", talks)
    answer = server.register("talks", startup_timeout=20)
    assert answer.status_code == 200, answer.text
    assert server.predict("talks", b"x").text == "loaded"
    write_model(server.store, "closes", loading("import os; os.close(0); os.close(1); os.close(2)"))
    assert server.register("closes", startup_timeout=20).status_code == 200
    assert server.predict("closes", b"x").text == "loaded"


def test_a_model_that_cannot_load_is_told_by_describe_when_nobody_waits(server):
    write_model(server.store, "later", loading("raise ValueError('never')"))
    answer = server.register("later", synchronous="false")
    assert (answer.status_code, answer.json()["status"]) == (202, "Processing worker updates...")
    worker = wait_until(
        "its failure is told",
        lambda: next(
            (w for w in server.describe("later")["workers"] if w.get("lastFailure")), None
        ),
    )
    assert worker["status"] == "UNLOADING"
    assert "ValueError: never" in worker["lastFailure"]
    traceback = 'handler.py", line 3, in initialize'
    wait_until("it is tried again", lambda: server.output.count(traceback) >= 3)
    assert server.manage("DELETE", "/models/later").status_code == 200
    assert "later" not in server.models()


DEATHS = {
    "exit": ("import os; os._exit(1)", 500, "exited with status 1"),
    "exit-0": ("import os; os._exit(0)", 500, "exited with status 0"),
    "exit-137": ("import os; os._exit(137)", 507, "exited with status 137"),
    "segfault": ("import ctypes; ctypes.string_at(0)", 500, "signal 11"),
    "abort": ("import os; os.abort()", 500, "signal 6"),
    "killed": ("import os; os.kill(os.getpid(), 9)", 507, "signal 9"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_worker_answers_and_is_replaced_wk_10(server, death):
    code, status, reason = DEATHS[death]
    model = f"dies-{death}"
    server.serve(model)
    [before] = server.worker_pids(model)
    answer = server.run(code, model)
    assert (answer.status_code, answer.json()["message"]) == (status, "Worker died.")
    # The next caller waits for the replacement.
    assert server.run("result = ['alive']", model).text == "alive"
    [worker] = server.describe(model)["workers"]
    assert worker["pid"] != before
    assert reason in worker["lastFailure"]
    assert not is_running(before)
    server.manage("DELETE", f"/models/{model}")


def test_a_batch_without_end_is_ended_at_its_limit_wk_01(server):
    server.serve("hangs", response_timeout=1)
    [before] = server.worker_pids("hangs")
    answer = server.run("import time; time.sleep(600)", "hangs")
    assert (answer.status_code, answer.json()["message"]) == (500, "Worker died.")
    assert 0.9 < answer.elapsed.total_seconds() < 4
    assert server.run("result = ['alive']", "hangs").text == "alive"
    assert server.worker_pids("hangs") != [before]
    assert not is_running(before)
    # In the words that people look for in TorchServe's log.
    for words in (
        "Number or consecutive unsuccessful inference 1",
        "Worker disconnected",
        "Auto recovery start timestamp",
        "Retry worker",
        "Auto recovery succeeded, reset recoveryStartTS",
    ):
        server.wait_for_output(words)


@pytest.mark.parametrize("death", ["os._exit(1)", "ctypes.string_at(0)"])
def test_all_workers_of_a_dead_process_answer_and_come_back(server, death):
    model = f"shared-{death.partition('.')[0]}"
    server.serve(model, config="workerIsolation: thread\n", initial_workers=2)
    [before] = set(server.worker_pids(model))
    waits = "import time; print('waits for the end', flush=True); time.sleep(600)"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.run, waits, model)
        server.wait_for_output("waits for the end")
        answer = server.run(f"import ctypes, os; {death}", model)
        assert [answer.status_code, other.result().status_code] == [500, 500]
    server.wait_for_workers(model)
    [after] = set(server.worker_pids(model))
    assert before != after and not is_running(before)
    assert server.run("result = ['alive']", model).text == "alive"
    server.manage("DELETE", f"/models/{model}")


def test_others_are_served_while_a_model_loads(server, tmp_path):
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    write_model(server.store, "slow", loading(waits))
    assert server.register("slow", synchronous="false").status_code == 202
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.predict, "slow", b"x")
        for _ in range(20):
            assert server.run("result = ['quick']").text == "quick"
            assert server.infer("/ping", method="GET").status_code == 200
            assert "slow" in server.models()
        assert server.describe("slow")["workers"][0]["status"] == "UNLOADING"
        gate.touch()
        # A request to the one that loads has waited for it.
        assert waiting.result().text == "loaded"


def test_a_worker_with_threads_and_children_of_its_own_ends_with_its_model(server):
    server.serve("busy")
    code = """
import subprocess, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
child = subprocess.Popen(["sleep", "600"])
result = [child.pid]
"""
    child = int(server.run(code, "busy").text)
    [pid] = server.worker_pids("busy")
    assert is_running(child)
    assert server.manage("DELETE", "/models/busy").status_code == 200
    wait_until(
        "host and child have ended", lambda: not is_running(pid) and not is_running(child), 5
    )
