"""Runs the handler of an archive or a folder without a server, for whoever writes one:

    python -m ts.test_handler model.mar --input kitten.jpg

What a handler gets and what becomes of its results is done by the same code as in the server, with
one worker in this process. Exit status 1 tells that the model did not load or a request failed.
"""

import argparse
import contextlib
import json
import logging
import mimetypes
import os
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any, cast

from ts._runtime import bridge, loader
from ts._runtime.bridge import Outcome, Session, Spec
from ts._runtime.output import Failure, Reply
from ts.context import STREAM_NEXT, Item
from ts.version import __version__

# What an archive may hold in all; more is a mistake, or meant to fill the disk.
MAX_FILES = 100_000
MAX_BYTES = 64 << 30

# How long coroutines may take to answer.
ANSWER_SECONDS = 600.0

# What tells that a reply goes on.
_NOT_LAST = (STREAM_NEXT, "true")

_MANIFEST = Path("MAR-INF") / "MANIFEST.json"


class UsageError(Exception):
    """What was asked for cannot be done."""


class Caller:
    """The other end of a worker: keeps what is sent to the callers of a batch."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, Reply | Failure]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.answered = threading.Semaphore(0)

    def functions(self) -> Any:
        """As the server has them: `(send, has_left, answer)`."""
        return self.send, lambda _: False, self.answer

    def send(self, parts: list[tuple[str, Reply | Failure]]) -> tuple[int, bool]:
        """Takes parts of replies. Returns how many were dropped, and whether all have left."""
        self.parts += parts
        return 0, False

    def answer(self, request_id: str, outcome: Outcome) -> None:
        """Takes the end of one request."""
        self.outcomes[request_id] = outcome
        self.answered.release()


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        items = _items(options)
        # The handler runs in its folder.
        with _model_folder(Path(options.model)) as folder, contextlib.chdir("."):
            return _try_out(folder, items, options)
    except (UsageError, loader.HandlerError, OSError) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ts.test_handler", description="Runs a handler without a server."
    )
    add = parser.add_argument
    add("model", help="a .mar archive, or a folder with MAR-INF/MANIFEST.json")
    add("--input", action="append", default=[], help="body of a request; several make a batch")
    add("--content-type", help="of all bodies; else by the ending of each file")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="of all requests")
    add("--explain", action="store_true", help="ask for explanations")
    add("--describe", action="store_true", help="ask for the handler's description")
    add("--envelope", help="service envelope: body, json, kserve, kservev2")
    add("--gpu", type=int, help="number of the GPU; the processor without it")
    add("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch")
    add("--repeat", type=int, default=1, help="how often the batch runs; the times tell the rest")
    add(
        "--load-policy",
        default="any",
        choices=("any", "weights-only", "strict"),
        help="what files may make this process build; see docs/security.md",
    )
    return parser


def _items(options: argparse.Namespace) -> list[Item]:
    headers = {}
    for header in options.header:
        name, separator, value = header.partition("=")
        if not separator or not name:
            raise UsageError(f"`--header {header}` is not of the form NAME=VALUE")
        headers[name.lower()] = value
    for asked in ("explain", "describe"):
        if getattr(options, asked):
            headers[asked] = "True"
    items: list[Item] = []
    for index, path in enumerate(options.input):
        guessed = mimetypes.guess_type(path)[0] or "application/octet-stream"
        content_type = options.content_type or guessed
        body = bytearray(Path(path).read_bytes())
        own = {"content-type": content_type} | headers
        items.append((f"request-{index}", own, [("body", content_type, body)]))
    if not items and options.describe:
        items = [("request-0", headers, [])]
    if not items:
        raise UsageError("nothing to ask the handler: give `--input FILE`, or `--describe`")
    return items


@contextlib.contextmanager
def _model_folder(model: Path) -> Iterator[Path]:
    """The folder of the model; that of an archive goes with the end."""
    if model.is_dir():
        yield _with_manifest(model)
        return
    if not model.is_file():
        raise UsageError(f"`{model}` is neither an archive nor a folder")
    with tempfile.TemporaryDirectory(prefix="test-handler-") as unpacked:
        _unpack(model, Path(unpacked))
        yield _with_manifest(Path(unpacked))


def _with_manifest(folder: Path) -> Path:
    inner = [folder, *sorted(one for one in folder.iterdir() if one.is_dir())]
    for candidate in inner:
        if (candidate / _MANIFEST).is_file():
            return candidate.resolve()
    raise UsageError(f"`{folder}` has no {_MANIFEST}: `torch-model-archiver` makes archives")


def _unpack(archive: Path, folder: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            _check(archive, [(member.filename, member.file_size) for member in members])
            zipped.extractall(folder)  # noqa: S202
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tarred:
            entries = tarred.getmembers()
            _check(archive, [(entry.name, entry.size) for entry in entries])
            # Also refuses links that lead out, devices and pipes.
            tarred.extractall(folder, filter="data")
    else:
        raise UsageError(f"`{archive}` is neither a zip nor a tar archive")


def _check(archive: Path, members: list[tuple[str, int]]) -> None:
    if len(members) > MAX_FILES:
        raise UsageError(f"`{archive}` has {len(members)} files; {MAX_FILES} is the limit")
    total = sum(size for _, size in members)
    if total > MAX_BYTES:
        raise UsageError(f"`{archive}` unpacks to {total} bytes; {MAX_BYTES} is the limit")
    for name, _ in members:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"`{archive}` has a file that leads out of it: `{name}`")


def _try_out(folder: Path, items: list[Item], options: argparse.Namespace) -> int:
    manifest = loader.read_manifest(str(folder)) or {}
    config = loader.read_model_config(str(folder), manifest)
    if config.get("asyncCommunication"):
        exchange = "asynchronous"
    else:
        exchange = "continuous" if config.get("continuousBatching") else "batches"
    caller = Caller()
    bridge.import_early()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s - %(message)s")
    started = perf_counter()
    session, kind, message = bridge.load(
        _spec(folder, manifest, items, exchange, options), caller.functions()
    )
    if session is None:
        print(f"the model does not load ({kind}): {message}", file=sys.stderr)
        return 1
    times = [("load", perf_counter() - started)]
    failed = False
    for number in range(max(options.repeat, 1)):
        caller.parts.clear()
        started = perf_counter()
        answers = _run(session, items, exchange, caller)
        times.append((f"batch {number + 1}", perf_counter() - started))
        failed |= any(len(answer) == 3 for answer in answers.values())
        if number == 0:
            for request_id, part in caller.parts:
                _show(f"{request_id}, a part", part)
            for request_id, answer in answers.items():
                _show(request_id, answer)
    for what, seconds in times:
        print(f"{what}: {seconds * 1000:.1f} ms")
    return int(failed)


def _spec(
    folder: Path,
    manifest: dict[str, Any],
    items: list[Item],
    exchange: str,
    options: argparse.Namespace,
) -> Spec:
    model = manifest.get("model") or {}
    return {
        "model_name": str(model.get("modelName", folder.name)),
        "model_version": str(model.get("modelVersion", "1.0")),
        "model_dir": str(folder),
        "handler": str(model.get("handler", "")),
        "gpu_id": options.gpu,
        "batch_size": len(items),
        "exchange": exchange,
        "service_envelope": options.envelope,
        "limit_max_image_pixels": True,
        "decode_input_request": True,
        "server_version": __version__,
        "sequence_headers": (
            "ts_request_sequence_id",
            "ts_request_sequence_start",
            "ts_request_sequence_end",
        ),
        "load_policy": options.load_policy,
        "declared_metrics": [],
        "intra_op_threads": options.threads,
        "change_dir": True,
    }


def _run(
    session: Session, items: list[Item], exchange: str, caller: Caller
) -> dict[str, Reply | Failure]:
    """The last answer to each request; what comes before goes to the caller's parts."""
    if exchange == "asynchronous":
        from ts._runtime.asynchronous import AsyncSession

        for item in items:
            cast(AsyncSession, session).start(item)
        for _ in items:
            if not caller.answered.acquire(timeout=ANSWER_SECONDS):
                raise UsageError(f"no answer within {ANSWER_SECONDS:g} s")
        return {item[0]: _answers(caller.outcomes.pop(item[0]), 1)[0] for item in items}
    last: dict[str, Reply | Failure] = {}
    while items:
        answers = _answers(session.run(items), len(items))
        going_on: list[Item] = []
        for item, answer in zip(items, answers, strict=True):
            if exchange == "continuous" and len(answer) == 4 and _NOT_LAST in answer[2]:
                caller.parts.append((item[0], answer))
                # Of a request that the handler knows, only its headers come again.
                going_on.append((item[0], item[1], []))
            else:
                last[item[0]] = answer
        items = going_on
    return last


def _answers(outcome: Outcome, count: int) -> Sequence[Reply | Failure]:
    kind, code, message, replies, _ = outcome
    # A failure of the batch is that of each of its requests.
    return replies if kind == "ok" else [(kind, code, message)] * count


def _show(title: str, answer: Reply | Failure) -> None:
    if len(answer) == 3:
        kind, code, message = answer
        print(f"{title}: {code} ({kind})\n{json.dumps({'code': code, 'message': message})}")
        return
    code, reason, headers, body = answer
    print(f"{title}: {code} {reason}".rstrip())
    for name, value in headers:
        print(f"{name}: {value}")
    try:
        print(bytes(body).decode())
    except UnicodeDecodeError:
        print(f"<{len(body)} bytes>")


if __name__ == "__main__":
    sys.exit(main())
