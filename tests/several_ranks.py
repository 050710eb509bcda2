"""Run a function as several ranks of one job, and wait for all of them, but not for ever.

`python several_ranks.py FILE NAME RANKS…` becomes that many processes after the imports, so that these are
paid for once, for one job after the other, and writes what each rank prints to `rank-RANK-of-RANKS.log`.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TIMEOUT = 300  # a job that hangs fails the test; a loaded machine takes its time to import


def run_on_ranks(file: Path, work: str, folder: Path, *sizes: int, killed: int = 0) -> list[list[str]]:
    """The lines that each rank printed, job by job; all must have ended well, but for so many killed ones."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")  # of an outer job
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    paths = os.pathsep.join([str(TESTS), str(file.parent), str(TESTS.parent / "src")])
    module = f"{file.parent.name}.{file.stem}" if (file.parent / "__init__.py").exists() else file.stem
    job = subprocess.Popen(
        [sys.executable, __file__, module, work, *map(str, sizes)], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=TIMEOUT)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks with it
            job.wait()
    logs = [folder / f"rank-{rank}-of-{size}.log" for size in sizes for rank in range(size)]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    assert job.returncode == killed, said + "".join(texts)
    return [text.splitlines() for text in texts]


def become(rank: int, size: int, port: str, work: Callable[[], None]) -> None:
    """Never returns: what the parent would do on leaving is not for a rank to do."""
    code = 1
    try:
        log = os.open(f"rank-{rank}-of-{size}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **place)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(module: str, name: str, sizes: Sequence[int]) -> int:
    work = getattr(importlib.import_module(module), name)()
    return sum(run_job(work, size) for size in sizes)


def run_job(work: Callable[[], None], size: int) -> int:
    with socket.socket() as free:  # after the imports: meanwhile another process might come to use the port
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(size):
        child = os.fork()
        if not child:
            become(rank, size, port, work)
        ranks.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in ranks)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]]))
