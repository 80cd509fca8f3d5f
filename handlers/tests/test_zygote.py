"""`ts._runtime.zygote`, each time in a process of its own: what it does stays in the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = f"import json, os, sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"


def run(code, env=None):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + "from ts._runtime import zygote\n" + code],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# The copy's parent is whoever takes in orphans; here that is this process, as it is the server.
FORK = """
import ctypes, time
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
kept = os.listdir("/proc/self/fd")
source = os.getpid()
pid = zygote.fork()
if pid == 0:
    zygote.adapt([("ONE", "1"), ("TWO", None)], 1)
    # The process in between may still be about to end.
    for _ in range(1000):
        if os.getppid() == source:
            break
        time.sleep(0.01)
    told = [os.getpid(), os.getppid() == source, os.getpgid(0) == os.getpid()]
    told += [os.environ.get("ONE"), os.environ.get("TWO"), os.listdir("/proc/self/fd") == kept]
    print(json.dumps(told), flush=True)
    os._exit(7)
print(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
print(json.dumps(os.listdir("/proc/self/fd") == kept))
"""


def test_a_copy_is_a_child_of_who_takes_in_orphans_in_a_group_of_its_own():
    copy, source, same_descriptors = run(FORK, env={"TWO": "2"})
    assert copy[1:] == [True, True, "1", None, True]
    assert source == [copy[0], 7]
    assert same_descriptors


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("", []),
        ("raise ValueError('no\\nway')", ["ahead: ValueError: no way"]),
        ("import sys; sys.exit('bye')", ["ahead: SystemExit: bye"]),
        ("import nowhere", ["ahead: ModuleNotFoundError: No module named 'nowhere'"]),
    ],
)
def test_a_module_that_does_not_import_is_told_unless_it_is_not_there(tmp_path, source, outcome):
    (tmp_path / "ahead.py").write_text(source)
    code = f"""
sys.path.append({str(tmp_path)!r})
print(json.dumps(zygote.preload(["ahead", "nowhere_at_all", "nowhere.inside"])))
import gc
print(json.dumps(gc.get_freeze_count() > 1000))
"""
    assert run(code) == [outcome, True]


def test_nothing_is_forked_beside_other_threads():
    code = """
import threading
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
def told(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as refused:
        print(json.dumps(str(refused)))
told(zygote.fork)
told(zygote.preload, ["this_module_is_not_there"])
stop.set()
thread.join()
"""
    fork, preload = run(code)
    assert fork == "the process has 2 threads, so it cannot be forked from"
    assert preload == "importing `this_module_is_not_there` has started 1 threads"


def test_only_what_was_imported_ahead_is_in_the_way_of_a_models_module():
    code = """
asked = ["json", "colorsys", "nothing"]
print(json.dumps(zygote.conflict(asked)))
zygote.preload(["colorsys"])
print(json.dumps(zygote.conflict(asked)))
"""
    assert run(code) == [None, "colorsys"]
