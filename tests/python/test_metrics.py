"""What handlers record appears on the metrics API, adds up, outlives a worker and goes with its
model."""

import re

import pytest
from harness import at_once, wait_until

BASE = """
from ts.torch_handler.base_handler import BaseHandler

class Words(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        return [len(row["body"]) for row in data]

    def inference(self, data):
        return data

    def postprocess(self, data):
        return data
"""

# `<Name>.<Unit>:<value>|#<dims>|#hostname:<h>,requestID:<ids>,timestamp:<epoch s>`
LINE = re.compile(
    r"[\w\s]+\.[\w\s]+:(NaN|-?\d+\.\d+(E-?\d+)?)\|#((\w+:[^|,]*,)*\w+:[^|,]*)?"
    r"\|#hostname:[^,|]+(,requestID:[^|]*)?,timestamp:\d{10}"
)


def test_times_of_a_handler_are_told(server):
    server.serve("words", BASE)
    assert server.predict("words", b"four").text == "4"
    for name in ("HandlerTime", "PredictionTime"):
        value = wait_until(
            f"{name} is told", lambda name=name: server.page().value(name, ModelName="words")
        )
        assert 0 < value < 60_000
        assert server.page().types[name] == "gauge"
        # The labels and their order are what dashboards were built on.
        assert re.search(
            name + r'\{ModelName="words",Level="Model",Hostname="[^"]+",\} ', server.metrics()
        )


RECORD = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
metrics = context.metrics
metrics.add_counter("Tokens", 3)
metrics.add_counter("Halves", 0.1)
metrics.add_counter("ByZone", 1, dimensions=[Dimension("Zone", "no\\nrth \\"x\\" \\\\ é模型")])
for name, value in (("Depth", 0.3), ("Width", 7), ("Height", 1000)):
    metrics.add_metric(name, value, "count", metric_type=MetricTypes.HISTOGRAM)
result = ["ok"]
"""


def test_own_metrics_add_up_over_workers_and_outlive_them_mt_05(server):
    server.serve("counts", initial_workers=3)
    counted = {"Tokens": 3, "Halves": 0.1, "ByZone": 1}
    for name, value in (("Depth", 0.3), ("Width", 7), ("Height", 1000)):
        counted |= {f"{name}_count": 1, f"{name}_sum": value}

    def told(times):
        found = server.page()
        values = {name: found.value(name, ModelName="counts") for name in counted}
        return values == pytest.approx({name: times * by for name, by in counted.items()})

    calls = [lambda: server.run(RECORD, "counts").text for _ in range(300)]
    assert at_once(calls, 16) == ["ok"] * 300
    wait_until("300 calls are told", lambda: told(300), 5)
    assert server.run("import os; os._exit(1)", "counts").status_code == 500
    assert told(300)
    for _ in range(2):
        assert server.run(RECORD, "counts").text == "ok"
    wait_until("302 calls are told", lambda: told(302), 5)
    types = server.page().types
    assert (types["Tokens"], types["Depth"]) == ("counter", "histogram")
    assert server.page().value("ByZone", Zone='no\nrth "x" \\ é模型') == 302


def test_senseless_metrics_fail_no_request_and_spoil_no_page_mt_02(start):
    server = start()
    server.serve("odd")
    record = """
from ts.metrics.metric_type_enum import MetricTypes
metrics = context.metrics
metrics.add_counter("Down", -1)
metrics.add_metric("Two", 1, "count", metric_type=MetricTypes.COUNTER)
metrics.add_metric("Two", 1, "count", metric_type=MetricTypes.GAUGE)
metrics.add_metric("Requests2XX", 1, "count", metric_type=MetricTypes.GAUGE)
metrics.add_metric("with space-and.dots", 1, "count")
metrics.add_metric("NaN", float("nan"), "count", metric_type=MetricTypes.GAUGE)
metrics.add_metric("Large", 1e15, "count")
metrics.add_metric("Fine", 1, "widgets", metric_type=MetricTypes.GAUGE)
metrics.add_metric_to_cache("Labels", "count", ["A"]).add_or_update(1, ["a", "b"])
result = ["ok"]
"""
    assert server.run(record, "odd").text == "ok"
    assert server.run(record, "odd").text == "ok"
    wait_until("the last one is told", lambda: "Fine" in server.metrics(), 5)
    for name in ("Down", "Labels"):
        server.wait_for_output(f"Failed to update metric with name:{name}")
    for name in ("Two", "Requests2XX", "NaN"):
        told = rf'is not recorded[^\n]* metric="{name}"'
        wait_until(f"{name} is told", lambda told=told: re.search(told, server.output))
        assert len(re.findall(told, server.output)) == 1
    found = server.page()
    assert found.types["Requests2XX"] == "counter"
    assert not any(name in ("Down", "Labels", "NaN") for name, _ in found.samples)
    assert found.all("Large") == [2e15]
    assert "# HELP Fine Torchserve prometheus gauge metric with unit: widgets\n" in server.metrics()


CONFIG = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"
ts_metrics:
  counter:
    - name: Requests2XX
      unit: Count
      dimensions: [*level, "Hostname"]
model_metrics:
  counter:
    - name: Hits
      unit: count
      dimensions: [*model_name, *level]
    - name: Zoned
      unit: count
      dimensions: ["Zone", *model_name, *level]
  gauge:
    - name: HandlerTime
      unit: ms
      dimensions: [*model_name, *level]
"""


@pytest.mark.parametrize("auto_detect", [None, False, True])
def test_a_file_declares_what_is_recorded_mt_02(start, tmp_path, auto_detect):
    file = tmp_path / "metrics.yaml"
    file.write_text(CONFIG)
    settings = [f"metrics_config={file}"]
    if auto_detect is not None:
        settings.append(f"model_metrics_auto_detect={str(auto_detect).lower()}")
    server = start(config=settings)
    server.serve("m")
    record = """
from ts.metrics.metric_type_enum import MetricTypes
metrics = context.metrics
metrics.add_counter("Hits", 2)
metrics.add_counter("Zoned", 1)
metrics.add_counter("Unlisted", 1)
metrics.add_metric("HandlerTime", 5, "ms", metric_type=MetricTypes.COUNTER)
result = ["ok"]
"""
    for _ in range(2):
        assert server.run(record, "m").text == "ok"
    wait_until("declared ones show", lambda: server.page().value("Hits") == 4, 5)
    found = server.page()
    assert ("Unlisted" in found.types, "PredictionTime" in found.types) == (
        bool(auto_detect),
        bool(auto_detect),
    )
    reasons = {"Zoned": "labels", "HandlerTime": "it is a gauge and was recorded as a counter"}
    if not auto_detect:
        reasons["Unlisted"] = "does not declare it"
    for name, reason in reasons.items():
        told = rf'is not recorded: [^\n]*{reason}[^\n]* metric="{name}"'
        wait_until(f"{name} is told", lambda told=told: re.search(told, server.output), 5)
        assert len(re.findall(rf'is not recorded[^\n]* metric="{name}"', server.output)) == 1


def test_a_label_with_a_value_per_request_does_not_fill_the_page_mt_09(start):
    server = start()
    server.serve("many")
    record = """
from ts.metrics.dimension import Dimension
for number in range(10_000):
    context.metrics.add_counter("Each", 1, dimensions=[Dimension("Id", str(number))])
result = ["ok"]
"""
    for _ in range(10):
        assert server.run(record, "many").text == "ok"

    def counted():
        found = server.page()
        return sum(found.all("Each")), found.value("ts_metric_series_dropped_total", metric="Each")

    wait_until("all updates are told", lambda: counted() == (5_000, 95_000), 10)
    assert len(server.page().all("Each")) == 500
    assert server.output.count("is not recorded") == 1


def test_what_a_handler_prints_as_a_metric_is_one(start):
    server = start()
    server.serve("prints")
    record = """
print("[METRICS]Printed.ms:1.5|#ModelName:prints,Level:Model|#type:GAUGE|#hostname:h,1656944816,a")
print("[METRICS]nonsense", flush=True)
result = ["ok"]
"""
    assert server.run(record, "prints").text == "ok"
    found = wait_until("it shows", lambda: "Printed" in (page := server.page()).types and page, 5)
    assert found.value("Printed", ModelName="prints") == 1.5
    server.wait_for_output('Failed to parse metrics line: "nonsense".')
    assert not re.search(r"MODEL_LOG - \[METRICS\]", server.output)


def test_lines_of_the_log_name_their_requests_and_keep_units_mt_12(start):
    server = start()
    server.serve("logged")
    record = """
metrics = context.metrics
metrics.add_metric("Odd", 12345678, "wid|gets", idx=0)
metrics.add_size("Held", 1.5, unit="kB")
result = ["ok"]
"""
    answer = server.run(record, "logged", headers={"x-request-id": "mine-1"})
    assert answer.text == "ok"

    def lines():
        return {
            line.partition(".")[0]: line
            for line in server.metric_lines("MODEL_METRICS")
            if "ModelName:logged" in line
        }

    wait_until("all lines are there", lambda: {"Odd", "Held", "PredictionTime"} <= set(lines()), 5)
    held = lines()["Held"]
    assert held.startswith("Held.Kilobytes:1.5|#ModelName:logged,Level:Model|#hostname:"), held
    assert ",requestID:mine-1,timestamp:" in held
    assert lines()["Odd"].startswith("Odd.wid_gets:1.2345678E7|#"), lines()["Odd"]
    assert lines()["PredictionTime"].startswith("PredictionTime.ms:")
    for log in ("TS_METRICS", "MODEL_METRICS"):
        for line in server.metric_lines(log):
            assert LINE.fullmatch(line), line


def test_series_of_a_handler_go_with_its_model_mt_10(start):
    server = start()
    record = 'context.metrics.add_counter("Mine", 1)\nresult = ["ok"]'
    for _ in range(3):
        server.serve("comes")
        assert server.run(record, "comes").text == "ok"
        wait_until("it counts from nothing", lambda: server.page().value("Mine") == 1, 5)
        assert server.manage("DELETE", "/models/comes").status_code == 200
        assert "comes" not in server.metrics()
        assert "Mine" not in server.page().types


def test_responses_are_counted_by_their_status(server):
    before = server.page().value("Requests4XX")
    assert server.infer("/nowhere").status_code == 404
    assert server.manage("PATCH", "/models").status_code == 405
    assert server.page().value("Requests4XX") == before + 2
    before = server.page().value("Requests5XX")
    assert server.run("raise ValueError").status_code == 503
    assert server.page().value("Requests5XX") == before + 1
