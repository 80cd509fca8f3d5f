"""`load_policy`: what a host refuses to unpickle. Each case has a process of its own, since an
audit hook stays for the life of its process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import io, os, pickle, sys
from pathlib import Path
from ts._runtime import policy
policy.enforce({policy!r})

def refused(call, *words):
    try:
        call()
    except BaseException as raised:
        told = policy.explain(raised)
        assert isinstance(told, policy.LoadPolicyError), repr(raised)
        for word in ("load_policy={policy}", *words):
            assert word in str(told), str(told)
    else:
        raise AssertionError("it was loaded")
"""


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def run(code: str, folder: Path, policy: str = "weights-only") -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(policy=policy) + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "canary").exists(), "the pickle has run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for protocol in range(6):
        hostile = pickle.dumps(Canary(tmp_path / "canary"), protocol)
        (tmp_path / f"{protocol}.pkl").write_bytes(hostile)
    return tmp_path


@pytest.mark.parametrize("policy", ["weights-only", "strict"])
def test_no_pickle_names_what_is_not_plain(folder: Path, policy: str) -> None:
    run(
        """
for protocol in range(6):
    name = f"{protocol}.pkl"
    data = Path(name).read_bytes()
    refused(lambda: pickle.loads(data), "posix.mkdir")
    refused(lambda: pickle.load(open(name, "rb")), name)
    refused(lambda: pickle._loads(data), "posix.mkdir")

    class Own(pickle.Unpickler):
        def find_class(self, module, name):
            return super().find_class(module, name)

    refused(lambda: Own(io.BytesIO(data)).load(), "posix.mkdir")
""",
        folder,
        policy,
    )


def test_without_a_policy_nothing_changes(folder: Path) -> None:
    run("assert pickle.loads(pickle.dumps(Path('x'))) == Path('x')", folder, "any")


def test_plain_data_is_loaded(folder: Path) -> None:
    run(
        """
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime, timedelta
plain = [1, 2.5, "x", b"y", None, {"a": {1}}, OrderedDict(a=1), defaultdict(list, a=[1]),
         Counter("aab"), datetime(2020, 1, 1), timedelta(1), 1j, bytearray(b"z"), frozenset("q")]
for protocol in range(6):
    assert pickle.loads(pickle.dumps(plain, protocol)) == plain
""",
        folder,
    )


def test_processes_may_still_talk_to_each_other(folder: Path) -> None:
    (folder / "work.py").write_text("def name(path):\n    return type(path)(str(path) + 'x')\n")
    run(
        """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
sys.path.insert(0, ".")
import work
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(work.name, [Path("a")]) == [Path("ax")]
with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
    assert pool.submit(work.name, Path("b")).result() == Path("bx")
refused(lambda: pickle.loads(pickle.dumps(Path("x"))))
""",
        folder,
    )


def test_a_module_of_the_model_is_not_taken_for_pythons_own(folder: Path) -> None:
    (folder / "multiprocessing").mkdir()
    (folder / "multiprocessing" / "__init__.py").write_text(
        "import pickle\ndef load(data):\n    return pickle.loads(data)\n"
    )
    run(
        """
sys.path.insert(0, ".")
import multiprocessing
refused(lambda: multiprocessing.load(Path("4.pkl").read_bytes()))
""",
        folder,
    )


def test_torch_loads_weights_and_nothing_else(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(2, 1)
    torch.save(linear.state_dict(), folder / "state.pt")
    torch.save(linear, folder / "whole.pt")
    torch.save(linear, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"x": Canary(folder / "canary")}, folder / "hostile.pt")
    torch.jit.script(linear).save(folder / "script.pt")
    run(
        """
import torch
for arguments in ({}, {"weights_only": True}, {"weights_only": False}):
    assert set(torch.load("state.pt", **arguments)) == {"weight", "bias"}
    for name in ("whole.pt", "legacy.pt"):
        refused(lambda: torch.load(name, **arguments), name, "torch.nn.modules.linear.Linear")
    refused(lambda: torch.load("hostile.pt", **arguments), "hostile.pt", "posix.mkdir")
refused(lambda: torch.load("state.pt", weights_only=False, pickle_module=pickle), "pickle_module")
# Also of who takes the variable away.
del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
refused(lambda: torch.load("hostile.pt", weights_only=False), "hostile.pt", "posix.mkdir")
assert torch.jit.load("script.pt")(torch.ones(1, 2)).shape == (1, 1)
""",
        folder,
    )


def test_object_arrays_are_refused(folder: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(folder / "plain.npy", numpy.ones(3))
    hostile = numpy.array([Canary(folder / "canary")], dtype=object)
    numpy.save(folder / "objects.npy", hostile, allow_pickle=True)
    run(
        """
import numpy
assert numpy.load("plain.npy").sum() == 3
refused(lambda: numpy.load("objects.npy", allow_pickle=True), "objects.npy")
""",
        folder,
    )


def test_workers_of_a_data_loader_answer(folder: Path) -> None:
    pytest.importorskip("torch")
    run(
        """
import torch
from torch.utils.data import DataLoader
loader = DataLoader([torch.ones(2), torch.zeros(2)], batch_size=2, num_workers=1)
assert [batch.shape for batch in loader] == [(2, 2)]
""",
        folder,
    )
