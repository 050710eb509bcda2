"""Start a script as several ranks of one job, and wait for all of them, but not for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT = 150  # a job that hangs fails the test; a loaded machine takes its time to import


def environment(**more: str) -> dict[str, str]:
    """This one, on one thread and without what an outer job may have set."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    paths = [str(HERE.parent), str(HERE.parent.parent / "src")]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )


def run_on_two_ranks(script: Path, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """What each rank returned and printed, errors included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in ("0", "1"):
        settings = environment(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        command = [sys.executable, str(script), *arguments]
        started.append(
            subprocess.Popen(
                command, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]
