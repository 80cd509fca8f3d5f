"""What a model's files may make the server build (`load_policy`), with real files of torch; what is
signed; and what no worker is told (kind K2)."""

import json
import pickle
import subprocess
import zipfile

import pytest
from harness import ARCHIVER, LIMIT, archive, wait_until, write_model

LOADER = """
import pickle, torch
from pathlib import Path

class Handler:
    def initialize(self, context):
        folder = Path(context.system_properties["model_dir"])
        self.loaded = {how}

    def handle(self, data, context):
        return ["loaded"] * len(data)
"""

# How a handler loads each file.
HOWS = {
    "state.pt": 'torch.load(folder / "state.pt", weights_only=False)',
    "whole.pt": 'torch.load(folder / "whole.pt", weights_only=False)',
    "hostile.pt": 'torch.load(folder / "hostile.pt", weights_only=False)',
    "hostile.pkl": 'pickle.load(open(folder / "hostile.pkl", "rb"))',
    "plain.pkl": 'pickle.load(open(folder / "plain.pkl", "rb"))',
    "script.pt": 'torch.jit.load(folder / "script.pt")',
}

# Which of them each policy lets load; `strict` refuses the others when they are registered.
LOADED = {
    "any": set(HOWS),
    "weights-only": {"state.pt", "plain.pkl", "script.pt"},
    "strict": {"script.pt"},
}


class Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Each file's bytes, and the canary."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("files")
    canary = folder / "canary"
    linear = torch.nn.Linear(2, 1)
    torch.save(linear.state_dict(), folder / "state.pt")
    torch.save(linear, folder / "whole.pt")
    torch.save({"weight": linear.weight, "x": Canary(str(canary))}, folder / "hostile.pt")
    torch.jit.script(linear).save(folder / "script.pt")
    (folder / "hostile.pkl").write_bytes(pickle.dumps(Canary(str(canary)), protocol=0))
    (folder / "plain.pkl").write_bytes(pickle.dumps({"cat": [0, 1.5, "x"]}))
    return {name: (folder / name).read_bytes() for name in HOWS}, canary


def put(server, name, file, files, config=""):
    source = LOADER.format(how=HOWS[file])
    write_model(server.store, name, {"handler.py": source, file: files[file]}, config=config)


def register(server, name):
    return server.manage("POST", f"/models?url={name}&initial_workers=1&synchronous=true")


@pytest.mark.parametrize("policy", LOADED)
def test_a_policy_decides_what_files_may_build(start, files, policy):
    contents, canary = files
    server = start([f"load_policy={policy}"])
    for index, file in enumerate(HOWS):
        name = f"m{index}"
        put(server, name, file, contents)
        answer = register(server, name)
        if file in LOADED[policy]:
            assert answer.status_code == 200, (file, answer.text)
            assert server.predict(name, b"x").text == "loaded"
        else:
            told = answer.json()["message"]
            assert f"load_policy={policy}" in told and file in told, (file, told)
            assert str(server.folder) not in told
            # Found by content when it is registered, or refused by the worker that loads it.
            assert answer.status_code == (400 if policy == "strict" else 500)
            if policy == "weights-only":
                named = "Linear" if file == "whole.pt" else "open"
                assert named in told, told
        if policy != "any":
            assert not canary.exists(), file
    assert canary.exists() is (policy == "any"), "the pickles do run where they may"
    canary.unlink(missing_ok=True)


def test_a_model_may_ask_for_less_and_not_for_more(start, files):
    contents, canary = files
    server = start(["load_policy=weights-only"])
    put(server, "more", "hostile.pt", contents, "loadPolicy: any")
    put(server, "less", "state.pt", contents, "loadPolicy: strict")
    put(server, "same", "state.pt", contents)
    assert "load_policy=weights-only" in register(server, "more").json()["message"]
    told = register(server, "less").json()["message"]
    assert "state.pt" in told and "load_policy=strict" in told
    assert register(server, "same").status_code == 200
    assert not canary.exists()


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("zygote", ["true", "false"])
def test_every_way_to_make_a_host_has_the_policy(start, files, isolation, zygote):
    contents, canary = files
    config = [f"worker_isolation={isolation}", f"zygote={zygote}"]
    server = start(["load_policy=weights-only", *config])
    put(server, "good", "state.pt", contents)
    put(server, "bad", "hostile.pkl", contents)
    assert register(server, "good").status_code == 200
    assert "hostile.pkl" in register(server, "bad").json()["message"]
    assert not canary.exists()


def test_a_refused_file_is_no_reason_to_try_again(start, files):
    contents, _ = files
    server = start(["load_policy=weights-only", "default_workers_per_model=1"])
    put(server, "bad", "hostile.pkl", contents)
    answer = server.manage("POST", "/models?url=bad&initial_workers=1&synchronous=false")
    assert answer.status_code == 202

    def failure():
        workers = server.manage("GET", "/models/bad").json()[0]["workers"]
        return workers and workers[0].get("lastFailure")

    assert "load_policy" in wait_until("the worker has failed", failure)


def test_what_the_archiver_signs_the_server_takes(start, tmp_path, files):
    """Keys of openssl, signatures of the archiver, and its exit codes."""
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", key],
        ["openssl", "pkey", "-in", key, "-pubout", "-out", public],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    server = start([f"trusted_keys={public}", "require_signature=true"])
    handler = tmp_path / "handler.py"
    handler.write_text("def handle(data, context):\n    return data and ['ok'] * len(data)\n")
    flags = ("--model-name", "m", "--version", "1.0", "--handler", handler)
    archive(server.store, *flags)
    packed = server.store / "m.mar"

    def run(*arguments):
        command = [ARCHIVER, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        return done.returncode, done.stdout + done.stderr

    code, told = run("verify", "--trusted-keys", public, packed)
    assert code == 1 and "has no signature" in told
    assert server.register("m.mar").status_code == 400
    code, told = run("sign", "--key", key, packed)
    assert code == 0 and "m.mar.sig: signed by " in told
    assert run("verify", "--trusted-keys", public, packed)[0] == 0
    assert server.register("m.mar", initial_workers=1).status_code == 200
    assert server.predict("m", b"x").text == "ok"
    with zipfile.ZipFile(packed, "a") as grown:
        grown.writestr("more.py", "")
    code, told = run("verify", "--trusted-keys", public, packed)
    assert code == 1 and "changed since" in told
    # A key of ours is one of openssl's.
    assert run("keygen", tmp_path / "ours")[0] == 0
    for command in (
        ["openssl", "pkey", "-in", tmp_path / "ours", "-noout", "-text"],
        ["openssl", "pkey", "-pubin", "-in", tmp_path / "ours.pub", "-noout", "-text"],
    ):
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert shown.returncode == 0 and "ED25519" in shown.stdout, shown.stderr


def test_secrets_reach_no_worker_se_13(start):
    secret = "a-secret-of-the-server"
    environment = {
        "TS_INFERENCE_TOKEN": secret,
        "TS_MANAGEMENT_TOKEN": secret,
        "TS_KEYSTORE_PASS": secret,
        "OWN": "kept",
    }
    for zygote in ("true", "false"):
        server = start([f"zygote={zygote}"], env=environment)
        server.serve("scripted")
        seen = server.run("import os, json\nresult = [json.dumps(dict(os.environ))]")
        seen = json.loads(seen.text)
        assert seen["OWN"] == "kept"
        assert not [name for name, text in seen.items() if secret in text]
        for pid in [*server.children()]:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                assert secret.encode() not in environ.read(), pid
