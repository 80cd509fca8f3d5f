"""The management API (section 2): every status, then the bodies that clients read."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from conftest import Starter
from harness import archive, write_files, write_model

ECHO = "def handle(data, context):\n    return data and [context.model_name] * len(data)\n"

# Requests of one story, in order: what is asked, and the status. `{x}` is the address of an archive
# on a web server. A registration without workers loads nothing, so any handler will do.
STORY = [
    # Registering: by an address, the same again, without one.
    ("POST /models?url={image}&model_name=image", 200),
    ("POST /models?url={digits}&model_name=digits", 200),
    ("POST /models?url={large}&model_name=large", 200),
    ("POST /models?url={large}&model_name=large", 500),
    ("DELETE /models/large", 200),
    ("POST /models", 400),
    ("DELETE /models/digits", 200),
    # A handler that is not there is found out by the first worker.
    ("POST /models?url={digits}&model_name=digits&handler=invalidHandler", 200),
    ("DELETE /models/digits", 200),
    ("POST /models?url={digits}&model_name=digits&handler=invalidHandler", 200),
    ("PUT /models/digits?min_worker=1&synchronous=true", 500),
    ("DELETE /models/digits", 200),
    # Describing.
    ("GET /models/image/all", 200),
    ("GET /models/image/1.0", 200),
    ("GET /models/image", 200),
    ("DELETE /models/image", 200),
    ("POST /models?url={image}&model_name=image&runtime=python4", 400),
    ("GET /models?limit=&next_page_token=", 200),
    # Scaling.
    ("POST /models?url={image}&model_name=image", 200),
    ("PUT /models/image?min_worker=1", 202),
    ("PUT /models/image?min_worker=1&synchronous=true", 200),
    ("PUT /models/image/1.0?min_worker=1&synchronous=true", 200),
    ("PUT /models/image/0.0?min_worker=1&synchronous=true", 404),
    ("PUT /models/image?min_worker=1&number_gpu=1", 202),
    # The default version.
    ("PUT /models/image/1.0/set-default", 200),
    ("PUT /models/image/0.0/set-default", 404),
    ("PUT /models/absent/1.0/set-default", 404),
    ("DELETE /models/image", 200),
    # Parameters of a registration, sensible and odd.
    ("POST /models?url={image}&model_name=image&handler=a/b/image_classifier.py:handle", 200),
    ("DELETE /models/image", 200),
    ("POST /models?url={image}&model_name=image&initial_workers=3&startup_timeout=0", 500),
    ("POST /models?url={image}&model_name=image&startup_timeout=0", 200),
    ("DELETE /models/image", 200),
    ("POST /models?url={large}&model_name=large&batch_size=2", 200),
    ("DELETE /models/large", 200),
    ("POST /models?url={large}&model_name=large&batch_size=dd&initial_workers=1", 200),
    ("DELETE /models/large", 200),
    ("POST /models?url={large}&model_name=large&max_batch_delay=junk&initial_workers=1", 200),
    ("DELETE /models/large", 200),
    ("POST /models?url={image}&model_name=image&initial_workers=-1", 200),
    ("DELETE /models/image", 200),
    ("POST /models?url={small}&model_name=small-18&synchronous=true", 200),
    ("DELETE /models/small-18", 200),
    ("POST /models?url={small}&model_name=small-18&synchronous=-1", 200),
    ("DELETE /models/small-18", 200),
    ("POST /models?url={small}&model_name=small-18&synchronous=false", 200),
    # Pages of the list.
    ("GET /models?limit=1", 200),
    ("GET /models?limit=-1", 200),
    ("GET /models?limit=1&next_page_token=1", 200),
    ("GET /models?limit=1&next_page_token=-1", 200),
    # Odd parameters of scaling.
    ("PUT /models/small-18?number_gpu=10", 202),
    ("PUT /models/small-18?number_gpu=-1", 202),
    ("PUT /models/small-18?min_worker=1&max_worker=1&synchronous=true", 200),
    ("PUT /models/small-18?min_worker=1&max_worker=1&synchronous=false", 202),
    ("PUT /models/small-18?timeout=-1", 202),
    ("PUT /models/small-18?timeout=0", 202),
    # Addresses that lead nowhere.
    ("POST /models?url=&model_name=small-18", 404),
    ("POST /models?url={absent}&model_name=absent", 400),
    ("GET /models/absent", 404),
    ("GET /models/image/0.0", 404),
    ("GET /models?next_page_token=12", 200),
    ("PUT /models/small-18?min_worker=1&synchronous=Nan", 202),
    ("PUT /models/small-18?min_worker=nan&synchronous=nan", 202),
    ("PUT /models/small-18", 202),
    ("PUT /models/absent?min_worker=1", 404),
    ("PUT /models/small-18?min_worker=2&max_worker=1", 400),
    ("PUT /models/small-18?min_worker=1", 202),
    ("PUT /models/small-18?min_worker=0", 202),
    ("PUT /models/small-18?min_worker=-1", 500),
    ("PUT /models/small-18?max_worker=-1", 400),
    ("PUT /models/invalid_image/1.0/set-default", 404),
    ("DELETE /models/small-18", 200),
    ("DELETE /models/image/0.0", 404),
    # Parameters of a removal are not looked at, and a slash may stand before them.
    ("POST /models?url={image}&model_name=image", 200),
    ("DELETE /models/image/?synchronous=true", 200),
    ("POST /models?url={image}&model_name=image", 200),
    ("DELETE /models/image/?synchronous=nan", 200),
    ("POST /models?url={image}&model_name=image", 200),
    ("DELETE /models/image/?timeout=true", 200),
    ("POST /models?url={image}&model_name=image", 200),
    ("DELETE /models/image/?timeout=true&synchronous=-1", 200),
    ("DELETE /models/invalid_image", 404),
]


def pack(folder, name, version="1.0"):
    write_files(folder / "sources", {"handler.py": ECHO})
    model = ["--model-name", name, "--version", version, "--force"]
    archive(folder, *model, "--handler", folder / "sources/handler.py")
    return folder / f"{name}.mar"


@pytest.mark.parametrize("envelope", [None, "kserve"])
def test_every_request_has_its_status(start, web, envelope):
    """postman/management, and with `service_envelope=kserve` postman/management_kf."""
    names = ("image", "digits", "large", "small")
    addresses = {name: web.url(f"{name}.mar") for name in (*names, "absent")}
    for name in names:
        pack(web.folder, name)
    server = start([f"service_envelope={envelope}"] if envelope else [])
    assert len(STORY) == 82
    wrong = []
    for number, (request, status) in enumerate(STORY):
        method, _, path = request.format_map(addresses).partition(" ")
        answer = server.manage(method, path)
        if answer.status_code != status:
            wrong.append((number, request, status, answer.status_code, answer.text))
        elif status >= 400:
            body = answer.json()
            assert body["code"] == status and body["type"] and body["message"], (request, body)
    assert wrong == [], "\n" + "\n".join(map(str, wrong))
    assert server.models() == []


# --- numbered behaviours -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with the archive `echo.mar` in its store."""
    with ExitStack() as stack:
        server = Starter(lambda: tmp_path_factory.mktemp("server"), stack)()
        pack(server.store, "echo")
        shutil.rmtree(server.store / "sources")
        yield server


@pytest.fixture(autouse=True)
def nothing_stays(server):
    yield
    for name in server.models():
        for entry in server.manage("GET", f"/models/{name}/all").json():
            if entry["modelVersion"] != server.describe(name)["modelVersion"]:
                server.manage("DELETE", f"/models/{name}/{entry['modelVersion']}")
        server.manage("DELETE", f"/models/{name}")


def register(server, **parameters):
    return server.manage("POST", "/models", params={"url": "echo.mar"} | parameters)


def test_values_that_are_no_numbers_are_the_defaults(server):
    """Row 16."""
    answer = register(server, batch_size="dd", max_batch_delay="junk", initial_workers="many")
    assert answer.status_code == 200
    described = server.describe("echo")
    assert (described["batchSize"], described["maxBatchDelay"]) == (1, 100)
    assert described["workers"] == []


def test_fewer_than_no_workers_are_none(server):
    """Rows 17 and 41: such a registration answers 200 whatever `synchronous` says."""
    for synchronous in ("-1", "false", "true"):
        answer = register(
            server, model_name=f"m{synchronous}", initial_workers=-1, synchronous=synchronous
        )
        assert answer.status_code == 200
        assert "registered with 0 initial workers" in answer.json()["status"]
    answer = register(server, initial_workers=1, synchronous="-1")
    assert (answer.status_code, answer.json()["status"]) == (202, "Processing worker updates...")


def test_no_time_to_start_is_an_error_only_with_workers(server):
    """Row 18."""
    refused = register(server, initial_workers=1, startup_timeout=0)
    assert (refused.status_code, refused.json()["type"]) == (500, "InternalServerException")
    assert server.models() == []
    assert register(server, startup_timeout=0).status_code == 200


def test_a_name_of_the_store_registered_twice_is_a_conflict_and_an_address_is_not(server, web):
    """Row 20."""
    pack(web.folder, "twice")
    assert register(server).status_code == 200
    again = register(server)
    assert (again.status_code, again.json()["type"]) == (409, "ConflictStatusException")
    expected = "Model version 1.0 is already registered for model echo"
    assert again.json()["message"] == expected
    assert register(server, url=web.url("twice.mar")).status_code == 200
    again = register(server, url=web.url("twice.mar"))
    assert (again.status_code, again.json()["type"]) == (500, "InternalServerException")
    assert again.json()["message"] == "Model file already exists twice.mar"


def test_odd_pages_are_whole_or_empty_lists(server):
    """Row 21."""
    register(server)
    for query in ("limit=&next_page_token=", "limit=-1", "next_page_token=-1", "limit=junk"):
        answer = server.manage("GET", f"/models?{query}")
        assert [entry["modelName"] for entry in answer.json()["models"]] == ["echo"], query
    assert server.manage("GET", "/models?next_page_token=12").json() == {"models": []}


def test_scaling_ignores_what_it_does_not_know_and_checks_its_bounds(server):
    """Rows 22, 23 and 33."""
    register(server)
    for query in ("number_gpu=10", "number_gpu=-1", "timeout=0"):
        assert server.manage("PUT", f"/models/echo?{query}").status_code == 202
    for query, status in (("max_worker=-1", 400), ("max_worker=0", 400), ("min_worker=-1", 500)):
        assert server.manage("PUT", f"/models/echo?{query}").status_code == status, query
    answer = server.manage("PUT", "/models/echo?synchronous=true")
    assert answer.json() == {"status": "Workers scaled to 1 for model: echo"}
    path = "/models/echo?model_version={}&min_worker=2&synchronous=true"
    answer = server.manage("PUT", path.format("1.0"))
    assert answer.json() == {"status": "Workers scaled to 2 for model: echo, version: 1.0"}
    assert server.manage("PUT", path.format("9")).status_code == 404


def test_a_json_body_is_read_leniently(server):
    """Row 25: single quotes, numbers and flags as text."""
    body = "{'url': 'echo.mar', 'model_name': 'j', 'initial_workers': '1', 'synchronous': 'true'}"
    headers = {"content-type": "application/json"}
    answer = server.manage("POST", "/models?url=absent", data=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(server.describe("j")["workers"]) == 1


def test_a_folder_may_end_in_a_slash_or_hold_the_model_one_level_down(server, tmp_path):
    """Row 26: and a manifest without a version means 1.0."""
    folder = write_model(tmp_path / "outer", "inner", ECHO)
    manifest = folder / "MAR-INF/MANIFEST.json"
    entry = json.loads(manifest.read_text())
    del entry["model"]["modelVersion"]
    manifest.write_text(json.dumps(entry))
    for name, url in (("plain", f"{folder}/"), ("nested", f"{tmp_path / 'outer'}/")):
        answer = register(server, url=url, model_name=name, initial_workers=1)
        assert answer.status_code == 200, answer.text
        assert server.predict(name, b"x").text == name
        assert server.describe(name)["modelVersion"] == "1.0"


def test_an_archive_without_a_manifest_needs_a_name_and_a_handler(server):
    """Row 27."""
    write_files(server.store / "bare", {"handler.py": ECHO})
    shutil.make_archive(str(server.store / "bare"), "zip", server.store / "bare")
    (server.store / "bare.zip").rename(server.store / "bare.mar")
    answer = register(
        server, url="bare.mar", model_name="bare", handler="handler.py", initial_workers=1
    )
    assert answer.status_code == 200, answer.text
    assert server.predict("bare", b"x").text == "bare"


def test_an_archive_serves_under_many_names_and_versions(server, tmp_path):
    """Row 29, and row 30: `customized` has no effect on all versions."""
    pack(server.store, "second", "2.0")
    assert register(server, model_name="one", initial_workers=1).status_code == 200
    assert register(server, model_name="two", initial_workers=1).status_code == 200
    assert register(server, url="second.mar", model_name="one").status_code == 200
    assert server.models() == ["one", "two"]
    for parameters in ({}, {"customized": "true"}):
        entries = server.manage("GET", "/models/one/all", params=parameters).json()
        assert sorted(entry["modelVersion"] for entry in entries) == ["1.0", "2.0"]
        assert all("customizedMetadata" not in entry for entry in entries)
    assert server.predict("one", b"x").text == "one"


def test_an_idle_queue_is_described_as_empty(server):
    """Row 31."""
    register(server)
    expected = {"remainingCapacity": 100, "pendingRequests": 0}
    assert server.describe("echo")["jobQueueStatus"] == expected


UNENDING = """
import time

class Unending:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        print("begun", flush=True)
        time.sleep(30)
        return ["late"] * len(data)
"""


def test_default_versions_are_kept_while_there_are_others(server):
    """Contract 5.6: the texts of set-default and of removals."""
    pack(server.store, "second", "2.0")
    register(server, model_name="m")
    register(server, model_name="m", url="second.mar")
    refused = server.manage("DELETE", "/models/m")
    assert (refused.status_code, refused.json()["type"]) == (403, "InvalidModelVersionException")
    assert refused.json()["message"] == "Cannot remove default version for model m"
    answer = server.manage("PUT", "/models/m/2.0/set-default")
    assert answer.json()["status"] == (
        'Default version successfully updated for model "m" to "2.0"'
    )
    for path, message in (
        ("/models/m/3/set-default", "Model version 3 does not exist for model m"),
        ("/models/n/3/set-default", "Model not found: n"),
    ):
        refused = server.manage("PUT", path)
        assert (refused.status_code, refused.json()["message"]) == (404, message)
    answer = server.manage("DELETE", "/models/m/1.0")
    assert answer.json() == {"status": 'Model "m" unregistered'}


def test_memory_that_a_load_does_not_get_is_507(server):
    """Row 36: of a synchronous registration, which leaves nothing."""
    greedy = ECHO + "\nraise MemoryError('no room for the weights')\n"
    write_model(server.store, "greedy", greedy)
    answer = register(server, url="greedy", initial_workers=1)
    assert (answer.status_code, answer.json()["code"]) == (507, 507)
    assert server.models() == []


def test_a_missing_package_is_found_by_the_first_worker(server):
    """Row 38, where packages per model are off: registering without workers succeeds."""
    write_model(server.store, "needs", "import no_such_package\n" + ECHO)
    assert register(server, url="needs").status_code == 200
    assert server.predict("needs", b"x").status_code == 503
    refused = server.manage("PUT", "/models/needs?min_worker=1&synchronous=true")
    assert refused.status_code == 500
    write_model(server.store, "needs2", "import no_such_package\n" + ECHO)
    assert register(server, url="needs2", initial_workers=1).status_code == 500


def test_a_removal_within_its_limit_is_never_half_done(start):
    """Row 32, of which we keep the limit: a call that outlasts it is ended and answered."""
    server = start(["unregister_model_timeout=1"])
    server.serve("unending", UNENDING)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: server.predict("unending", b"x"))
        server.wait_for_output("begun")
        began = time.monotonic()
        answer = server.manage("DELETE", "/models/unending")
        took = time.monotonic() - began
        lost = running.result()
    # TorchServe leaves the model there and says 408 if its worker does not end; killing one always
    # ends it here.
    assert (answer.status_code, lost.status_code) == (200, 500)
    assert 1 <= took < 10
    assert server.models() == []
