"""What files may make this process build out of pickles: the server's `load_policy`.

A pickle is a program that may name any class or function there is. CPython tells its audit hooks of
every name that a pickle asks for, whoever reads it (`pickle`, `dill`, `joblib`, numpy's object
arrays, `torch.load` with `weights_only=False`), before it looks the name up; here such names are
refused. Torch's own reader of weights tells nobody, builds tensors and plain data only, and is the
one that `torch.load` is held to.

The handler's own code is trusted, as all of an archive's Python is: this is about what its *files*
may do. `docs/security.md` says what is not seen from here.
"""

import importlib.util
import os
import pickle
import sys
import threading
from types import FrameType
from typing import Any

# Types that hold nothing but what is put into them, and what they are made with.
_PLAIN = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str"
    " tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    # How protocols up to 2 write bytes.
    "_codecs": "encode",
}
_PLAIN_NAMES = frozenset(
    (module, name) for module, names in _PLAIN.items() for name in names.split()
)

# Protocols up to 2 call `builtins` by its name of old.
_OLD_NAMES = {"__builtin__": "builtins"}

# Who may read pickles all the same: what processes of one program send each other, and torch's
# cache of what it has compiled. Folders end in a slash.
_OF_PYTHON = ("multiprocessing/", "concurrent/futures/")
_OF_TORCH = (
    "multiprocessing/",
    "_dynamo/",
    "_functorch/",
    "_inductor/",
    "distributed/distributed_c10d.py",
)

# Read by torch wherever it loads, whatever the caller passes.
_TORCH_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


# How its refusals begin, and what they are about where they do not name it.
_TORCHS_REFUSALS = {
    "Weights only load failed": "",
    "Can not safely load weights when explicit pickle_module": "a `pickle_module`",
    "Cannot use ``weights_only=True`` with TorchScript": "TorchScript (`torch.jit.load` reads it)",
}


class LoadPolicyError(pickle.UnpicklingError):
    """A file asked for more than the server's `load_policy` allows."""


class _LastOpened(threading.local):
    path = ""


_last_opened = _LastOpened()
_in_force = "any"
_exempt: tuple[str, ...] = ()


def enforce(policy: str) -> None:
    """Puts a policy in force for the rest of this process, before the handler is imported."""
    global _in_force, _exempt
    if policy == "any" or _in_force != "any":
        # All workers of a host have one model, so one policy.
        return
    _exempt = _exempt_places()
    os.environ[_TORCH_VARIABLE] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    _in_force = policy
    sys.addaudithook(_hook)


def explain(raised: BaseException) -> BaseException:
    """The refusal behind what a handler raised, in the policy's words; else what it raised."""
    if _in_force == "any":
        return raised
    found: BaseException | None = raised
    seen = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, LoadPolicyError):
            return found
        for beginning, what in _TORCHS_REFUSALS.items():
            # Torch's words end in the advice to switch the check off.
            if str(found).startswith(beginning):
                return _refusal(
                    what or refused_global(str(found)) or "more than tensors and plain data"
                )
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return raised


def refused_global(text: str) -> str:
    """What torch's reader of weights says it has refused; nothing, where it does not name it."""
    _, found, after = text.partition("GLOBAL ")
    return f"`{after.split()[0]}`" if found and after.split() else ""


def _refusal(what: str) -> LoadPolicyError:
    place = _last_opened.path
    opened = f" The file opened last was `{place}`." if place else ""
    return LoadPolicyError(
        f"`load_policy={_in_force}` refuses {what} in a pickle: only tensors and plain data may be "
        f"loaded.{opened} Save a state dict, or use TorchScript, ONNX or safetensors"
    )


def _exempt_places() -> tuple[str, ...]:
    """Where the readers lie that may read pickles. Found before a model's folder is on the path."""
    python = os.path.dirname(os.__file__)
    places = [os.path.join(python, place) for place in _OF_PYTHON]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        folder = os.path.dirname(torch.origin)
        places += [os.path.join(folder, place) for place in _OF_TORCH]
    return tuple(places)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        module, name = arguments
        plain = (_OLD_NAMES.get(module, module), name) in _PLAIN_NAMES
        if not plain and not _is_exempt(sys._getframe(1)):
            raise _refusal(f"`{module}.{name}`")
    elif event == "open":
        path = arguments[0]
        # Python's own sources are opened in between, when a name is looked up.
        if isinstance(path, str) and not path.endswith((".py", ".pyc")):
            _last_opened.path = path


def _is_exempt(frame: FrameType | None) -> bool:
    """Whether the reader of the pickle, which called into `pickle`, is one that may."""
    while frame is not None and frame.f_code.co_filename == pickle.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_exempt)
