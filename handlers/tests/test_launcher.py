"""The launchers, with a script in the server's place: the real one is for tests/python."""

import http.server
import json
import os
import sys
import threading
import types
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from ts import launcher, llm_launcher

# Records its arguments; the rest is what it does when it is started.
SCRIPT = """\
#!{python}
import json, os, sys
with open({record!r}, "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
if "--stop" in sys.argv:
    sys.exit(0)
{body}
"""


@pytest.fixture
def torchserve(tmp_path, monkeypatch):
    """Puts a script in the server's place; returns how to read what it was called with."""
    record = tmp_path / "calls"
    path = tmp_path / "bin" / "torchserve"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.delenv("TORCHSERVE", raising=False)

    def write(body=""):
        path.write_text(SCRIPT.format(python=sys.executable, record=str(record), body=body))
        path.chmod(0o755)
        return lambda: [json.loads(line) for line in record.read_text().splitlines()]

    return write


STARTS = "print('some words'); print('Model server started.', flush=True)\n"


def test_a_start_stops_what_runs_and_returns_later_lines(torchserve):
    calls = torchserve(STARTS + "print('later', file=sys.stderr); print('last')")
    lines = launcher.start(
        model_store="store",
        snapshot_file=Path("a.cfg"),
        no_config_snapshots=True,
        plugin_folder="plugins",
        disable_token=True,
        models=["a.mar", "b=c.mar"],
        enable_model_api=True,
    )
    assert sorted(iter(lambda: lines.get(timeout=20), None)) == ["last", "later"]
    stopped, started = calls()
    assert stopped == ["--stop", "--foreground"]
    paths = ["--model-store", "store", "--ts-config", "a.cfg", "--plugins-path", "plugins"]
    switches = ["--no-config-snapshots", "--disable-token-auth", "--enable-model-api"]
    assert started == ["--start", *paths, *switches, "--models", "a.mar", "b=c.mar"]


def test_a_start_without_parameters_leaves_all_to_the_configuration(torchserve):
    calls = torchserve(STARTS)
    launcher.start()
    launcher.start(models="a.mar")
    assert calls()[1::2] == [["--start"], ["--start", "--models", "a.mar"]]


def test_a_server_that_ends_instead_of_starting_is_told_with_its_words(torchserve):
    torchserve(r"sys.stdout.buffer.write(b'Invalid configuration: \xff\n'); sys.exit(1)")
    with pytest.raises(RuntimeError, match=r"instead of starting:\nInvalid configuration: \\xff"):
        launcher.start()


def test_a_server_that_never_starts_is_stopped_at_the_limit(torchserve, monkeypatch):
    calls = torchserve("print('thinking', flush=True); os.execvp('/bin/sleep', ['sleep', '1'])")
    monkeypatch.setattr(launcher, "START_SECONDS", 0.5)
    with pytest.raises(
        TimeoutError, match=r"not started within 0\.5 s, and was stopped:\nthinking"
    ):
        launcher.start()
    assert calls()[-1] == ["--stop", "--foreground"]


def test_lines_that_nobody_reads_do_not_pile_up(torchserve, monkeypatch):
    monkeypatch.setattr(launcher, "KEPT_LINES", 10)
    torchserve(STARTS + "print('\\n'.join(map(str, range(1000))))")
    lines = launcher.start()
    reader = next(t for t in threading.enumerate() if t.name == "ts-server-output")
    reader.join(20)
    assert list(iter(lines.get_nowait, None)) == [str(number) for number in range(991, 1000)]


def test_a_stop_need_not_wait(torchserve):
    calls = torchserve()
    launcher.stop(wait=False)
    launcher.stop()
    assert calls() == [["--stop"], ["--stop", "--foreground"]]


def test_the_executable_is_named_or_on_the_path_or_beside_python(torchserve, tmp_path, monkeypatch):
    torchserve()
    on_path = str(tmp_path / "bin" / "torchserve")
    assert launcher.executable() == on_path
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert launcher.executable() == on_path
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    with pytest.raises(FileNotFoundError, match="neither on the path nor in"):
        launcher.executable()
    monkeypatch.setenv("TORCHSERVE", on_path)
    assert launcher.executable() == on_path
    monkeypatch.setenv("TORCHSERVE", str(tmp_path))
    (tmp_path / "no-program").write_text("")
    monkeypatch.setenv("TORCHSERVE", str(tmp_path / "no-program"))
    with pytest.raises(FileNotFoundError, match="no executable"):
        launcher.executable()


def test_handlers_run_in_the_python_that_starts_the_server(monkeypatch):
    monkeypatch.setenv("PATH", "/some/bin")
    monkeypatch.setattr(sys, "prefix", "/env")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    environment = launcher.environment()
    assert environment["VIRTUAL_ENV"] == "/env"
    assert environment["PATH"] == "/env/bin:/some/bin"


def test_models_are_registered_by_query_parameters(monkeypatch):
    asked = []

    class Management(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(dict(parse_qsl(urlsplit(self.path).query)))
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Management) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(launcher, "MODELS", f"http://127.0.0.1:{server.server_port}/models")
        # A proxy would not reach it.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        assert launcher.register_model("m", "m.mar").status_code == 202
        pairs = (("url", "n.mar"), ("batch_size", "4"))
        assert launcher.register_model_with_params(pairs).status_code == 202
        server.shutdown()
        thread.join()
    assert asked == [
        {"model_name": "m", "url": "m.mar", "initial_workers": "1", "synchronous": "true"},
        {"url": "n.mar", "batch_size": "4"},
    ]


# --- language models -----------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Makes a package that can be found; it is imported only to build an engine."""

    def make(name, source=""):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


@pytest.fixture
def launched(torchserve, monkeypatch):
    """Runs the command up to the moment in which it becomes the server, on two GPUs."""
    torchserve()
    monkeypatch.setattr(llm_launcher, "device_count", lambda: 2)

    class Became(Exception):
        pass

    def execve(path, line, environment):
        raise Became(line)

    monkeypatch.setattr(os, "execve", execve)

    def run(*arguments):
        with pytest.raises(Became) as became:
            llm_launcher.main(arguments)
        return became.value.args[0][1:]

    return run


def written(folder):
    manifest = json.loads((folder / "MAR-INF/MANIFEST.json").read_text())
    return manifest["model"], yaml.safe_load((folder / "model-config.yaml").read_text())


def test_vllm_serves_a_model_with_torchserves_defaults(launched, engine):
    engine("vllm")
    assert launched() == [
        "--start",
        *("--model-store", "model_store", "--no-config-snapshots", "--foreground"),
        *("--models", "model"),
    ]
    model, config = written(Path("model_store/model"))
    assert model == {
        "modelName": "model",
        "modelVersion": "1.0",
        "handler": "vllm_handler",
        "configFile": "model-config.yaml",
    }
    assert config == {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": 1200,
        "deviceType": "gpu",
        "asyncCommunication": True,
        "parallelLevel": 2,
        "handler": {
            "model_path": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "vllm_engine_config": {
                "max_num_seqs": 256,
                "max_model_len": None,
                "download_dir": None,
                "tensor_parallel_size": 2,
            },
        },
    }


def test_each_option_of_vllm_reaches_its_place(launched, engine, tmp_path):
    engine("vllm")
    line = launched(
        *("--model_name", "chat", "--model_store", "a", "--model_id", "b/c"),
        *("--startup_timeout", "7", "--disable_token_auth", "--vllm_engine.max_num_seqs", "8"),
        *("--vllm_engine.max_model_len", "9", "--vllm_engine.download_dir", "d"),
    )
    assert "--disable-token-auth" in line and line[-2:] == ["--models", "chat"]
    _model, config = written(Path("a/chat"))
    assert config["startupTimeout"] == 7
    handler = config["handler"]
    assert handler["model_path"] == "b/c"
    expected = {"max_num_seqs": 8, "max_model_len": 9, "download_dir": "d"}
    assert handler["vllm_engine_config"] == expected | {"tensor_parallel_size": 2}
    # A second start writes it anew.
    launched("--model_name", "chat", "--model_store", "a", "--startup_timeout", "8")
    assert written(Path("a/chat"))[1]["startupTimeout"] == 8


TRT_LLM = """
import pathlib

class BuildConfig:
    def __init__(self, max_batch_size):
        self.max_batch_size = max_batch_size

class LLM:
    def __init__(self, model, dtype, build_config):
        self.made_from = f"{model} {dtype} {build_config.max_batch_size}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def save(self, folder):
        pathlib.Path(folder).mkdir()
        pathlib.Path(folder, "config.json").write_text(self.made_from)
"""


def test_trt_llm_builds_its_engine_once_for_each_set_of_options(launched, engine, monkeypatch):
    engine("tensorrt_llm", TRT_LLM)
    hub = types.SimpleNamespace(snapshot_download=lambda name: f"/hub/{name}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)

    def engine_of(*arguments):
        launched("--engine", "trt_llm", "--model_id", "a/b", *arguments)
        model, config = written(Path("model_store/model"))
        assert model["handler"] == "trt_llm_handler" and "parallelLevel" not in config
        handler = config["handler"]
        assert handler["tokenizer_dir"] == "/hub/a/b"
        assert handler["kv_cache_config"] == {"free_gpu_memory_fraction": 0.1}
        return Path(handler["engine_dir"])

    first = engine_of()
    assert (first / "config.json").read_text() == "/hub/a/b bfloat16 4"
    (first / "config.json").write_text("kept")
    assert engine_of() == first and (first / "config.json").read_text() == "kept"
    other = engine_of("--dtype", "float16", "--trt_llm_engine.max_batch_size", "8")
    assert (other / "config.json").read_text() == "/hub/a/b float16 8"


@pytest.mark.parametrize("name, package", [("vllm", "vllm"), ("trt_llm", "tensorrt_llm")])
def test_a_missing_engine_is_told_before_anything_is_written(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(llm_launcher.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        llm_launcher.main(["--engine", name])
    assert not Path("model_store").exists()


def test_a_machine_without_a_gpu_is_told_before_anything_is_written(engine, monkeypatch):
    engine("vllm")
    monkeypatch.setattr(llm_launcher, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="no GPU that torch can use"):
        llm_launcher.main([])
    assert not Path("model_store").exists()


def test_a_model_of_somebody_else_is_left_alone(engine, launched):
    engine("vllm")
    manifest = Path("model_store/model/MAR-INF/MANIFEST.json")
    manifest.parent.mkdir(parents=True)
    for theirs in ('{"model": {"handler": "handler.py"}}', "[]", "no JSON"):
        manifest.write_text(theirs)
        with pytest.raises(SystemExit, match="was not written here"):
            llm_launcher.main([])
        assert manifest.read_text() == theirs


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "..", "--flag=x"])
def test_a_name_that_leaves_the_store_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        llm_launcher.main([f"--model_name={name}"])
    assert "cannot be the name of a folder" in capsys.readouterr().err
