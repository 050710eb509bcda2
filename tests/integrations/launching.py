"""Start a script as two ranks of one job, and wait for both of them, but not for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMEOUT = 300  # a job that hangs fails the test; a loaded machine takes its time to import


def environment() -> dict[str, str]:
    """This one, on one thread and without what an outer job may have set."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    paths = [str(HERE.parent), str(HERE.parent.parent / "src")]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_on_two_ranks(script: Path, folder: Path) -> tuple[str, str]:
    """What each rank printed, errors included; both must have ended well."""
    command = [sys.executable, str(HERE / "forking.py"), str(script)]
    job = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=TIMEOUT)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks with it
            job.wait()
    first, second = (
        path.read_text() if path.exists() else "" for path in (folder / "rank-0.log", folder / "rank-1.log")
    )
    assert job.returncode == 0, said + first + second
    return first, second
