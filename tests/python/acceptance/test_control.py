"""Which calls are allowed, from where models may come, and tokens (section 3)."""

import json
import shutil
import time

import pytest
from harness import wait_until, write_model

ECHO = "def handle(data, context):\n    return data and [context.model_name] * len(data)\n"
REFUSED = {
    "code": 405,
    "type": "MethodNotAllowedException",
    "message": "Requested method is not allowed, please refer to API document.",
}
ENVIRONMENT = "enable_envvars_config=true"

# Of a switch: lines of the file, whether the option is given, the environment, and what holds.
PRECEDENCE = [
    ([], False, None, False),
    ([], True, None, True),
    (["{key}=true"], False, None, True),
    (["{key}=false"], False, None, False),
    (["{key}=false"], True, None, True),
    (["{key}=true", ENVIRONMENT], False, "false", False),
    (["{key}=false", ENVIRONMENT], False, "true", True),
    ([ENVIRONMENT], True, "false", False),
    (["{key}=false", ENVIRONMENT], True, "true", True),
    # The environment does not count unless the file says that it does.
    (["{key}=false"], False, "true", False),
    ([], True, "false", True),
]


def with_switch(start, key, option, case, scheme="http"):
    """A server on which one switch is set in up to three ways."""
    lines, given, variable, _ = case
    env = {} if variable is None else {f"TS_{key.upper()}": variable}
    server = start.make([line.format(key=key) for line in lines], env=env)
    server.switches = [switch for switch in server.switches if switch != option]
    if given:
        server.switches.append(option)
    if scheme == "https":
        server.speak_tls()
    write_model(server.store, "started", ECHO)
    server.args = ["--models", "started"]
    return server.start()


def test_models_cannot_be_changed_unless_that_is_allowed(start, scheme):
    """test_model_control_mode: the whole body of the refusal, and what stays possible."""
    case = ([], False, None, False)
    server = with_switch(start, "enable_model_api", "--enable-model-api", case, scheme)
    assert server.management.startswith(f"{scheme}://")
    write_model(server.store, "other", ECHO)
    wait_until("the model of the start is there", lambda: server.models() == ["started"])
    for method, path in (("POST", "/models?url=other"), ("DELETE", "/models/started")):
        answer = server.manage(method, path)
        assert (answer.status_code, answer.json()) == (405, REFUSED)
    assert server.manage("GET", "/models/started").status_code == 200
    assert server.manage("GET", "/models/other").status_code == 404
    assert server.manage("PUT", "/models/started?min_worker=1").status_code == 202


@pytest.mark.parametrize("case", PRECEDENCE)
def test_the_environment_comes_before_the_option_and_that_before_the_file(start, case):
    """test_model_control_mode: `enable_model_api`."""
    server = with_switch(start, "enable_model_api", "--enable-model-api", case)
    write_model(server.store, "other", ECHO)
    assert server.register("other").status_code == (200 if case[-1] else 405)
    expected = 200 if case[-1] else 405
    assert server.manage("DELETE", "/models/other").status_code == expected


# --- where models come from ----------------------------------------------------------------------


def test_only_listed_addresses_are_fetched(start, web, digits):
    """test_gRPC_allowed_urls, over REST: a list of patterns, and the words of a refusal."""
    for name in ("mnist.mar", "other.mar"):
        shutil.copy(digits, web.folder / name)
    server = start([f"allowed_urls=https://nowhere.example/.*,{web.address}/mnist.*"])
    assert server.register(web.url("mnist.mar")).status_code == 200
    url = web.url("other.mar")
    refused = server.register(url)
    assert (refused.status_code, refused.json()["type"]) == (404, "ModelNotFoundException")
    assert f"Given URL {url} does not match any allowed URL" in refused.json()["message"]
    url = web.url("mnist/../other.mar")
    refused = server.register(url)
    assert refused.status_code == 404
    assert f"Relative path is not allowed in url: {url}" in refused.json()["message"]
    assert server.models() == ["mnist"]


def test_a_start_fetches_the_models_it_names(start, web, digits):
    """test_gRPC_model_control: `--models name=https://…`."""
    shutil.copy(digits, web.folder / "started.mar")
    server = start.make(["default_workers_per_model=1"])
    server.args = ["--models", f"mnist={web.url('started.mar')}"]
    server.start()
    wait_until("it is loaded", lambda: server.models() == ["mnist"])


# --- tokens --------------------------------------------------------------------------------------


def with_tokens(start, *config, scheme="http"):
    server = start.make(config)
    if scheme == "https":
        server.speak_tls()
    server.switches.remove("--disable-token-auth")
    write_model(server.store, "m", ECHO)
    server.start()
    wait_until("the keys are there", lambda: (server.folder / "key_file.json").exists())
    return server


def keys(server):
    return json.loads((server.folder / "key_file.json").read_text())


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def status(server, kind, key=None):
    """Of a call that needs a token of this kind."""
    headers = bearer(key) if key else {}
    if kind == "inference":
        return server.predict("m", b"x", headers=headers).status_code
    return server.manage("GET", "/models/m", headers=headers).status_code


def test_each_api_has_its_key(start, scheme):
    """test_token_authorization: the key file, right and wrong keys."""
    server = with_tokens(start, scheme=scheme)
    told = keys(server)
    assert set(told) == {"management", "inference", "API"}
    management, inference = told["management"]["key"], told["inference"]["key"]
    answer = server.manage("POST", "/models?url=m&initial_workers=1", headers=bearer(management))
    assert answer.status_code == 200, answer.text
    assert status(server, "management", management) == 200
    assert status(server, "inference", inference) == 200
    for kind, wrong in (
        ("management", None),
        ("management", "wrong"),
        ("management", inference),
        ("management", told["API"]["key"]),
        ("inference", None),
        ("inference", management),
    ):
        assert status(server, kind, wrong) == 400, (kind, wrong)
    refused = server.manage("POST", "/models?url=m", headers=bearer("wrong"))
    assert refused.json() == {
        "code": 400,
        "type": "InvalidKeyException",
        "message": "Token Authorization failed. "
        "Token either incorrect, expired, or not provided correctly",
    }
    for header in (management, f"Basic {management}", f"Bearer {management} x", "Bearer"):
        answer = server.manage("GET", "/models/m", headers={"Authorization": header})
        assert answer.status_code == 400, header


@pytest.mark.parametrize("kind", ["inference", "management"])
def test_a_key_is_renewed_with_the_key_of_the_api(start, kind, scheme):
    """test_token_authorization: the file has the new key, and the old one ends at once."""
    server = with_tokens(start, scheme=scheme)
    told = keys(server)
    management = bearer(told["management"]["key"])
    path = "/models?url=m&initial_workers=1"
    assert server.manage("POST", path, headers=management).status_code == 200
    refused = server.manage("GET", f"/token?type={kind}", headers=management)
    assert (refused.status_code, refused.json()["type"]) == (400, "InvalidKeyException")
    assert refused.json()["message"].startswith("Token Authentication failed.")
    assert keys(server) == told
    renewed = server.manage("GET", f"/token?type={kind}", headers=bearer(told["API"]["key"]))
    assert (renewed.status_code, renewed.text) == (200, "\n")
    now = keys(server)
    (other,) = {"inference", "management"} - {kind}
    assert now[kind]["key"] != told[kind]["key"]
    assert (now[other], now["API"]) == (told[other], told["API"])
    assert status(server, kind, told[kind]["key"]) == 400
    assert status(server, kind, now[kind]["key"]) == 200


def test_a_key_ends_after_its_time_and_can_be_renewed(start):
    """test_token_authorization: a fraction of a minute."""
    server = with_tokens(start, "token_expiration_min=0.05")
    told = keys(server)
    began = time.monotonic()
    path = "/models?url=m"
    management = bearer(told["management"]["key"])
    assert server.manage("POST", path, headers=management).status_code == 200
    wait_until(
        "the key has ended",
        lambda: status(server, "management", told["management"]["key"]) == 400,
    )
    assert time.monotonic() - began < 10
    api = bearer(told["API"]["key"])
    assert server.manage("GET", "/token?type=management", headers=api).status_code == 200
    assert status(server, "management", keys(server)["management"]["key"]) == 200


@pytest.mark.parametrize("case", PRECEDENCE)
def test_tokens_are_switched_off_in_the_same_order(start, case):
    """test_token_authorization: `disable_token_authorization`."""
    server = with_switch(start, "disable_token_authorization", "--disable-token-auth", case)
    assert server.manage("GET", "/models").status_code == (200 if case[-1] else 400)
    assert (server.folder / "key_file.json").exists() is not case[-1]
