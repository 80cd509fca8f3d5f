"""What nearly every script around TorchServe relies on (section 0).

Starting in the background, the pid file and `--stop` are in ../test_start.py too, at the level of
the command line.
"""

import shutil
import signal
import socket
import subprocess
import sys

import pytest
from harness import LIMIT, ROOT, SERVER, is_running, write_model

WHO = "def handle(data, context):\n    return data and [context.model_name] * len(data)\n"

# What a client of TorchServe does, word for word; the ports are not TorchServe's.
CLIENT = """
import sys
from ts import launcher

store, config, management = sys.argv[1:]
launcher.MODELS = management + "/models"
options = dict(model_store=store, snapshot_file=config, no_config_snapshots=True,
               disable_token=True, enable_model_api=True)
first = launcher.start(**options)
answer = launcher.register_model("one", "one")
print("one", answer.status_code, flush=True)
second = launcher.start(models="one,two=one", **options)
print("first ended", list(iter(lambda: first.get(timeout=30), None))[-1:] != [], flush=True)
params = (("url", "one"), ("model_name", "three"), ("initial_workers", "1"))
print("three", launcher.register_model_with_params(params).status_code, flush=True)
while "loud words" not in second.get(timeout=30):
    pass
print("heard", flush=True)
launcher.stop()
print("ended", list(iter(lambda: second.get(timeout=30), None))[-1:] != [], flush=True)
launcher.stop()
try:
    launcher.start(**options | {"model_store": store + "/absent"})
except RuntimeError as error:
    print("failed", "directory not found" in str(error))
"""


def free_addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


def test_the_python_launcher_starts_hears_and_stops_a_server(start):
    """ts.launcher, as test_utils.py and conftest.py use it."""
    server = start.make()
    inference, management, metrics = free_addresses(3)
    server.config_file.write_text(
        f"inference_address={inference}\nmanagement_address={management}\n"
        f"metrics_address={metrics}\ndefault_workers_per_model=1\n"
    )
    write_model(server.store, "one", "print('loud words')\n" + WHO)
    where = {
        "cwd": server.folder,
        "env": server.env | {"TORCHSERVE": str(SERVER), "PYTHONPATH": str(ROOT / "handlers")},
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, server.store, server.config_file, management],
            **where,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
        )
    finally:
        subprocess.run([SERVER, "--stop", "--foreground"], **where, timeout=LIMIT, check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("TorchServe")]
    assert told == [
        "one 200",
        "first ended True",
        "three 200",
        "heard",
        "ended True",
        "failed True",
    ], done.stdout
    assert not (server.temp / ".model_server.pid").exists()


# The command with a package in the engine's place and a GPU that is not there.
LANGUAGE_MODEL = """
import sys, types
sys.modules["vllm"] = module = types.ModuleType("vllm")
module.__spec__ = types.SimpleNamespace(name="vllm")
from ts import llm_launcher
llm_launcher.device_count = lambda: 1
llm_launcher.main(["--model_name", "chat", "--disable_token_auth"])
"""


def test_the_launcher_of_language_models_becomes_the_server(start):
    """ts.llm_launcher: signals and the exit code are the server's."""
    server = start.make()
    (server.folder / "model_store").mkdir()
    with server.output_file.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LANGUAGE_MODEL],
            cwd=server.folder,
            env=server.env | {"TORCHSERVE": str(SERVER), "PYTHONPATH": str(ROOT / "handlers")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        server.wait_for_output("Model server started")
        assert int((server.temp / ".model_server.pid").read_text()) == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0, server.output
    finally:
        process.kill()
        process.wait()
    assert (server.folder / "model_store/chat/model-config.yaml").exists()
    assert not (server.folder / "key_file.json").exists()
    assert not (server.folder / "logs/config").exists(), "it is started without snapshots"


def test_options_may_stand_with_an_equals_sign(start):
    """`--flag value` and `--flag=value`, plugins, a comma list of models."""
    server = start.make(["default_workers_per_model=1"])
    for name in ("alpha", "beta"):
        write_model(server.store, name, WHO)
    flows = server.folder / "flows"
    flows.mkdir()
    server.command = lambda *more: [
        SERVER,
        *("--start", f"--model-store={server.store}", f"--ts-config={server.config_file}"),
        *("--no-config-snapshots", "--disable-token-auth", "--enable-model-api"),
        *(f"--workflow-store={flows}", "--plugins-path=plugins", "--models=alpha,beta"),
        *(f"--ready-file={server.ready_file}", *more),
    ]
    server.start()
    server.wait_for_output("Model server started")
    assert server.models() == ["alpha", "beta"]


def test_a_badly_glued_line_does_not_stop_the_start(start):
    """Two settings on one line, and a last line without its end."""
    server = start.make()
    server.config_file.write_text(
        server.config_file.read_text()
        + "async_logging=trueservice_envelope=kserve\njob_queue_size=7"
    )
    server.start()
    server.serve("who", WHO)
    assert server.describe("who")["jobQueueStatus"]["remainingCapacity"] == 7


def test_relative_paths_are_those_of_the_folder_it_was_started_in(start):
    """Relative paths in a configuration that lies somewhere else."""
    server = start.make()
    (server.folder / "flows").mkdir()
    elsewhere = server.folder / "elsewhere" / "config.properties"
    elsewhere.parent.mkdir()
    text = server.config_file.read_text() + "workflow_store=flows\nmodel_store=store\n"
    elsewhere.write_text(text)
    server.told_config = ["--ts-config", "elsewhere/config.properties"]
    command = server.command
    server.command = lambda *more: [
        part for part in command(*more) if part not in ("--model-store", server.store)
    ]
    server.start()
    server.serve("who", WHO)
    assert server.predict("who", b"x").text == "who"


def test_each_kind_of_url_registers(start, web, digits):
    """A name in the store, a link, a folder, its absolute path, a web address."""
    server = start()
    write_model(server.store, "folder", WHO)
    shutil.copy(digits, server.store / "copied.mar")
    (server.store / "link.mar").symlink_to(digits)
    shutil.copy(digits, web.folder / "fetched.mar")
    urls = {
        "copied": "copied.mar",
        "link": "link.mar",
        "folder": "folder",
        "absolute": server.store / "folder",
        "fetched": web.url("fetched.mar"),
    }
    for name, url in urls.items():
        answer = server.register(url, model_name=name)
        assert answer.status_code == 200, (name, answer.text)
    assert server.models() == sorted(urls)


def test_a_worker_is_the_python_of_the_environment_in_the_models_folder(start, tmp_path):
    """The worker's interpreter, folder, `PYTHONPATH` and package `ts`."""
    (tmp_path / "of_the_operator.py").write_text("WORD = 'imported'\n")
    server = start(env={"PYTHONPATH": tmp_path, "MARK": "handed on"})
    server.serve("scripted")
    code = """
import importlib, os, sys, of_the_operator
for name in (
    "torch_handler.base_handler", "torch_handler.image_classifier",
    "torch_handler.vision_handler", "context", "handler_utils.utils", "metrics.dimension",
    "metrics.metric_type_enum", "metrics.unit",
):
    importlib.import_module("ts." + name)
result = [[of_the_operator.WORD, os.environ["MARK"], sys.prefix,
           os.path.samefile(os.getcwd(), context.system_properties["model_dir"])]]
"""
    answer = server.run(code)
    assert answer.status_code == 200, server.output
    assert answer.json() == ["imported", "handed on", str((ROOT / ".venv").absolute()), True]


@pytest.mark.parametrize("fault", ["store", "config", "port"])
def test_a_server_that_cannot_start_closes_its_output(start, fault):
    """A client that reads the pipe of a start that fails must not hang."""
    server = start.make()
    if fault == "store":
        server.args = ["--model-store", server.folder / "absent"]
    elif fault == "config":
        server.told_config = ["--ts-config", server.folder / "absent"]
    else:
        with server.config_file.open("a") as config:
            config.write(f"inference_address={start().inference}\n")
    done = subprocess.run(
        server.command(),
        cwd=server.folder,
        env=server.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert "Model server started" not in done.stdout
    assert ("in use" if fault == "port" else "not found") in done.stdout.lower()
    pid_file = server.temp / ".model_server.pid"
    assert not (pid_file.exists() and is_running(int(pid_file.read_text())))
