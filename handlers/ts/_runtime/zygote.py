"""The process that hosts are forked from: it imports ahead, forks, and runs no model.

Called by name by the server's plugin, on the main thread of a process without other threads: a copy
has the forking thread only, and what another one held locked stays locked in it for ever.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterable

# How OpenBLAS spells it, by build; libraries bring their own copies.
_SET_BLAS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

# What every host has imported by the time that it loads a model.
_OF_EVERY_HOST = frozenset(sys.modules)


def preload(modules: Iterable[str]) -> list[str]:
    """Imports modules, and says of each that is installed and cannot be imported why.

    Raises when one has started a thread: no host can be forked from then on.
    """
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as raised:
            # Also `SystemExit`. A module that is not there is none to import ahead.
            if not (isinstance(raised, ModuleNotFoundError) and _within(name, raised.name)):
                failed.append(" ".join(f"{name}: {type(raised).__name__}: {raised}".split()))
        threads = _threads()
        if threads > 1:
            raise RuntimeError(f"importing `{name}` has started {threads - 1} threads")
    # What lives now lives as long as the process. A collection in a host that looked at it would
    # write to its pages, which the hosts then no longer share.
    gc.collect()
    gc.freeze()
    return failed


def conflict(modules: Iterable[str]) -> str | None:
    """One of these modules, which a model brings itself, that was imported ahead.

    In a host of its own making the model's file would be found, since its folder comes first.
    """
    ahead = sys.modules.keys() - _OF_EVERY_HOST
    return next((name for name in modules if name in ahead), None)


def fork() -> int:
    """Forks a host and returns its process id; in the host returns 0.

    Forks twice, so that the host's parent is the one that takes in orphans: the server.
    """
    threads = _threads()
    if threads > 1:
        raise RuntimeError(f"the process has {threads} threads, so it cannot be forked from")
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    try:
        try:
            between = os.fork()
            if between == 0:
                _fork_again(writer)
                return 0
            # Its end is short and certain, and after it the host has its parent.
            os.waitpid(between, 0)
        finally:
            os.close(writer)
        told = os.read(reader, 32)
    finally:
        os.close(reader)
    if not told:
        raise OSError("the host's process could not be made")
    return int(told)


def _fork_again(writer: int) -> None:
    """In the process between: forks the host and tells its id. Comes back in the host only."""
    try:
        host = os.fork()
        if host == 0:
            return
        # Before the server can know the number it is that of a group, which it may kill.
        os.setpgid(host, host)
        os.write(writer, str(host).encode())
        os._exit(0)
    except BaseException:
        os._exit(1)


def adapt(environment: Iterable[tuple[str, str | None]], threads: int) -> None:
    """Makes a copy what it would be as a process of its own."""
    for name, value in environment:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Python's own generator does this itself; torch starts every process with the same numbers.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    if threads > 1 and "numpy" in sys.modules:
        _set_blas_threads(threads)


def _set_blas_threads(threads: int) -> None:
    """Tells each OpenBLAS that is loaded. It read its variable when it was loaded."""
    # Not above: every host would have it, and a model may bring a module of that name.
    import ctypes

    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        for name in _SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(threads)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _within(name: str, missing: str | None) -> bool:
    """Whether the missing module is the wanted one, or the package that it would be in."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")
