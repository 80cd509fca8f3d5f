"""Which metrics appear where (section 5): test_metrics and test_metrics_kf, and the lines about
metrics of postman/inference. The page has all metrics in every mode (docs/compat.md)."""

import re

import pytest
from harness import wait_until

# As TorchServe's own example of custom metrics: declared ones that are got, and others.
HANDLER = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.torch_handler.base_handler import BaseHandler


class Counts(BaseHandler):
    def initialize(self, context):
        metrics = context.metrics
        self.requests = metrics.add_metric_to_cache(
            "InferenceRequestCount", "count", ["ModelName", "Level"], MetricTypes.COUNTER
        )
        metrics.add_counter("InitializeCallCount", 1)
        self.initialized = True

    def preprocess(self, data):
        metrics = self.context.metrics
        self.requests.add_or_update(len(data), [self.context.model_name, "Model"])
        size = metrics.get_metric("RequestBatchSize", MetricTypes.GAUGE)
        size.add_or_update(len(data), [self.context.model_name])
        metrics.add_time("HandlerMethodTime", 1.25, dimensions=[Dimension("MethodName", "pre")])
        metrics.add_percent("ExamplePercentMetric", 50, metric_type=MetricTypes.HISTOGRAM)
        return data

    def inference(self, data):
        return data

    def postprocess(self, data):
        return ["ok"] * len(data)
"""

SERVER = [
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
    "Requests2XX",
    "Requests4XX",
    "Requests5XX",
    "QueueTime",
    "WorkerThreadTime",
    "WorkerLoadTime",
]
SYSTEM = [
    "CPUUtilization",
    "MemoryUsed",
    "MemoryAvailable",
    "MemoryUtilization",
    "DiskUsage",
    "DiskAvailable",
    "DiskUtilization",
]
MODEL = {
    "HandlerTime": "gauge",
    "PredictionTime": "gauge",
    "InferenceRequestCount": "counter",
    "InitializeCallCount": "counter",
    "RequestBatchSize": "gauge",
}
UNLISTED = {"HandlerMethodTime": "gauge", "ExamplePercentMetric": "histogram"}


def entries(names, unit, dimensions):
    quoted = ", ".join(f'"{name}"' for name in dimensions)
    return "".join(
        f"    - name: {name}\n      unit: {unit}\n      dimensions: [{quoted}]\n" for name in names
    )


CONFIG = (
    "ts_metrics:\n  counter:\n"
    + entries(SERVER[3:6], "Count", ["Level", "Hostname"])
    + entries(SERVER[:3], "Count", ["model_name", "model_version", "hostname"])
    + "  gauge:\n"
    + entries([*SERVER[6:8], *SYSTEM], "unit", ["Level", "Hostname"])
    + entries(SERVER[8:], "Milliseconds", ["WorkerName", "Level", "Hostname"])
    + "model_metrics:\n  counter:\n"
    + entries(["InferenceRequestCount", "InitializeCallCount"], "count", ["ModelName", "Level"])
    + "  gauge:\n"
    + entries(["HandlerTime", "PredictionTime"], "ms", ["ModelName", "Level"])
    + entries(["RequestBatchSize"], "count", ["ModelName"])
)


def serve(start, tmp_path, *config, env=None):
    """A server whose metrics are declared, after what the tests send."""
    file = tmp_path / "metrics.yaml"
    file.write_text(CONFIG)
    server = start(config=[f"metrics_config={file}", *config], env=env)
    server.serve("counts", HANDLER)
    assert server.predict("counts", b"x").text == "ok"
    assert server.infer("/predictions/none").status_code == 404
    return server


def names(server, log):
    return {line.partition(".")[0] for line in server.metric_lines(log)}


# 4XX responses there are, 5XX responses there are none of.
LOGGED = {*SERVER, *SYSTEM} - {"Requests5XX"}


def test_mode_log_is_the_default(start, tmp_path):
    """test_metrics: the server's in `ts_metrics.log`, the handler's in `model_metrics.log`."""
    server = serve(start, tmp_path)
    wait_until("all is logged", lambda: names(server, "TS_METRICS") >= LOGGED)
    wait_until("all of the handler too", lambda: names(server, "MODEL_METRICS") == set(MODEL))
    assert names(server, "TS_METRICS") == LOGGED
    assert not set(UNLISTED) & set(server.page().types)


@pytest.mark.parametrize("source", ["config", "environment"])
def test_mode_prometheus_has_everything_on_the_page(start, tmp_path, source):
    """test_metrics: each family once with its type and labels, and none in the files."""
    if source == "config":
        server = serve(start, tmp_path, "metrics_mode=prometheus")
    else:
        variables = {"TS_METRICS_MODE": "prometheus"}
        server = serve(start, tmp_path, "enable_envvars_config=true", env=variables)
    expected = {*SERVER, *SYSTEM, *MODEL}
    wait_until("all is on the page", lambda: set(server.page().types) >= expected)
    types, text = server.page().types, server.metrics()
    for name in expected:
        counter = name in SERVER[:6] or MODEL.get(name) == "counter"
        assert types[name] == ("counter" if counter else "gauge")
    host = r'Hostname="[^"]+",'
    for pattern in (
        rf'Requests2XX\{{Level="Host",{host}\}} \d+\.\d+',
        rf'Requests4XX\{{Level="Host",{host}\}} \d+\.\d+',
        r'ts_inference_requests_total\{model_name="counts",model_version="default",'
        r'hostname="[^"]+",\} 1\.0',
        rf'WorkerLoadTime\{{WorkerName="W-9000-counts_1\.0",Level="Host",{host}\}} \d+\.\d+',
        rf'MemoryUsed\{{Level="Host",{host}\}} \d+\.\d+',
        rf'HandlerTime\{{ModelName="counts",Level="Model",{host}\}} \d+\.\d+',
        rf'InferenceRequestCount\{{ModelName="counts",Level="Model",{host}\}} 1\.0',
        rf'RequestBatchSize\{{ModelName="counts",{host}\}} 1\.0',
    ):
        assert len(re.findall(rf"^{pattern}", text, re.M)) == 1, pattern
    assert not names(server, "TS_METRICS") | names(server, "MODEL_METRICS")


@pytest.mark.parametrize("mode", ["log", "prometheus"])
def test_what_is_not_declared_appears_with_auto_detection(start, tmp_path, mode):
    """test_metrics: `model_metrics_auto_detect`, with the type of the handler's call."""
    more = ["model_metrics_auto_detect=true", f"metrics_mode={mode}"]
    server = serve(start, tmp_path, *more)
    wait_until("it is there", lambda: set(UNLISTED) <= set(server.page().types))
    assert UNLISTED.items() <= server.page().types.items()
    found = server.page()
    assert found.value("ExamplePercentMetric_sum") == 50
    assert found.value("ExamplePercentMetric_count") == 1
    assert found.value("HandlerMethodTime", MethodName="pre", ModelName="counts") == 1.25
    if mode == "log":
        wait_until("in the log too", lambda: set(UNLISTED) <= names(server, "MODEL_METRICS"))
    else:
        assert not names(server, "MODEL_METRICS")


def test_mode_legacy_keeps_three_counters_out_of_the_log(start, tmp_path):
    """test_metrics: the three `ts_*` are on the page, all others in the files."""
    server = serve(start, tmp_path, "metrics_mode=legacy")
    others = LOGGED - set(SERVER[:3])
    wait_until("the others are logged", lambda: names(server, "TS_METRICS") >= others)
    wait_until("the handler's too", lambda: names(server, "MODEL_METRICS") == set(MODEL))
    assert names(server, "TS_METRICS") == others
    assert set(SERVER[:3]) <= set(server.page().types)


@pytest.mark.parametrize("source", ["config", "environment"])
def test_system_metrics_can_be_left_out(start, tmp_path, source):
    """test_metrics: `disable_system_metrics`, and `TS_DISABLE_SYSTEM_METRICS`."""
    if source == "config":
        server = serve(start, tmp_path, "disable_system_metrics=true")
    else:
        variables = {"TS_DISABLE_SYSTEM_METRICS": "true"}
        server = serve(start, tmp_path, "enable_envvars_config=true", env=variables)
    expected = LOGGED - set(SYSTEM)
    wait_until("the rest is logged", lambda: names(server, "TS_METRICS") >= expected)
    assert names(server, "TS_METRICS") == expected
    assert not set(SYSTEM) & set(server.page().types)


def test_requests_are_counted_in_the_form_that_clients_look_for(start):
    """postman/inference: after each request the page matches the expression."""
    server = start(config=["metrics_mode=prometheus"])
    server.serve("counts", "def handle(data, context):\n    return data and ['x'] * len(data)\n")
    for times in range(1, 4):
        assert server.predict("counts", b"x").status_code == 200
        found = re.search(
            r'Requests2XX\{Level="Host",Hostname="[^"]*",\} (\d+\.\d)\n', server.metrics()
        )
        assert found and float(found[1]) >= 2 * times
