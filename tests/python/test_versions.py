"""Versions of one model that follow each other under load."""

import json
import threading

from harness import write_model

ANSWERS = """
def handle(data, context):
    return None if data is None else [context.manifest["model"]["modelVersion"]] * len(data)
"""


def test_a_new_version_takes_over_without_a_failed_request_rg_11(server):
    versions = range(6)
    for version in versions:
        folder = write_model(server.store, f"swapped-{version}", ANSWERS, version=str(version))
        manifest = folder / "MAR-INF/MANIFEST.json"
        told = json.loads(manifest.read_text())
        told["model"]["modelName"] = "swapped"
        manifest.write_text(json.dumps(told))
    assert server.register("swapped-0").status_code == 200
    done = threading.Event()
    heard = [[] for _ in range(4)]

    def keep_asking(answers):
        while not done.is_set():
            answer = server.predict("swapped", b"x")
            answers.append((answer.status_code, answer.text))

    callers = [threading.Thread(target=keep_asking, args=[answers]) for answers in heard]
    for caller in callers:
        caller.start()
    try:
        for version in versions[1:]:
            for method, path in (
                ("POST", f"/models?url=swapped-{version}&initial_workers=1"),
                ("PUT", f"/models/swapped/{version}/set-default"),
                ("DELETE", f"/models/swapped/{version - 1}"),
            ):
                answer = server.manage(method, path)
                assert answer.status_code == 200, answer.text
    finally:
        done.set()
        for caller in callers:
            caller.join()
    for answers in heard:
        assert {status for status, _ in answers} == {200}
        # One caller waits for each answer, so it never hears an older version after a newer one.
        order = [int(version) for _, version in answers]
        assert order == sorted(order)
        assert len(set(order)) > 2, "the load went on during the swaps"
