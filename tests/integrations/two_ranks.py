"""Run a function of `rank_work` as two ranks of one job, and wait for both of them, but not for ever.

`python two_ranks.py NAME` becomes two processes after the imports, so that these are paid for once, and
writes what each rank prints to `rank-0.log` and `rank-1.log`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # a job that hangs fails the test; a loaded machine takes its time to import


def run_on_two_ranks(work: str, folder: Path) -> tuple[list[str], list[str]]:
    """The lines that each rank printed, errors included; both must have ended well."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")  # of an outer job
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    job = subprocess.Popen(
        [sys.executable, __file__, work], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=TIMEOUT)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks with it
            job.wait()
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    first, second = (log.read_text() if log.exists() else "" for log in logs)
    assert job.returncode == 0, said + first + second
    return first.splitlines(), second.splitlines()


def become(rank: int, port: str, work: Callable[[], None]) -> None:
    """Never returns: what the parent would do on leaving is not for a rank to do."""
    code = 1
    try:
        log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **place)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(name: str) -> int:
    from integrations import rank_work

    work = getattr(rank_work, name)()
    with socket.socket() as free:  # after the imports: meanwhile another process might come to use the port
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        child = os.fork()
        if not child:
            become(rank, port, work)
        ranks.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in ranks)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
