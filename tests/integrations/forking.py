"""One process that imports a script and becomes two ranks of a job: what is imported once is paid for once.

`python forking.py script.py` writes what each rank prints to `rank-0.log` and `rank-1.log`, and exits
with the number of ranks that failed.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import traceback
from types import ModuleType


def load(script: str) -> ModuleType:
    found = importlib.util.spec_from_file_location("script", script)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["script"] = module
    found.loader.exec_module(module)
    return module


def become(rank: int, port: str, module: ModuleType) -> None:
    """Never returns: what the parent would do on leaving is not for a rank to do."""
    code = 1
    try:
        log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **place)
        module.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def find_free_port() -> str:
    """Asked for after the imports: in the seconds that they take, another process might come to use it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def main(script: str) -> int:
    module = load(script)
    port = find_free_port()
    ranks = []
    for rank in range(2):
        child = os.fork()
        if not child:
            become(rank, port, module)
        ranks.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in ranks)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
