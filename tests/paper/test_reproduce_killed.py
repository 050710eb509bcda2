"""kill -9 at any moment: the next run finishes with the numbers of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hessinit.paper import load_records

KILLS = 10


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hessinit", "reproduce", "table-2", "table-3", "--data", "digits"]
    options = ["--seeds", "150", "--workers", "2", "--folder", str(folder)]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def numbers(folder: Path) -> dict[str, Any]:
    records = [record.to_dict() for record in load_records(folder)]
    return {record["name"]: (record["results"], record["findings"]) for record in records}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_killed_at_ten_random_moments_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    started = time.monotonic()
    first = start(undisturbed)
    _, messages = first.communicate(timeout=300)
    assert first.returncode == 0, messages.decode()
    whole = time.monotonic() - started
    moments = random.Random(2004)
    for _ in range(KILLS):
        process = start(disturbed)
        time.sleep(moments.uniform(0.1, 1.0) * min(whole, 6.0))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=300)  # and closes its pipe
    last = start(disturbed)
    _, messages = last.communicate(timeout=300)
    assert last.returncode == 0, messages.decode()
    assert numbers(disturbed) == numbers(undisturbed)
    assert len(numbers(disturbed)) == 2
