#!/usr/bin/env python3
"""Builds the fuzz targets and runs them side by side; docs/testing.md tells of it.

    tests/fuzz/run.py [--build-only] [--seconds N] [--jobs N] [TARGET ...]

Each program in `src/bin` is one, linked with libFuzzer. The compiler counts the edges that an
input takes, by flags that stable Rust has; the sanitizers, which it has not, are no loss in code
without `unsafe`. Panics, hangs and memory are found without them.
"""

import argparse
import gzip
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Instrumented builds of every crate must not meet the others.
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "fuzz"
TRIPLE = re.search(
    "host: (.*)", subprocess.run(["rustc", "-vV"], capture_output=True, text=True).stdout
)[1]

FLAGS = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
]

# One input may take so many seconds, and a target so much memory: more is a finding, like a panic.
# Inputs take milliseconds; the clock also runs while the other targets have the processor.
INPUT_SECONDS = 10
MEMORY_MB = 512

# Longer ones find little and slow all others down.
INPUT_BYTES = 8192


def build() -> None:
    # With a triple given, build scripts and macros are not instrumented.
    command = ["cargo", "build", "--locked", "--profile", "fuzz", "--target", TRIPLE]
    command += ["--package", "ts-fuzz"]
    env = os.environ | {"CARGO_TARGET_DIR": str(TARGET), "RUSTFLAGS": " ".join(FLAGS)}
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def archives(folder: Path) -> None:
    """Valid archives, from which the mutations start."""
    manifest = '{"runtime":"python","model":{"modelName":"m","configFile":"c.yaml"}}'
    files = {
        "MAR-INF/MANIFEST.json": manifest.encode(),
        "c.yaml": b"minWorkers: 1\n",
        "a/deep/folder/x.bin": b"x" * 300,
    }
    for name, kind in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(seed(folder, "archive_zip", name), "w", kind) as archive:
            archive.writestr("a/", "")
            for path, content in files.items():
                archive.writestr(path, content)
    with zipfile.ZipFile(seed(folder, "archive_zip", "zip64"), "w") as archive:
        for path, content in files.items():
            with archive.open(path, "w", force_zip64=True) as member:
                member.write(content)
    with zipfile.ZipFile(seed(folder, "archive_zip", "link"), "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    kinds = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
    for name, kind in kinds.items():
        members = []
        for path, content in files.items():
            # Too long for the plain header; the first kind has a prefix for it.
            members.append((tarfile.TarInfo(f"top/{'long' * 24}/{path}"), content))
        write_tar(folder, name, kind, members)
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "../x"
    write_tar(folder, "link", tarfile.GNU_FORMAT, [(link, b"")])
    # An end of a directory that says that the true one is elsewhere.
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0, 0)
    seed(folder, "archive_zip", "nothing").write_bytes(end)


def write_tar(
    folder: Path, name: str, kind: int, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=kind) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    # To the end mark and no further: the padding of a tape is of no use here.
    content = packed.getvalue().rstrip(b"\0")
    content += bytes(-len(content) % 512 + 1024)
    seed(folder, "archive_tar", name).write_bytes(content)
    seed(folder, "archive_tar", f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))


def seed(folder: Path, target: str, name: str) -> Path:
    (folder / target).mkdir(parents=True, exist_ok=True)
    return folder / target / name


def run(target: str, seconds: int, seeds: Path, scratch: Path) -> bool:
    """Runs one target; whether it found nothing."""
    corpus, findings = TARGET / "corpus" / target, TARGET / "findings" / target
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    command = [TARGET / TRIPLE / "fuzz" / target, corpus, seeds / target, HERE / "seeds" / target]
    command = [part for part in command if part.exists()]
    command += [f"-max_total_time={seconds}", f"-timeout={INPUT_SECONDS}", "-print_final_stats=1"]
    command += [f"-rss_limit_mb={MEMORY_MB}", f"-max_len={INPUT_BYTES}"]
    command += [f"-artifact_prefix={findings}/"]
    words = HERE / "dictionaries" / f"{target}.dict"
    if words.exists():
        command.append(f"-dict={words}")
    own = scratch / target
    own.mkdir()
    env = os.environ | {"TMPDIR": str(own)}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=seconds + 120, check=False
        )
        failed, log = done.returncode != 0, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        failed, log = True, f"{(late.stderr or b'').decode(errors='replace')}\nit did not end"
    (TARGET / "findings" / f"{target}.log").write_text(log)
    edges = re.findall(r" cov: (\d+) ", log)[-1:] or [0]
    stats = {name: int(value) for name, value in re.findall(r"stat::(\w+):\s+(\d+)", log)}
    inputs, rate = stats.get("number_of_executed_units", 0), stats.get("average_exec_per_sec", 0)
    verdict = "FAILED" if failed else "clean"
    print(
        f"{target:14} {verdict:6} {inputs:>10,} inputs {rate:>8,}/s {int(edges[0]):>6,} edges"
        f" {stats.get('peak_rss_mb', 0):>4} MB",
        flush=True,
    )
    if failed:
        print(log[-4000:], flush=True)
        print(f"the input is in {findings}; docs/testing.md tells how it becomes a test")
    return not failed


def main() -> None:
    known = sorted(program.stem for program in (HERE / "src/bin").glob("*.rs"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(known))
    parser.add_argument("--seconds", type=int, default=600, help="of each target")
    # Two on a core find nearly as much as one, and all of them take half as long.
    jobs = 2 * (os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="targets at a time")
    parser.add_argument("--build-only", action="store_true", help="run none")
    asked = parser.parse_args()
    targets = asked.targets or known
    if unknown := set(targets) - set(known):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    started = time.monotonic()
    build()
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    if asked.build_only:
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        seeds, scratch = Path(folder) / "seeds", Path(folder)
        archives(seeds)
        with ThreadPoolExecutor(asked.jobs) as pool:
            clean = list(
                pool.map(lambda target: run(target, asked.seconds, seeds, scratch), targets)
            )
    print(f"{len(targets)} targets in {time.monotonic() - started:.0f} s")
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()
