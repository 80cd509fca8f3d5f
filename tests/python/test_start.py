"""Starting and stopping as scripts do it: models, background, pid file, configuration."""

import http.server
import json
import os
import selectors
import signal
import subprocess
import threading
import time

import pytest
import requests
from harness import (
    LIMIT,
    ROOT,
    SERVER,
    archive,
    is_running,
    wait_until,
    write_files,
    write_model,
)

ANSWERS = (
    "def handle(data, context):\n    return data and ['{who} ' + context.model_name] * len(data)\n"
)


def pack(folder, name, who):
    write_files(folder / "sources", {f"{who}.py": ANSWERS.replace("{who}", who)})
    handler = folder / f"sources/{who}.py"
    archive(folder, "--model-name", name, "--version", "1.0", "--handler", handler, "--force")
    return folder / f"{name}.mar"


@pytest.fixture
def web(tmp_path):
    """An HTTP server of a folder; yields the folder and its address."""

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{files.server_port}"
        files.shutdown()
        thread.join()


def models_when_loaded(server, names):
    wait_until(f"{names} are loaded", lambda: set(names) <= set(server.models()))
    for name in names:
        server.wait_for_workers(name)
    return server.models()


def test_each_form_of_models_is_loaded(start, web):
    folder, address = web
    server = start.make(["default_workers_per_model=1"])
    pack(server.store, "alpha", "a")
    pack(server.store, "beta", "b")
    pack(server.store, "gamma", "c")
    pack(folder, "fetched", "d")
    pack(folder, "copied", "e")
    (folder / "elsewhere").mkdir()
    (server.store / "broken.mar").write_bytes(b"PK no archive")
    write_model(server.store, "unpacked", ANSWERS.replace("{who}", "f"))
    write_model(folder, "outside", ANSWERS.replace("{who}", "g"))
    server.args = [
        *("--models", "alpha.mar,named=beta.mar", "gamma=gamma.mar", "absent.mar", "broken.mar"),
        *(f"url={address}/fetched.mar?signature=x%3Dy", f"file://{folder}/copied.mar", "unpacked"),
        folder / "outside",
    ]
    server.start()
    expected = ["alpha", "copied", "gamma", "named", "outside", "unpacked", "url"]
    assert models_when_loaded(server, expected) == expected
    answers = {name: server.predict(name, b"x").text for name in expected}
    letters = dict(zip(expected, "aecbgfd", strict=True))
    assert answers == {name: f"{letter} {name}" for name, letter in letters.items()}
    assert all(server.describe(name)["loadedAtStartup"] for name in expected)
    output = server.output
    assert "Failed to load model: absent.mar" in output
    assert "Failed to load model: broken.mar" in output
    assert server.infer("/ping", method="GET").json() == {"status": "Healthy"}
    assert {"fetched.mar", "copied.mar"} <= set(os.listdir(server.store))
    # What was brought into the store goes with its model; what was there stays.
    for name in ("url", "copied", "alpha"):
        assert server.manage("DELETE", f"/models/{name}").status_code == 200
    left = set(os.listdir(server.store))
    assert "alpha.mar" in left and not {"fetched.mar", "copied.mar"} & left


@pytest.mark.parametrize("how", ["option", "file"])
def test_all_loads_whatever_the_store_holds(start, how):
    config = ["default_workers_per_model=1"] + (["load_models=all"] if how == "file" else [])
    server = start.make(config, ["--models", "ALL"] if how == "option" else [])
    pack(server.store, "alpha", "a")
    write_model(server.store, "unpacked", ANSWERS.replace("{who}", "f"))
    pack(server.store, "hidden", "h").rename(server.store / ".hidden.mar")
    (server.store / "notes.txt").write_text("no model")
    server.start()
    assert models_when_loaded(server, ["alpha", "unpacked"]) == ["alpha", "unpacked"]


def test_the_only_model_of_the_start_needs_no_name(start):
    server = start.make(["default_workers_per_model=1", "load_models=alpha.mar"])
    pack(server.store, "alpha", "a")
    server.start()
    models_when_loaded(server, ["alpha"])
    assert server.infer("/invocations", b"x").text == "a alpha"
    assert server.infer("/models/alpha/invoke", b"x").text == "a alpha"
    assert server.infer("/alpha/predict", b"x").text == "a alpha"


def test_models_are_fetched_on_registration_and_refused_if_not_allowed(start, web):
    folder, address = web
    pack(folder, "fetched", "d")
    server = start([rf"allowed_urls={address}/.*"])
    assert server.register(f"{address}/fetched.mar").status_code == 200
    assert server.predict("fetched", b"x").text == "d fetched"
    again = server.register(f"{address}/fetched.mar", model_name="again")
    assert (again.status_code, again.json()["type"]) == (500, "InternalServerException")
    absent = server.register(f"{address}/absent.mar")
    assert (absent.status_code, absent.json()["type"]) == (400, "DownloadArchiveException")
    other = server.register(address.replace("127.0.0.1", "localhost") + "/fetched.mar")
    assert other.status_code == 404
    assert "does not match any allowed URL" in other.json()["message"]
    assert server.models() == ["fetched"]
    assert os.listdir(server.store) == ["fetched.mar"]


# --- in the background ---------------------------------------------------------------------------


class Background:
    """A server that was started and left, as scripts do it; its output is a pipe of ours."""

    def __init__(self, server, env=None):
        self.server = server
        self.env = server.env | (env or {})
        read, write = os.pipe()
        command = server.command()
        launcher = subprocess.Popen(
            command,
            cwd=server.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
        )
        os.close(write)
        self.pipe = read
        self.status = launcher.wait(LIMIT)
        self.text = ""

    def read_until(self, text=None):
        """Reads output until a text has come, or its end if there is none to wait for."""
        deadline = time.monotonic() + LIMIT
        with selectors.DefaultSelector() as ready:
            ready.register(self.pipe, selectors.EVENT_READ)
            while text is None or text not in self.text:
                assert time.monotonic() < deadline, f"never {text!r} in:\n{self.text}"
                if ready.select(0.1):
                    data = os.read(self.pipe, 1 << 16)
                    if not data:
                        assert text is None, f"the output ended without {text!r}:\n{self.text}"
                        break
                    self.text += data.decode()
        return self.text

    def torchserve(self, *args):
        done = subprocess.run(
            [SERVER, *args],
            cwd=self.server.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return done.returncode, done.stdout

    def close(self):
        os.close(self.pipe)


@pytest.fixture
def background(start):
    made = []

    def begin(server=None, **options):
        server = server or start.make(["default_workers_per_model=1"])
        made.append(Background(server, **options))
        return made[-1]

    yield begin
    for one in made:
        one.torchserve("--stop", "--foreground")
        one.close()


def port_is_closed(address):
    try:
        requests.get(f"{address}/ping", timeout=5)
    except requests.ConnectionError:
        return True
    return False


def test_a_server_in_the_background_tells_when_it_listens_and_can_be_stopped(background):
    running = background()
    server = running.server
    assert running.status == 0
    lines = running.read_until("Model server started.").splitlines()
    assert "Model server started." in lines, "a line of its own: scripts look for it"
    server.wait_ready()
    pid = int((server.temp / ".model_server.pid").read_text())
    assert is_running(pid)
    server.serve("scripted")
    hosts = server.worker_pids("scripted")
    assert server.run("print('for the pipe'); result = ['x']").text == "x"
    running.read_until("for the pipe")

    again = subprocess.run(
        server.command(), cwd=server.folder, env=running.env, capture_output=True, text=True
    )
    assert (again.returncode, "TorchServe is already running" in again.stdout) == (1, True)
    assert server.infer("/ping", method="GET").status_code == 200

    assert running.torchserve("--stop", "--foreground") == (0, "")
    assert not is_running(pid) and port_is_closed(server.inference)
    assert not any(map(is_running, hosts))
    running.read_until()  # the end of the pipe: nobody holds it any more
    assert list(server.temp.iterdir()) == []
    code, output = running.torchserve("--stop")
    assert (code, output) == (0, "TorchServe is not currently running.\n")


def test_stop_returns_at_once_and_the_server_ends(background):
    running = background()
    running.read_until("Model server started.")
    pid = int((running.server.temp / ".model_server.pid").read_text())
    assert running.torchserve("--stop") == (0, "TorchServe has stopped.\n")
    wait_until("the server ends", lambda: not is_running(pid))
    running.read_until()


def test_a_start_that_fails_closes_its_output(background, start):
    taken = start()
    server = start.make()
    text = server.config_file.read_text().replace(
        "inference_address=http://127.0.0.1:0", f"inference_address={taken.inference}"
    )
    server.config_file.write_text(text)
    failed = background(server)
    told = failed.read_until()
    assert "Model server started." not in told
    assert "in use" in told.lower() and taken.inference.rpartition(":")[2] in told
    assert failed.torchserve("--stop") == (0, "TorchServe is not currently running.\n")


def test_a_pid_file_of_nobody_or_of_a_stranger_is_no_server_wk_09(background, start):
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        for content in ("999999999", "rubbish", "", str(stranger.pid)):
            server = start.make()
            (server.temp / ".model_server.pid").write_text(content)
            running = background(server)
            assert running.torchserve("--stop")[0] == 0
            running.read_until()
            (server.temp / ".model_server.pid").write_text(content)
            assert running.torchserve("--stop") == (0, "TorchServe is not currently running.\n")
            (server.temp / ".model_server.pid").unlink(missing_ok=True)
        assert stranger.poll() is None, "a stranger is left alone"
    finally:
        stranger.kill()
        stranger.wait()


def test_two_servers_with_their_own_temp_folder_do_not_see_each_other_cf_11(background):
    one, two = background(), background()
    for running in (one, two):
        assert running.status == 0
        running.read_until("Model server started.")
        running.server.wait_ready()
    assert one.torchserve("--stop", "--foreground") == (0, "")
    assert two.server.infer("/ping", method="GET").status_code == 200


def test_stop_removes_the_key_file_and_the_keys_work_until_then(background, start):
    server = start.make()
    running_command = server.command
    server.command = lambda: [part for part in running_command() if part != "--disable-token-auth"]
    running = background(server)
    running.read_until("Model server started.")
    server.wait_ready()
    key_file = server.folder / "key_file.json"
    keys = json.loads(key_file.read_text())
    assert key_file.stat().st_mode & 0o777 == 0o600
    bearer = {"authorization": f"Bearer {keys['management']['key']}"}
    assert server.manage("GET", "/models").status_code == 400
    assert server.manage("GET", "/models", headers=bearer).status_code == 200
    assert keys["management"]["key"] not in running.text
    assert running.torchserve("--stop", "--foreground")[0] == 0
    assert not key_file.exists()


# --- configuration -------------------------------------------------------------------------------


def test_ts_config_file_comes_before_the_option_cf_01(start):
    server = start.make(["load_models=absent.mar"])
    other = server.folder / "other.properties"
    text = server.config_file.read_text().replace("absent.mar", "alpha.mar")
    other.write_text(text + "default_workers_per_model=1")
    pack(server.store, "alpha", "a")
    server.env["TS_CONFIG_FILE"] = str(other)
    server.start()
    models_when_loaded(server, ["alpha"])
    assert "absent.mar" not in server.output


@pytest.mark.parametrize("named_by", ["TS_CONFIG_FILE", "--ts-config"])
def test_a_configuration_that_is_not_there_ends_the_start_cf_01(start, named_by):
    server = start.make()
    missing = server.folder / "no such file"
    if named_by == "TS_CONFIG_FILE":
        server.env["TS_CONFIG_FILE"] = str(missing)
    else:
        server.args = ["--ts-config", missing]
    done = subprocess.run(
        server.command("--foreground"),
        cwd=server.folder,
        env=server.env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 1
    assert f"--ts-config file not found: {missing}" in done.stdout + done.stderr
    assert named_by in done.stdout + done.stderr


def test_every_path_may_have_blanks_and_odd_letters_cf_10(start, tmp_path):
    odd = tmp_path / "a b" / "ü#%"
    (odd / "te mp").mkdir(parents=True)
    (odd / "ven v").symlink_to(ROOT / ".venv")
    server = start.make(
        [f"python={odd}/ven v/bin/python", "load_models=my model.mar"],
        folder=odd / "ser ver",
        env={"TEMP": odd / "te mp"},
    )
    server.config_file = server.config_file.rename(odd / "my config.properties")
    server.told_config = ["--ts-config", server.config_file]
    server.config_file.write_text(
        server.config_file.read_text() + "default_workers_per_model=1\n", encoding="utf-8"
    )
    pack(server.folder, "m", "a").rename(server.store / "my model.mar")
    server.start()
    models_when_loaded(server, ["m"])
    assert server.predict("m", b"x").text == "a m"


def test_a_signal_lets_running_requests_finish(start):
    server = start()
    server.serve("scripted")
    code = "import time; print('begun', flush=True); time.sleep(1); result = ['finished']"
    answers = []
    caller = threading.Thread(target=lambda: answers.append(server.run(code)))
    caller.start()
    server.wait_for_output("begun")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0
    caller.join()
    assert (answers[0].status_code, answers[0].text) == (200, "finished")
