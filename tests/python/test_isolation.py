"""Processes and threads of workers, and models that must not meet."""

import itertools
import json

import pytest
from harness import SCRIPTED, at_once

WHERE = "import os, threading; result = [[os.getpid(), threading.get_native_id()]]"


def places(server, model, workers):
    """Process and thread of each worker, by asking until all have answered."""
    found = set()
    slow = "import time; time.sleep(0.05); " + WHERE
    for _ in range(50):
        answers = at_once([lambda: server.run(slow, model)] * (2 * workers))
        found |= {tuple(answer.json()) for answer in answers}
        if len(found) == workers:
            break
    return found


@pytest.mark.parametrize(
    ("isolation", "config", "yaml"),
    [
        ("process", (), ""),
        ("process", ["worker_isolation=process"], ""),
        ("thread", ["worker_isolation=thread"], ""),
        ("thread", (), "workerIsolation: thread\n"),
        ("process", ["worker_isolation=thread"], "workerIsolation: process\n"),
    ],
)
def test_isolation_decides_which_workers_share_a_process(start, isolation, config, yaml):
    server = start(config)
    server.serve("m", SCRIPTED, config=yaml, initial_workers=3)
    found = places(server, "m", 3)
    pids, threads = {pid for pid, _ in found}, {thread for _, thread in found}
    assert (len(pids), len(threads)) == (3 if isolation == "process" else 1, 3)
    assert set(server.worker_pids("m")) == pids
    assert server.pid not in pids


def test_each_worker_has_a_handler_of_its_own(start):
    server = start(["worker_isolation=thread"])
    server.serve("m", SCRIPTED, initial_workers=2)
    code = "import time; time.sleep(0.05); result = [id(self)]"
    wanted = set()
    for _ in range(50):
        wanted |= {answer.text for answer in at_once([lambda: server.run(code, "m")] * 4)}
        if len(wanted) == 2:
            break
    assert len(wanted) == 2


# The names are those of the server's own modules, of the standard library, and of each other.
NAMED_ALIKE = {
    "handler.py": """
import json
import model, service, utils
from ts.service import PredictionException

WHO = "{who}"

def handle(data, context):
    if data is None:
        return None
    marks = [WHO, model.WHO, service.WHO, utils.WHO, context.model_name]
    return [json.dumps(marks)] * len(data)
""",
    "model.py": "WHO = '{who}'",
    "service.py": "WHO = '{who}'",
    "utils.py": "WHO = '{who}'",
}
NAMED_LIKE_JSON = """
import json
WHO = "{who}"

def handle(data, context):
    return None if data is None else [json.dumps([WHO, context.model_name])] * len(data)
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_models_see_their_own_files_ar_14(start, isolation):
    server = start([f"worker_isolation={isolation}"])
    for who in ("one", "two"):
        files = {name: text.replace("{who}", who) for name, text in NAMED_ALIKE.items()}
        server.serve(who, files, initial_workers=2)
    for who, name in (("json", "json.py"), ("ts", "ts.py")):
        server.serve(who, {name: NAMED_LIKE_JSON.replace("{who}", who)}, handler=name)
    models = list(
        itertools.islice(itertools.cycle(["one", "two", "json", "one", "ts", "two"]), 300)
    )
    answers = at_once(
        [lambda model=model: server.predict(model, b"x") for model in models], callers=12
    )
    for model, answer in zip(models, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert set(json.loads(answer.text)) == {model}
