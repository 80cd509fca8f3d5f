"""`context` and `context.metrics`."""

import json
import logging

import pytest
from conftest import item

from ts.context import Context, RequestProcessor
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_cache_errors import (
    GeneralMetricsCacheError,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_encoder import MetricEncoder
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.service import emit_metrics


def answer(load, expression, items=None, **kwargs):
    source = f"def handle(data, context):\n    return data and [[{expression}]] * len(data)\n"
    kind, _, message, replies, _ = load({"handler.py": source}, **kwargs).run(items or [item()])
    assert kind == "ok", message
    return json.loads(replies[0][3])[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("context.request_ids", {"0": "a", "1": "b"}),
        (
            "[context.get_request_id(), context.get_request_id(1), context.get_request_id(2)]",
            ["a", "b", None],
        ),
        ("context.get_request_header(0, 'x-mark')", "1"),
        ("context.get_request_header(0, 'X-Mark')", "1"),
        ("context.get_request_header(0, 'absent')", None),
        ("context.get_request_header(1, 'explain')", "True"),
        ("context.get_request_header(0, 'body')", {"content-type": "application/octet-stream"}),
        (
            "context.get_all_request_header(1)",
            {"body": {"content-type": "application/octet-stream"}, "explain": "True"},
        ),
        ("[context.get_sequence_id(0), context.get_sequence_id(1)]", ["s1", None]),
        ("len(context.request_processor)", 2),
        ("context._request_processor", None),
    ],
)
def test_requests_in_the_context(load, expression, expected):
    items = [
        item(request_id="a", **{"x-mark": "1", "ts_request_sequence_id": "s1"}),
        item(request_id="b", explain="True"),
    ]
    assert answer(load, expression, items) == expected


def test_names_of_sequence_headers_are_the_servers_unless_the_environment_has_them(
    load, monkeypatch
):
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_END", "x-last")
    source = """
def handle(data, context):
    names = (context.header_key_sequence_start, context.header_key_sequence_end)
    return [" ".join([context.get_sequence_id(0), *names])] if data else None
"""
    names = ("x-session", "x-first", "x-end")
    session = load({"handler.py": source}, handler="handler.py:handle", sequence_headers=names)
    _, _, _, replies, _ = session.run([item(**{"x-session": "s1"})])
    assert bytes(replies[0][3]) == b"s1 x-first x-last"


def test_a_header_hides_the_part_of_its_name():
    context = Context("m", "/", None, 1, None, "")
    context.begin_batch([("a", {"host": "here"}, [("host", "text/plain", bytearray())])])
    assert context.get_all_request_header(0) == {"host": "here"}


def test_during_load_there_are_no_requests():
    context = Context("m", "/", None, 1, None, "")
    assert context.request_ids is None
    assert context.get_request_id() is None
    assert context.request_processor == []


def test_free_attributes_of_the_context_persist(load):
    source = """
def handle(data, context):
    if data is None:
        context.cache = {"calls": 0}
        return None
    context.cache["calls"] += 1
    return [context.cache["calls"]] * len(data)
"""
    session = load({"handler.py": source})
    assert [session.run([item()])[3][0][3] for _ in range(3)] == [b"1", b"2", b"3"]


def test_the_context_as_unit_tests_of_archives_build_it():
    context = Context("m", "/dir", {"model": {}}, 1, 0, "0.12.0", metrics="any")
    context.request_ids = {0: "r"}
    context.request_processor = [RequestProcessor({"Content-Type": "text/plain"})]
    assert context.get_request_id(0) == "r"
    assert context.get_request_header(0, "content-type") == "text/plain"
    context._request_processor[0].add_response_property("x", "1")
    context.request_processor[0].report_status(201)
    assert context.get_response_headers(0) == {"x": "1"}
    assert context.get_response_status(0) == (201, None)


def emitted(load, statements):
    body = "\n    ".join(["if data is None: return None", *statements, "return ['x'] * len(data)"])
    session = load(
        {"handler.py": f"def handle(data, context):\n    m = context.metrics\n    {body}\n"}
    )
    kind, _, message, _, metrics = session.run([item(request_id="a"), item(request_id="b")])
    assert kind == "ok", message
    name, elapsed, unit, metric_type, dimensions, ids = metrics[-1]
    assert (name, unit, metric_type, ids) == ("PredictionTime", "Milliseconds", "gauge", "a,b")
    assert dimensions == [("ModelName", "m"), ("Level", "Model")]
    assert 0 < elapsed < 60_000
    return metrics[:-1]


MODEL = [("ModelName", "m"), ("Level", "Model")]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("m.add_counter('n', 2)", ("n", 2.0, "Count", "counter", MODEL, "a,b")),
        ("m.add_counter('n', 2, 1)", ("n", 2.0, "Count", "counter", MODEL, "b")),
        ("m.add_counter('n', 2, 9)", ("n", 2.0, "Count", "counter", MODEL, "a,b")),
        ("m.add_time('n', 1.5)", ("n", 1.5, "Milliseconds", "gauge", MODEL, "a,b")),
        ("m.add_time('n', 1.5, None, 's')", ("n", 1.5, "Seconds", "gauge", MODEL, "a,b")),
        ("m.add_size('n', 1)", ("n", 1.0, "Megabytes", "gauge", MODEL, "a,b")),
        ("m.add_size('n', 1, 0, 'kB')", ("n", 1.0, "Kilobytes", "gauge", MODEL, "a")),
        ("m.add_percent('n', 50)", ("n", 50.0, "Percent", "gauge", MODEL, "a,b")),
        (
            "m.add_error('n', 1)",
            ("n", 1.0, "unit", "counter", [("Level", "Error"), ("ModelName", "m")], "a,b"),
        ),
        ("m.add_metric('n', 1, 'Things')", ("n", 1.0, "Things", "counter", MODEL, "a,b")),
        (
            "from ts.metrics.metric_type_enum import MetricTypes as T; "
            "m.add_metric('n', -1, 'Things', metric_type=T.HISTOGRAM)",
            ("n", -1.0, "Things", "histogram", MODEL, "a,b"),
        ),
        (
            "from ts.metrics.dimension import Dimension as D; "
            "m.add_counter('n', 1, dimensions=[D('Zone', 7)])",
            ("n", 1.0, "Count", "counter", [("Zone", "7"), *MODEL], "a,b"),
        ),
        (
            "m.add_metric_to_cache('n', 'count', ['Zone']).add_or_update(1, ['x'])",
            ("n", 1.0, "Count", "counter", [("Zone", "x")], ""),
        ),
        (
            "m.add_metric_to_cache('n', 'count', ['Zone']).update(1, 'r')",
            ("n", 1.0, "Count", "counter", [], "r"),
        ),
    ],
)
def test_each_way_to_emit(load, call, expected):
    assert emitted(load, [call]) == [expected]


def test_metrics_of_load_arrive_with_the_first_batch_and_of_a_failed_one_with_it(load):
    source = """
def handle(data, context):
    context.metrics.add_counter("calls", 1)
    if data is not None:
        raise ValueError
"""
    session = load({"handler.py": source})
    first, second = session.run([item()])[4], session.run([item()])[4]
    assert [metric[0] for metric in first + second] == ["calls"] * 3
    load_id = first[0][5]
    assert load_id not in ("", "id-0") and first[1][5] == second[0][5] == "id-0"


@pytest.mark.parametrize(
    ("value", "dimension_values"),
    [(-1, ["x"]), (1, []), (1, ["x", "y"]), ("many", ["x"]), (None, ["x"])],
)
def test_an_update_that_makes_no_sense_is_logged_only(caplog, value, dimension_values):
    sent = []
    cache = MetricsCacheYamlImpl(model_name="m", sink=sent.append)
    metric = cache.add_metric_to_cache("n", "count", ["Zone"], MetricTypes.COUNTER)
    with caplog.at_level(logging.ERROR):
        metric.add_or_update(value, dimension_values)
    assert "[METRICS]Failed to update metric with name:n" in caplog.text
    assert sent == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cache: cache.add_time("n", 1, unit="h"), MetricsCacheValueError),
        (lambda cache: cache.add_size("n", 1, unit="TB"), MetricsCacheValueError),
        (lambda cache: cache.get_metric("n"), MetricsCacheKeyError),
        (lambda cache: cache.get_metric("HandlerTime"), MetricsCacheKeyError),
        (lambda cache: cache.add_metric_to_cache(1, "count"), MetricsCacheTypeError),
        (lambda cache: cache.add_metric_to_cache("n", None), MetricsCacheTypeError),
        (lambda cache: cache.add_metric_to_cache("n", "count", "Zone"), MetricsCacheTypeError),
        (lambda cache: cache.add_metric_to_cache("n", "count", [1]), MetricsCacheTypeError),
        (lambda cache: cache.add_metric_to_cache("n", "count", [], "c"), MetricsCacheTypeError),
    ],
)
def test_errors_of_the_interface(call, error):
    with pytest.raises(error) as raised:
        call(MetricsCacheYamlImpl(model_name="m"))
    assert isinstance(raised.value, GeneralMetricsCacheError)


def test_declared_metrics_are_known():
    cache = MetricsCacheYamlImpl(model_name="m")
    assert cache.cache_keys() == [MetricTypes.GAUGE]
    metric = cache.get_metric("HandlerTime", MetricTypes.GAUGE)
    assert (metric.unit, metric.dimension_names) == ("Milliseconds", ["ModelName", "Level"])


def test_a_configuration_file_declares_more(tmp_path):
    path = tmp_path / "metrics.yaml"
    path.write_text(
        "model_metrics:\n  counter:\n    - {name: hits, unit: count, dimensions: [Zone]}\n"
    )
    cache = MetricsCacheYamlImpl(str(path), "m")
    cache.initialize_cache()
    assert cache.get_metric("hits").dimension_names == ["Zone"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, MetricsCacheIOError),
        ("a: [", MetricsCachePyYamlError),
        ("- 1", MetricsCacheTypeError),
        ("a: 1", MetricsCacheKeyError),
        ("model_metrics: {counter: [{name: x}]}", MetricsCacheKeyError),
        ("model_metrics: {sum: []}", MetricsCacheKeyError),
    ],
)
def test_a_configuration_file_that_is_wrong(tmp_path, text, error):
    path = tmp_path / "metrics.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error):
        MetricsCacheYamlImpl(str(path), "m").initialize_cache()


def test_printed_metrics_have_the_form_that_the_server_reads(capsys):
    emit_metrics([Metric("n", 1.5, "ms", [Dimension("Level", "Model")], "r")])
    line = capsys.readouterr().out.strip()
    assert line.startswith("[METRICS]n.Milliseconds:1.5|#Level:Model|#type:GAUGE|#hostname:")
    assert line.endswith(",r")


def test_declared_metrics_of_the_server_can_be_got(load):
    source = """
from ts.metrics.metric_type_enum import MetricTypes
def handle(data, context):
    if data is not None:
        context.metrics.get_metric("Hits").add_or_update(2, ["north"], "r")
        context.metrics.get_metric("Depth", MetricTypes.HISTOGRAM).add_or_update(0.5)
        return ["x"]
"""
    declared = [("Hits", "counter", "count", ["Zone"]), ("Depth", "histogram", "ms", [])]
    session = load({"handler.py": source}, declared_metrics=declared)
    hits, depth, _ = session.run([item()])[4]
    assert hits == ("Hits", 2.0, "Count", "counter", [("Zone", "north")], "r")
    assert depth == ("Depth", 0.5, "Milliseconds", "histogram", [], "")


def test_ids_of_requests_can_be_set_outside_of_a_batch():
    sent = []
    cache = MetricsCacheYamlImpl(model_name="m", sink=sent.append)
    cache.set_request_ids({0: "a", 1: "b"})
    assert cache.request_ids == {0: "a", 1: "b"}
    cache.add_counter("n", 1, 1)
    cache.add_counter("n", 1)
    cache.set_request_ids("c")
    cache.add_counter("n", 1, 1)
    assert [emission[5] for emission in sent] == ["b", "a,b", "c"]


def test_the_store_of_older_archives(capsys):
    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("n", 1, 0)
    store.add_counter("n", 2, 0)
    store.add_time("t", 1.5)
    store.add_size("s", 2, unit="GB")
    store.add_percent("p", 50, dimensions=[Dimension("Zone", "x")])
    store.add_error("e", 1)
    store.add_metric("o", 1, unit="things")
    with pytest.raises(ValueError, match="`h` of `t`"):
        store.add_time("t", 1, unit="h")
    emit_metrics(store.store)
    lines = [line.partition("|#hostname:")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "[METRICS]n.Count:3|#ModelName:m,Level:Model|#type:COUNTER",
        "[METRICS]t.Milliseconds:1.5|#ModelName:m,Level:Model|#type:GAUGE",
        "[METRICS]s.Gigabytes:2|#ModelName:m,Level:Model|#type:GAUGE",
        "[METRICS]p.Percent:50|#Zone:x,ModelName:m,Level:Model|#type:GAUGE",
        "[METRICS]e.unit:1|#Level:Error,ModelName:m|#type:GAUGE",
        "[METRICS]o.things:1|#ModelName:m,Level:Model|#type:GAUGE",
    ]
    told = json.loads(json.dumps(store.store[0], cls=MetricEncoder))
    assert (told["MetricName"], told["Value"], told["RequestId"]) == ("n", 3, "a")
    assert told["Dimensions"][0] == {"Name": "ModelName", "Value": "m"}
