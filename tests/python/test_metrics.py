"""What handlers record appears on the metrics API, adds up, and outlives a worker."""

import re

import pytest
from harness import wait_until

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
SERIES = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",)*)\})? (\S+)$')


def parsed(text):
    """Values by name and labels; fails on what a strict reader would not take."""
    values, types, family = {}, {}, None
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, *rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in types, f"two types of {name}"
                types[name] = rest[0]
                family = name
            continue
        found = SERIES.match(line)
        assert found, f"not a sample: {line}"
        name, labels, value = found.groups()
        assert family and name.startswith(family), f"{name} stands among {family}"
        key = (name, labels or "")
        assert key not in values, f"twice: {line}"
        values[key] = float(value)
    return values, types


def sample(server, name, *labels):
    """The only value of a name whose labels hold all of these."""
    values, _ = parsed(server.metrics())
    found = [
        v for (n, given), v in values.items() if n == name and all(one in given for one in labels)
    ]
    assert len(found) <= 1, f"{name} {labels} is not one series"
    return found[0] if found else None


def test_times_of_a_handler_are_told(server):
    server.serve("words", BASE)
    assert server.predict("words", b"four").text == "4"
    for name in ("HandlerTime", "PredictionTime"):
        value = wait_until(
            f"{name} is told", lambda name=name: sample(server, name, 'ModelName="words"')
        )
        assert 0 < value < 60_000
        _, types = parsed(server.metrics())
        assert types[name] == "gauge"
        # The labels and their order are what dashboards were built on.
        assert re.search(
            name + r'\{ModelName="words",Level="Model",Hostname="[^"]+",\} ', server.metrics()
        )


def test_own_metrics_add_up_and_outlive_a_worker_mt_05(server):
    server.serve("counts")
    record = """
metrics = context.metrics
metrics.add_counter("Tokens", 3)
metrics.add_counter("Halves", 0.5)
metrics.add_size("Held", 12, unit="MB")
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
metrics.add_counter("ByZone", 1, dimensions=[Dimension("Zone", "no\\nrth \\"x\\" \\\\ é")])
metrics.add_metric("Depth", 0.3, "count", metric_type=MetricTypes.HISTOGRAM)
result = ["ok"]
"""
    counted = {"Tokens": 3, "Halves": 0.5, "ByZone": 1, "Depth_count": 1, "Depth_sum": 0.3}

    def told(times):
        found = {name: sample(server, name, 'ModelName="counts"') for name in counted}
        return found == pytest.approx({name: times * by for name, by in counted.items()})

    for _ in range(4):
        assert server.run(record, "counts").text == "ok"
    wait_until("four calls are told", lambda: told(4), 5)
    assert sample(server, "Held", 'ModelName="counts"') == 12
    assert server.run("import os; os._exit(1)", "counts").status_code == 500
    for _ in range(2):
        assert server.run(record, "counts").text == "ok"
    wait_until("six calls are told", lambda: told(6), 5)
    _, types = parsed(server.metrics())
    assert (types["Tokens"], types["Held"], types["Depth"]) == ("counter", "gauge", "histogram")
    assert sample(server, "ByZone", r'Zone="no\nrth \"x\" \\ é"') == 6


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
        wait_until(
            f"{name} does not vanish in silence", lambda told=told: re.search(told, server.output)
        )
    values, types = parsed(server.metrics())
    assert types["Requests2XX"] == "counter"
    assert not any(name in ("Down", "Labels", "NaN") for name, _ in values)
    assert [value for (name, _), value in values.items() if name == "Large"] == [2e15]
    assert "# HELP Fine Torchserve prometheus gauge metric with unit: widgets\n" in server.metrics()


def test_a_label_with_a_value_per_request_does_not_fill_the_page_mt_09(start):
    server = start()
    server.serve("many")
    record = """
from ts.metrics.dimension import Dimension
for number in range(3000):
    context.metrics.add_counter("Each", 1, dimensions=[Dimension("Id", str(number))])
result = ["ok"]
"""
    assert server.run(record, "many").text == "ok"
    wait_until("some are told", lambda: "Each" in server.metrics(), 5)
    values, _ = parsed(server.metrics())
    assert 100 < sum(name == "Each" for name, _ in values) <= 1000
    server.wait_for_output("is not recorded")
    assert server.output.count("is not recorded") == 1


def test_responses_are_counted_by_their_status(server):
    before = sample(server, "Requests4XX") or 0
    assert server.infer("/nowhere").status_code == 404
    assert server.manage("PATCH", "/models").status_code == 405
    assert sample(server, "Requests4XX") == before + 2
    before = sample(server, "Requests5XX") or 0
    assert server.run("raise ValueError").status_code == 503
    assert sample(server, "Requests5XX") == before + 1
