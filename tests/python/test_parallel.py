"""Workers that are groups of processes, which meet in `torch.distributed`, by gloo."""

import json
import time

import pytest
from harness import at_once, is_running, processes_of, wait_until, write_model

# Runs the code that a request brings on every rank; what rank 0 leaves in `result` is the answer.
RANKED = """
import os, time
import torch
import torch.distributed as dist
from ts.handler_utils.utils import send_intermediate_predict_response

class Ranked:
    def initialize(self, context):
        self.seen = {name: os.environ[name] for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
        BEFORE
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def handle(self, data, context):
        scope = globals() | {"self": self, "data": data, "context": context}
        exec(bytes(data[0]["body"]).decode(), scope)
        return scope["result"]
"""

TWO = "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n"

SUM = "t = torch.tensor([self.rank + 1.0]); dist.all_reduce(t); result = [t.item()]"


def ranked(before: str = "pass") -> str:
    return RANKED.replace("BEFORE", before)


def pids(server, model="ranked"):
    """The processes of each worker."""
    return [[rank["pid"] for rank in w["ranks"]] for w in server.describe(model)["workers"]]


def wait_gone(processes):
    wait_until("the processes are gone", lambda: not any(map(is_running, processes)))


@pytest.fixture(scope="module")
def group(server):
    """The module's server with the model `ranked`, one group of two."""
    server.serve("ranked", ranked(), config=TWO)
    return server


def test_ranks_meet_and_reduce_a_tensor(group):
    assert group.run(SUM, "ranked").json() == 3.0
    code = "result = [self.seen | {'elastic': dist.is_torchelastic_launched()}]"
    seen = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "elastic": True}
    assert group.run(code, "ranked").json() == seen
    gathered = (
        "all = [None] * 2; dist.all_gather_object(all, [self.seen['LOCAL_RANK'], os.getpid(),"
        " torch.get_num_threads()]); result = [all]"
    )
    first, second = group.run(gathered, "ranked").json()
    worker = group.describe("ranked")["workers"][0]
    assert [first[:2], second[:2]] == [[str(r["rank"]), r["pid"]] for r in worker["ranks"]]
    assert first[2] == second[2] == worker["threads"]
    assert worker["memoryUsage"] >= worker["ranks"][0]["memoryUsage"] * 1.2


def test_requests_at_once_are_run_in_the_same_order_by_all_ranks(group):
    code = (
        "t = torch.tensor([{n}.0]); dist.all_reduce(t); "
        "assert t.item() == {n} * 2, 'ranks have mixed up batches'; result = [t.item()]"
    )
    calls = [lambda n=n: group.run(code.format(n=n), "ranked").json() for n in range(40)]
    assert at_once(calls, 8) == [n * 2.0 for n in range(40)]


def test_only_rank_0_sends_parts(group):
    code = """
for step in range(3):
    t = torch.tensor([1.0]); dist.all_reduce(t)
    part = [f"{self.rank}{step} "]
    send_intermediate_predict_response(part, context.request_ids, "", 200, context)
result = [f"{self.rank}end"]
"""
    assert group.run(code, "ranked").text == "00 01 02 0end"


def test_the_log_names_the_rank(group):
    assert group.run("print('here I', 'am'); result = ['']", "ranked").status_code == 200
    for rank in (0, 1):
        name = f"W-{group.describe('ranked')['workers'][0]['id']}-ranked_1.0-rank{rank}"
        wait_until(
            f"{name} has written",
            lambda name=name: any(
                name in line and "here I am" in line for line in group.output.splitlines()
            ),
        )


def test_what_all_ranks_raise_is_the_requests_fault(group):
    before = pids(group)
    assert group.run("raise ValueError('bad input')", "ranked").status_code == 503
    assert group.run(SUM, "ranked").json() == 3.0
    assert pids(group) == before


@pytest.mark.parametrize(
    ("code", "why"),
    [
        # The other one is told by gloo, or waits in it.
        ("os._exit(3) if self.rank == 1 else None; " + SUM, "rank 1: exited with status 3"),
        ("1 / (1 - self.rank); " + SUM, "failed while it ran a batch, and the others did not"),
    ],
    ids=["dies", "raises"],
)
def test_a_rank_that_is_lost_ends_its_group_once(group, code, why):
    ((generation, before),) = [
        (worker["generation"], pids(group)[0]) for worker in group.describe("ranked")["workers"]
    ]
    began = time.monotonic()
    answer = group.run(code, "ranked")
    assert (answer.status_code, answer.json()["message"]) == (500, "Worker died.")
    assert time.monotonic() - began < 20, "the rank that waits is not waited for"
    wait_gone(before)
    # Waits for the group that is started in its place.
    assert group.run(SUM, "ranked").json() == 3.0
    worker = group.describe("ranked")["workers"][0]
    assert worker["generation"] == generation + 1
    assert why in worker["lastFailure"]
    assert len(processes_of(group) & set(pids(group)[0])) == 2


def test_groups_come_and_go_whole(group):
    scale = "/models/ranked?synchronous=true&min_worker={0}&max_worker={0}"
    assert group.manage("PUT", scale.format(2)).status_code == 200
    one, two = pids(group)
    slow = "time.sleep(0.05); " + SUM.replace("[t.item()]", "[[t.item(), os.getpid()]]")
    found = at_once([lambda: group.run(slow, "ranked").json()] * 12, 4)
    assert {total for total, _ in found} == {3.0}
    assert {pid for _, pid in found} == {one[0], two[0]}
    assert group.manage("PUT", scale.format(1)).status_code == 200
    wait_gone(two)
    assert pids(group) == [one]
    assert group.run(SUM, "ranked").json() == 3.0


def test_a_rank_that_fails_in_initialize_is_named(server):
    before = set(server.hosts())
    fails = "if self.seen['RANK'] == '1': raise ValueError('no weights for me')"
    write_model(server.store, "fails", ranked(fails), config=TWO + "startupTimeout: 100\n")
    began = time.monotonic()
    answer = server.register("fails")
    assert answer.status_code == 500
    assert "rank 1: " in answer.json()["message"], answer.text
    assert "no weights for me" in answer.json()["message"]
    assert time.monotonic() - began < 60, "rank 0 waits for a rank that will not come"
    wait_until("its processes are gone", lambda: set(server.hosts()) == before)


def test_a_rank_that_never_joins_is_named_at_the_limit(server):
    before = set(server.hosts())
    hangs = "if self.seen['RANK'] == '1': time.sleep(1000)"
    write_model(server.store, "hangs", ranked(hangs), config=TWO + "startupTimeout: 30\n")
    message = server.register("hangs").json()["message"]
    assert "no answer of ranks 0, 1 within 30 s" in message
    assert message.endswith("rank 1 did not join the group"), message
    wait_until("its processes are gone", lambda: set(server.hosts()) == before)


PIPELINE = """
import os
import torch
from torch.distributed import rpc

class Pipeline:
    def initialize(self, context):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.handled = 0
        rpc.init_rpc(f"stage{rank}", rank=rank, world_size=size)

    def handle(self, data, context):
        self.handled += 1
        there = rpc.rpc_sync("stage1", os.getpid)
        value = rpc.rpc_sync("stage1", torch.mul, args=(torch.tensor(float(data[0]["body"])), 2))
        return [[there, value.item(), self.handled]]
"""


def test_in_a_pipeline_rank_0_drives_the_others(server):
    server.serve("pipeline", PIPELINE, config="parallelType: PP\nparallelLevel: 2\n")
    ((_, second),) = pids(server, "pipeline")
    for count in (1, 2, 3):
        answer = server.predict("pipeline", str(count).encode()).json()
        assert answer == [second, 2.0 * count, count]
    assert server.manage("DELETE", "/models/pipeline").status_code == 200


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
from ts.torch_handler.base_handler import BaseHandler

def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

class Sharded(BaseHandler):
    def initialize(self, context):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.context, self.device, self.whole = context, torch.device("cpu"), network()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        self.model = parallelize_module(network(), mesh, plan)
        self.initialized = True

    def preprocess(self, data):
        return torch.tensor([row.get("data") or row.get("body") for row in data])

    def postprocess(self, output):
        own = sum(p.to_local().numel() for p in self.model.parameters() if hasattr(p, "to_local"))
        same = torch.allclose(output, self.whole(self.kept), atol=1e-6)
        return [[own, same]] * len(output)

    def inference(self, data):
        self.kept = data
        return self.model(data)
"""


def test_a_model_in_two_parts_answers_as_the_whole_one(start):
    server = start()
    config = TWO + "batchSize: 4\nmaxBatchDelay: 50\n"
    server.serve("sharded", SHARDED, config=config)
    rows = [[float(n)] * 8 for n in range(8)]
    calls = [lambda row=row: server.predict("sharded", json=row).json() for row in rows]
    answers = at_once(calls, 8)
    whole = 8 * 16 + 16 + 16 * 4 + 4
    assert all(same and own < whole * 0.6 for own, same in answers), json.dumps(answers)
    # A worker in a collective that never ends goes with the server, too.
    processes = processes_of(server)
    server.stop()
    assert not any(map(is_running, processes))


def test_a_group_ends_with_the_server_whatever_it_does(start):
    server = start(["worker_stop_timeout=2", "drain_timeout=2"])
    server.serve("ranked", ranked(), config=TWO)
    processes = [pid for group in pids(server) for pid in group]
    stuck = "dist.barrier() if self.rank == 0 else time.sleep(1000)"
    with pytest.raises(Exception, match="timed out"):
        server.session.post(
            f"{server.inference}/predictions/ranked", data=stuck.encode(), timeout=1
        )
    server.process.terminate()
    server.process.wait(30)
    wait_gone(processes)
