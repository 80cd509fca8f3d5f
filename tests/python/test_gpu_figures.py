"""Figures of GPUs come from a library that somebody else wrote; this one is the test's (MT-11)."""

import subprocess
import time

import pytest
from harness import wait_until

# Nine devices; what each function does is up to how it is compiled.
LIBRARY = """
#include <unistd.h>
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } MemoryV2;

int nvmlInit_v2(void) { if (HANGS) sleep(1000); return FAILS ? 9 : 0; }
int nvmlInitWithFlags(unsigned int flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "\\xff\\xfe"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 9; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(long)(index + 1);
    return index < 9 ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = GARBAGE ? 4000000000u : 40 + (unsigned)(long)device;
    rates->memory = 1;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 4ull << 30; memory->used = 1ull << 30; memory->free = 3ull << 30;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory) {
    memory->total = 4ull << 30; memory->used = 1ull << 30; memory->free = 3ull << 30;
    memory->reserved = 0;
    return 0;
}
"""

MODEL = "def handle(data, context):\n    return data and ['x'] * len(data)\n"


@pytest.mark.parametrize("library", ["works", "hangs", "fails", "garbage", "missing"])
def test_a_library_of_whatever_kind_does_not_hold_the_server_mt_11(start, tmp_path, library):
    folder = tmp_path / "libraries"
    folder.mkdir()
    if library != "missing":
        source = folder / "library.c"
        source.write_text(LIBRARY)
        switches = {"HANGS": "hangs", "FAILS": "fails", "GARBAGE": "garbage"}
        defined = [f"-D{name}={int(library == kind)}" for name, kind in switches.items()]
        target = folder / "libnvidia-ml.so"
        command = ["gcc", "-shared", "-fPIC", "-w", *defined, "-o", str(target), str(source)]
        subprocess.run(command, check=True)
        (folder / "libnvidia-ml.so.1").symlink_to(target)
    began = time.monotonic()
    server = start(
        config=["devices=0,1,2,3,4,5,6,7,8", "metric_time_interval=1"],
        env={"LD_LIBRARY_PATH": folder},
    )
    server.serve("m", MODEL)
    assert time.monotonic() - began < 15
    before = time.monotonic()
    (worker,) = server.describe("m")["workers"]
    assert time.monotonic() - before < 2
    device = int(worker["device"].removeprefix("gpu:"))
    told = "no figures of the GPUs, or not of all"
    if library == "works":
        wait_until("all are shown", lambda: len(server.page().all("GPUUtilization")) == 9)
        assert server.page().value("GPUUtilization", DeviceId="8") == 49
        assert server.page().value("GPUMemoryUtilization", DeviceId="8") == 25
        assert server.page().value("GPUMemoryUsed", DeviceId="0") == 1024
        usage = server.describe("m")["workers"][0]["gpuUsage"]
        assert usage == (
            f"gpuId::{device} utilization.gpu::{41 + device} % "
            "utilization.memory::25 % memory.used::1024 MiB"
        )
        assert told not in server.output
        return
    server.wait_for_output(told)
    assert server.output.count(told) == 1
    assert server.page().all("GPUUtilization") == []
    assert server.describe("m")["workers"][0]["gpuUsage"] == f"gpuId::{device}"
