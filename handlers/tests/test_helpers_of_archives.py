"""What archives import: streams of text, groups of processes, and forms and tools of old."""

import importlib
import json
import logging
import queue
import sys
import threading
import types
from pathlib import Path

import pytest
from conftest import item

from ts.context import Context
from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch

# Every name that the contract of handlers has (parts 8.2 to 8.5), by its module.
NAMES = {
    "ts": "__version__",
    "ts.version": "__version__",
    "ts.context": "Context RequestProcessor",
    "ts.service": "PredictionException Service emit_metrics",
    "ts.utils.util": "CLEANUP_REGEX PT2Backend PredictionException check_valid_pt2_backend"
    " deprecated get_yaml_config list_classes_from_module load_label_mapping map_class_to_label",
    "ts.utils.timeit_decorator": "timeit",
    "ts.utils.hf_utils": "download_model",
    "ts.handler_utils.utils": "import_class send_intermediate_predict_response",
    "ts.protocol.otf_message_handler": "send_intermediate_predict_response",
    "ts.handler_utils.timer": "timed",
    "ts.handler_utils.micro_batching": "MicroBatching",
    "ts.handler_utils.hf_batch_streamer": "TextIteratorStreamerBatch",
    "ts.handler_utils.text_utils": "get_tokenizer ngrams_iterator",
    "ts.handler_utils.distributed.pt_pippy": "get_pipeline_driver initialize_rpc_workers",
    "ts.handler_utils.distributed.deepspeed": "get_ds_engine",
    "ts.handler_utils.preprocess.dali": "serialize_pipeline",
    "ts.model_service.model_service": "ModelService",
    "ts.torch_handler.base_handler": "BaseHandler setup_ort_session",
    "ts.torch_handler.vision_handler": "VisionHandler",
    "ts.torch_handler.image_classifier": "ImageClassifier",
    "ts.torch_handler.image_segmenter": "ImageSegmenter",
    "ts.torch_handler.object_detector": "ObjectDetector",
    "ts.torch_handler.densenet_handler": "DenseNetHandler",
    "ts.torch_handler.dali_image_classifier": "DALIImageClassifier",
    "ts.torch_handler.text_handler": "TextHandler",
    "ts.torch_handler.text_classifier": "TextClassifier",
    "ts.torch_handler.distributed.base_deepspeed_handler": "BaseDeepSpeedHandler",
    "ts.torch_handler.distributed.base_pippy_handler": "BasePippyHandler",
    "ts.torch_handler.unit_tests.test_utils.mock_context": "MockContext",
    "ts.torch_handler.unit_tests.test_utils.model_dir": "copy_files download_model",
    "ts.metrics.dimension": "Dimension",
    "ts.metrics.metric": "Metric",
    "ts.metrics.metric_encoder": "MetricEncoder",
    "ts.metrics.metric_type_enum": "MetricTypes",
    "ts.metrics.metrics_store": "MetricsStore",
    "ts.metrics.caching_metric": "CachingMetric",
    "ts.metrics.metric_cache_yaml_impl": "MetricsCacheYamlImpl",
    "ts.metrics.metric_cache_errors": "GeneralMetricsCacheError MetricsCacheIOError"
    " MetricsCacheKeyError MetricsCachePyYamlError MetricsCacheTypeError MetricsCacheValueError",
    "ts.launcher": "start stop",
    "ts.llm_launcher": "main",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_contract_can_be_imported(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_the_documentation_lists_the_same_modules():
    page = Path(__file__).parents[2] / "docs" / "compat.md"
    text = page.read_text(encoding="utf-8")
    assert [module for module in NAMES if f"`{module}`" not in text] == []


# --- text of a batch ------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are pieces of text."""

    PIECES = ("Good", " mor", "ning", " all", ".\n", " Bye", " now", "<end>")

    def decode(self, tokens, skip_special_tokens=False):
        text = "".join(self.PIECES[token] for token in tokens)
        return text.replace("<end>", "") if skip_special_tokens else text


def streamed(rows, prompt=None, **options):
    import torch

    streamer = TextIteratorStreamerBatch(Words(), len(rows), **options)

    def generate():
        if prompt is not None:
            streamer.put(torch.tensor(prompt))
        for column in zip(*rows, strict=True):
            streamer.put(torch.tensor(column))
        streamer.end()

    thread = threading.Thread(target=generate)
    thread.start()
    texts = list(streamer)
    thread.join()
    return texts


def test_words_come_whole_and_each_row_by_itself():
    rows = [[0, 1, 2, 3, 4, 5, 6], [5, 6, 5, 6, 5, 6, 7]]
    texts = streamed(rows, skip_special_tokens=True)
    assert ["".join(row) for row in zip(*texts, strict=True)] == [
        "Good morning all.\n Bye now",
        " Bye now Bye now Bye now",
    ]
    first = [row[0] for row in texts if row[0]]
    assert first == ["Good ", "morning ", "all.\n", " ", "Bye ", "now"]


def test_a_prompt_is_left_out_where_that_is_wished():
    rows = [[1, 2, 3]]
    texts = streamed(rows, prompt=[[0, 3]], skip_prompt=True)
    assert "".join(row[0] for row in texts) == " morning all"
    texts = streamed(rows, prompt=[[0, 3]])
    assert "".join(row[0] for row in texts) == "Good all morning all"


def test_a_stream_that_stops_and_one_of_another_size():
    import torch

    streamer = TextIteratorStreamerBatch(Words(), 2, timeout=0.01)
    with pytest.raises(queue.Empty):
        next(streamer)
    with pytest.raises(ValueError, match="3 rows came for a batch of 2"):
        streamer.put(torch.tensor([1, 2, 3]))


# --- groups of processes --------------------------------------------------------------------------


def context_of(folder, config):
    return Context("m", str(folder), {"model": {}}, 1, None, "", model_yaml_config=config)


def test_an_engine_of_deepspeed(tmp_path, monkeypatch):
    from ts.handler_utils.distributed.deepspeed import get_ds_engine

    section = {"deepspeed": {"config": "ds.json", "checkpoint": "check.json"}}
    with pytest.raises(ModuleNotFoundError, match="needs the package `deepspeed`"):
        get_ds_engine("model", context_of(tmp_path, section))
    stub = types.ModuleType("deepspeed")
    stub.init_inference = lambda model, config: (model, config)
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    with pytest.raises(ValueError, match="no `deepspeed` section"):
        get_ds_engine("model", context_of(tmp_path, {}))
    with pytest.raises(ValueError, match=r"names `ds\.json`, which is not there"):
        get_ds_engine("model", context_of(tmp_path, section))
    (tmp_path / "ds.json").write_text('{"dtype": "float32"}')
    with pytest.raises(ValueError, match=r"names `check\.json`, which is not there"):
        get_ds_engine("model", context_of(tmp_path, section))
    (tmp_path / "check.json").write_text("{}")
    _, config = get_ds_engine("model", context_of(tmp_path, section))
    assert config == {
        "dtype": "float32",
        "checkpoint": str(tmp_path / "check.json"),
        "base_dir": str(tmp_path),
    }


def test_a_handler_for_deepspeed_has_the_device_of_its_process(tmp_path, monkeypatch):
    from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler

    class Handler(BaseDeepSpeedHandler):
        pass

    monkeypatch.setenv("LOCAL_RANK", "3")
    handler = Handler()
    handler.initialize(context_of(tmp_path, {"a": 1}))
    assert (handler.device, handler.get_device(), handler.model_yaml_config) == (3, 3, {"a": 1})


def test_a_pipeline_of_pippy(tmp_path, monkeypatch):
    from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver

    section = {"input_names": ["ids"], "chunks": 2, "model_type": "HF", "index_filename": "i.json"}
    context = context_of(tmp_path, {"pippy": section})
    with pytest.raises(ModuleNotFoundError, match=r"torch\.distributed\.pipelining"):
        get_pipeline_driver("model", 2, context)
    stub, hf = types.ModuleType("pippy"), types.ModuleType("pippy.hf")
    stub.split_into_equal_size = lambda size: ("split", size)
    stub.create_default_args = lambda model, except_keys: (model, except_keys)
    stub.all_compile = lambda model, **options: options
    hf.PiPPyHFTracer = lambda: "tracer"
    monkeypatch.setitem(sys.modules, "pippy", stub)
    monkeypatch.setitem(sys.modules, "pippy.hf", hf)
    assert get_pipeline_driver("model", 2, context) == {
        "num_ranks": 2,
        "chunks": 2,
        "split_policy": ("split", 2),
        "concrete_args": ("model", ["ids"]),
        "tracer": "tracer",
        "index_filename": str(tmp_path / "i.json"),
        "checkpoint_prefix": None,
    }
    for config, text in (({}, "no `pippy` section"), ({"pippy": {}}, "`pippy.input_names`")):
        with pytest.raises(ValueError, match=text):
            get_pipeline_driver("model", 2, context_of(tmp_path, config))


def test_a_handler_for_pippy_needs_a_group_and_joins_it(tmp_path, monkeypatch):
    from ts.torch_handler.distributed import base_pippy_handler

    class Handler(base_pippy_handler.BasePippyHandler):
        pass

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    context = context_of(tmp_path, {"pippy": {}})
    with pytest.raises(RuntimeError, match="set `parallelType: pp` and `torchrun`"):
        Handler().initialize(context)
    joined = []
    monkeypatch.setattr(
        base_pippy_handler, "initialize_rpc_workers", lambda *group: joined.append(group)
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    handler = Handler()
    handler.initialize(context)
    assert joined == [(1, 2, context)]
    assert (handler.local_rank, handler.world_size, str(handler.device)) == (1, 2, "cpu")


# --- forms and tools of old -----------------------------------------------------------------------

OLD = """
from ts.model_service.model_service import ModelService
class Old(ModelService):
    def handle(self, data, context):
        return [f"{self.model_name} {self.gpu} {self.manifest['model']['modelName']}"] * len(data)
"""


def test_a_handler_of_the_predecessors(load):
    session = load({"handler.py": OLD})
    kind, _, message, replies, _ = session.run([item()])
    assert (kind, replies[0][3]) == ("ok", b"m None m"), message


def test_how_long_a_function_takes_is_logged_also_where_it_fails(caplog):
    from ts.utils.timeit_decorator import timeit

    @timeit
    def half(number):
        """Docs."""
        if number % 2:
            raise ValueError(number)
        return number // 2

    with caplog.at_level(logging.INFO):
        assert half(4) == 2 and half.__doc__ == "Docs."
        with pytest.raises(ValueError, match="3"):
            half(3)
    assert caplog.text.count("half took ") == 2


def test_folders_of_models_for_unit_tests(tmp_path):
    from ts.torch_handler.unit_tests.test_utils.model_dir import copy_files, download_model

    source, folder = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    (source / "model.pt").write_text("weights")
    copy_files(str(source), str(folder), ["model.pt"])
    assert (folder / "model.pt").read_text() == "weights"
    path = download_model((source / "model.pt").as_uri(), str(tmp_path / "down"))
    assert Path(path).read_text() == "weights"
    (source / "model.pt").unlink()
    assert download_model((source / "model.pt").as_uri(), str(tmp_path / "down")) == path
    with pytest.raises(ValueError, match="is no address"):
        download_model("model.pt", str(folder))


def test_a_model_of_a_hub(monkeypatch):
    from ts.utils.hf_utils import download_model

    stub = types.ModuleType("huggingface_hub")
    stub.snapshot_download = lambda repo, **options: json.dumps([repo, options])
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)
    found = json.loads(download_model("a/b", revision="main", cache_dir="c"))
    assert found == ["a/b", {"revision": "main", "cache_dir": "c"}]
