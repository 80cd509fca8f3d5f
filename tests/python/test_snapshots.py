"""Python models that come back with the next server, and limits that change under their workers."""

import json
from pathlib import Path

import pytest
from harness import SCRIPTED, Server, archive, at_once, wait_until, write_model


class KeepingServer(Server):
    """A server that writes and reads snapshots; its configuration file lies in its folder."""

    def command(self, *more: str | Path) -> list[str | Path]:
        left_out = ("--ncs", "--ts-config", self.config_file)
        return [word for word in super().command(*more) if word not in left_out]


@pytest.fixture
def keeping(tmp_path):
    server = KeepingServer(tmp_path)
    yield server
    server.stop()


def saved(server: Server) -> list[Path]:
    return sorted(server.folder.glob("logs/config/*.cfg"))


def models(snapshot: Path) -> dict:
    line = next(
        line for line in snapshot.read_text().splitlines() if line.startswith("model_snapshot=")
    )
    text = line.removeprefix("model_snapshot=").replace("\\n", "\n").replace("\\:", ":")
    return json.loads(text)["models"]


def test_a_killed_server_comes_back_with_workers_that_serve(keeping):
    keeping.start()
    keeping.serve("m", config="batchSize: 2\n")
    keeping.serve("other")
    assert keeping.manage("PUT", "/models/m?batch_size=3&min_worker=2").status_code == 202
    assert keeping.manage("DELETE", "/models/other").status_code == 200
    keeping.kill()
    keeping.start()
    assert keeping.models() == ["m"]
    keeping.wait_for_workers("m")
    described = keeping.describe("m")
    assert (len(described["workers"]), described["batchSize"]) == (2, 3)
    assert keeping.run("result = ['back']", "m").text == "back"
    keeping.stop()
    assert saved(keeping)[-1].name.endswith("-shutdown.cfg")
    assert models(saved(keeping)[-1])["m"]["1.0"]["minWorkers"] == 2


def test_an_archive_that_became_junk_is_listed(keeping, tmp_path):
    source = tmp_path / "handler.py"
    source.write_text(SCRIPTED)
    archive(keeping.store, "--model-name", "m", "--version", "1.0", "--handler", source)
    keeping.start()
    assert keeping.register("m.mar").status_code == 200
    keeping.kill()
    (keeping.store / "m.mar").write_text("junk")
    keeping.start()
    assert keeping.models() == ["m"]
    assert "m.mar" in keeping.describe("m")["lastFailure"]
    assert keeping.predict("m", b"x").status_code == 503
    assert keeping.manage("PUT", "/models/m?synchronous=true").status_code == 500
    assert keeping.manage("DELETE", "/models/m").status_code == 200


def test_a_batch_size_changes_under_a_handler(start):
    server = start(["batch_gather=strict"])
    server.serve("m", config="batchSize: 2\nmaxBatchDelay: 20000\n")
    code = "result = [f'{len(data)} {context.system_properties[\"batch_size\"]}'] * len(data)"

    def sizes(callers: int) -> set[str]:
        return {answer.text for answer in at_once([lambda: server.run(code, "m")] * callers)}

    assert sizes(4) == {"2 2"}
    pids = server.worker_pids("m")
    assert server.manage("PUT", "/models/m?batch_size=4").status_code == 200
    assert sizes(4) == {"4 2"}, "a handler sees the value at load"
    assert server.worker_pids("m") == pids


def test_workers_that_do_not_come_up_leave_the_pool_as_it_was(start):
    server = start()
    write_model(server.store, "bad", "import no_such_module\n")
    assert server.register("bad", initial_workers=0).status_code == 200
    before = server.describe("bad")
    answer = server.manage("PUT", "/models/bad?min_worker=2&batch_size=4&synchronous=true")
    assert answer.status_code == 500
    assert "no_such_module" in answer.json()["message"]
    wait_until("it is as before", lambda: server.describe("bad") == before)
