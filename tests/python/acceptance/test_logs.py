"""Log files (section 5, as far as logs go)."""

import re

import pytest
from harness import wait_until, write_model

LOGS = ("access_log.log", "model_log.log", "ts_log.log")
METRICS = ("ts_metrics.log", "model_metrics.log")
BROKEN = """
class Broken:
    def initialize(self, context):
        raise RuntimeError("cannot be initialised")

    def handle(self, data, context):
        return data
"""
TALKS = """
class Talks:
    def initialize(self, context):
        print("Compiled model with backend inductor")

    def handle(self, data, context):
        return ["x"]
"""


@pytest.mark.parametrize("line", ["", "async_logging=true", "async_logging=nonsense"])
def test_the_five_files_are_there_from_the_start(start, line):
    """test_metrics: test_logs_created, test_async_logging, test_async_logging_non_boolean."""
    server = start([line])
    for name in LOGS + METRICS:
        assert (server.folder / "logs" / name).exists(), name


def test_variables_move_the_files(start, tmp_path):
    """test_metrics: test_log_location_var_snapshot_disabled, test_metrics_location_var_*."""
    logs, metrics = tmp_path / "logs-here", tmp_path / "metrics-there"
    server = start(env={"LOG_LOCATION": logs, "METRICS_LOCATION": metrics})
    assert {path.name for path in logs.iterdir()} == set(LOGS)
    assert {path.name for path in metrics.iterdir()} == set(METRICS)
    assert not (server.folder / "logs").exists()


def test_one_variable_leaves_the_others_files(start, tmp_path):
    """test_metrics: test_log_location_and_metric_location_vars_snapshot_enabled's halves."""
    logs = tmp_path / "logs-here"
    server = start(env={"LOG_LOCATION": logs})
    assert {path.name for path in logs.iterdir()} == set(LOGS)
    assert {path.name for path in (server.folder / "logs").iterdir()} == set(METRICS)


def test_the_model_log_has_what_the_handler_says(start):
    """test_torch_compile: a line of the handler's start is in `logs/model_log.log`."""
    server = start()
    server.serve("m", TALKS)
    path = server.folder / "logs" / "model_log.log"
    wait_until("the line", lambda: "Compiled model with backend inductor" in path.read_text())


def test_each_try_to_load_has_its_traceback_in_the_model_log(start):
    """test_handler_traceback_logging: in the file, line by line, for each try."""
    server = start()
    write_model(server.store, "broken", BROKEN, config="maxRetryTimeoutInSec: 300\n")
    assert server.register("broken", synchronous="false").status_code == 202
    path = server.folder / "logs" / "model_log.log"
    line = BROKEN.splitlines().index('        raise RuntimeError("cannot be initialised")') + 1
    frame = re.compile(rf'MODEL_LOG - .*handler\.py", line {line}, in initialize')
    error = re.compile(r"MODEL_LOG - RuntimeError: cannot be initialised")

    def told() -> bool:
        text = path.read_text()
        return min(len(frame.findall(text)), len(error.findall(text))) >= 2

    wait_until("two tracebacks", told, limit=60)
