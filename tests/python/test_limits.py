"""Limits on the memory and processor time of a model's hosts."""

import os

import pytest
from harness import SCRIPTED, Server, write_model

TORCH = "import torch\n" + SCRIPTED


def last_failure(server, model):
    [worker] = server.describe(model)["workers"]
    return worker.get("lastFailure", ""), worker["pid"]


@pytest.mark.parametrize("zygote", ["true", "false"])
@pytest.mark.parametrize(
    ("source", "limit", "greed"),
    [
        (SCRIPTED, 256, "self.hoard = bytearray(400 << 20)"),
        (SCRIPTED, 256, "self.hoard = [bytearray(1 << 20) for _ in range(400)]"),
        (TORCH, 1500, "self.hoard = torch.ones(500 << 20)"),
    ],
)
def test_a_worker_over_its_memory_answers_507_and_is_replaced(start, zygote, source, limit, greed):
    server = start([f"zygote={zygote}"])
    server.serve("greedy", source, config=f"memoryLimitMb: {limit}\n")
    server.serve("modest", SCRIPTED)
    others = server.worker_pids("modest")
    described = server.describe("greedy")
    assert described["memoryLimitMb"] == limit
    assert described["limitsEnforcedBy"] in ("control group", "data size and core affinity")
    _, before = last_failure(server, "greedy")

    imports = "import torch\n" if source is TORCH else ""
    answer = server.run(f"{imports}{greed}\nresult = ['kept']", "greedy")
    assert answer.status_code == 507, answer.text
    assert server.run("result = ['well']", "greedy").text == "well"
    why, after = last_failure(server, "greedy")
    assert after != before
    assert f"out of memory under its limit of {limit} MiB" in why

    # The limit is the model's and not that of all.
    wide = "kept = bytearray(600 << 20); result = [str(len(kept) >> 20)]"
    assert server.run(wide, "modest").text == "600"
    assert server.worker_pids("modest") == others


def test_a_model_that_does_not_fit_is_refused_with_507(start):
    server = start()
    source = SCRIPTED.replace("self.kept = {}", "self.kept = bytearray(400 << 20)")
    write_model(server.store, "greedy", source, config="memoryLimitMb: 256\n")
    answer = server.register("greedy")
    assert answer.status_code == 507, answer.text
    assert server.models() == []


@pytest.mark.parametrize("zygote", ["true", "false"])
def test_processor_time_is_limited_and_torch_knows(start, zygote):
    server = start([f"zygote={zygote}"])
    server.serve("half", TORCH, config="cpuLimit: 0.5\n")
    server.serve("all", TORCH)
    described = server.describe("half")
    assert described["cpuLimit"] == 0.5
    code = (
        "import json, os, torch\n"
        "result = [json.dumps([len(os.sched_getaffinity(0)), torch.get_num_threads()])]"
    )
    everything = len(os.sched_getaffinity(0))
    cores, threads = server.run(code, "half").json()
    assert threads == 1
    assert cores == (1 if "affinity" in described["limitsEnforcedBy"] else everything)
    assert server.run(code, "all").json() == [everything, everything]


class OnOneCore(Server):
    """A server that may use one core."""

    def command(self, *more):
        first = min(os.sched_getaffinity(0))
        return ["taskset", "--cpu-list", str(first), *super().command(*more)]


def test_workers_and_threads_are_counted_by_the_cores_that_may_be_used_hl_11(start, monkeypatch):
    monkeypatch.setattr("conftest.Server", OnOneCore)
    server = start.make(args=["--models", "m"])
    write_model(server.store, "m", TORCH)
    server.start()
    server.wait_for_workers("m")
    assert len(server.worker_pids("m")) == 1
    code = "import torch; result = [str(torch.get_num_threads())]"
    assert server.run(code, "m").text == "1"
    assert "Number of CPUs: 1, all that this process may use" in server.output


def test_a_limit_that_is_none_is_told_and_passed_over(start):
    server = start()
    server.serve("m", SCRIPTED, config="memoryLimitMb: 0\ncpuLimit: lots\n")
    described = server.describe("m")
    assert not {"memoryLimitMb", "cpuLimit", "limitsEnforcedBy"} & described.keys()
    for key in ("memoryLimitMb", "cpuLimit"):
        server.wait_for_output(f"`{key}`")
