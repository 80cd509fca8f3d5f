"""Pools that scale by themselves, devices and threads of workers, and models in quarantine."""

import pytest
from harness import SCRIPTED, at_once, is_running, wait_until, write_model

ON_DEMAND = "autoscale: true\nminWorkers: 0\nmaxWorkers: 2\nscaleDownIdleSeconds: 1\n"

# Sees four devices, whatever this machine has.
FOUR_DEVICES = (
    """
import torch
torch.cuda.device_count = lambda: 4
"""
    + SCRIPTED
)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_model_without_workers_is_loaded_by_its_first_call_and_unloaded_when_idle(
    start, isolation
):
    server = start()
    server.serve("m", config=f"{ON_DEMAND}workerIsolation: {isolation}\n", initial_workers=0)
    assert server.describe("m")["workers"] == []
    assert server.infer("/ping", method="GET").status_code == 200
    for _ in range(2):
        answers = at_once([lambda: server.run("import os; result = [os.getpid()]", "m")] * 3)
        assert [answer.status_code for answer in answers] == [200] * 3
        pids = {int(answer.text) for answer in answers}
        wait_until("its processes are gone", lambda pids=pids: not any(map(is_running, pids)))
        wait_until("none is left", lambda: server.describe("m")["workers"] == [])


def test_a_failing_load_on_demand_tells_why_and_is_not_repeated(start):
    server = start()
    server.serve("m", "import no_such_module\n", config=ON_DEMAND, initial_workers=0)
    answer = server.predict("m", b"x")
    assert answer.status_code == 500
    assert "No module named 'no_such_module'" in answer.json()["message"]
    described = server.describe("m")
    assert "no_such_module" in described["quarantined"]
    assert "no_such_module" in described["lastFailure"]
    answer = server.predict("m", b"x")
    assert (answer.status_code, answer.headers["x-refusal-reason"]) == (503, "quarantined")
    output = server.wait_for_output("the model is in quarantine")
    assert output.count("Worker disconnected") == 1


def test_a_handler_that_only_ends_its_process_goes_into_quarantine_until_it_is_scaled(start):
    server = start()
    server.serve("bad", config="quarantineAfter: 3\n", initial_workers=1)
    server.serve("good", initial_workers=1)
    for _ in range(3):
        assert server.run("import os; os._exit(3)", "bad").status_code == 500
    reason = wait_until("it is in quarantine", lambda: server.describe("bad").get("quarantined"))
    assert "3 workers were lost in a row" in reason
    assert "exited with status 3" in reason
    answer = server.run("result = ['x']", "bad")
    assert (answer.status_code, answer.headers["x-refusal-reason"]) == (503, "quarantined")
    assert server.infer("/ping", method="GET").status_code == 500
    assert server.run("result = ['x']", "good").text == "x"
    scaled = server.manage("PUT", "/models/bad?min_worker=1&synchronous=true")
    assert scaled.status_code == 200
    assert server.run("result = ['x']", "bad").text == "x"
    assert server.infer("/ping", method="GET").status_code == 200


def test_a_leased_gpu_that_torch_does_not_see_fails_the_load_for_good(start):
    server = start(["devices=0"])
    write_model(server.store, "m", "import torch\n" + SCRIPTED)
    answer = server.register("m")
    assert answer.status_code == 500
    message = answer.json()["message"]
    assert "the server leased GPU 0 to this worker" in message
    assert "deviceType: cpu" in message
    server.serve("cpu", "import torch\n" + SCRIPTED, config="deviceType: cpu\n")
    code = "result = [str(context.system_properties['gpu_id'])]"
    assert server.run(code, "cpu").text == "None"


def test_each_worker_learns_of_its_own_device(start):
    server = start(["devices=0,1,2,3"])
    server.serve("m", FOUR_DEVICES, config="deviceIds: [2, 0]\n", initial_workers=2)
    told = {(worker["pid"], worker["device"]) for worker in server.describe("m")["workers"]}
    code = (
        "import os, time; time.sleep(0.05); "
        "result = [f\"{os.getpid()} gpu:{context.system_properties['gpu_id']}\"]"
    )

    def both() -> bool:
        answers = at_once([lambda: server.run(code, "m")] * 4)
        found = {tuple(answer.text.split()) for answer in answers}
        return {(int(pid), device) for pid, device in found} == told

    wait_until("both workers have answered", both)
    assert sorted(device for _, device in told) == ["gpu:0", "gpu:2"]


def test_a_worker_computes_with_its_share_of_the_cores(start):
    server = start()
    server.serve("m", "import torch\n" + SCRIPTED, initial_workers=1)
    threads = server.describe("m")["workers"][0]["threads"]
    assert server.run("import torch; result = [torch.get_num_threads()]", "m").json() == threads
