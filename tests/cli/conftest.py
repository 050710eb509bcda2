"""The command line in this process (fast) and in one of its own (as people run it)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hessinit.cli.app import app

from .problem_files import NET

SOURCE = Path(__file__).parents[2] / "src"
KNOWN = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
ENVIRONMENT = {**KNOWN, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": "xterm"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of every test, with the user's file net.py."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def net() -> SimpleNamespace:
    """The functions of net.py, run by hand: the truth to compare with."""
    names: dict[str, Any] = {"__name__": "net"}
    exec(compile(NET, "net.py", "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Call as run("measure", "net.py:problem", columns=60); each command imports the user's files anew."""

    users = str(tmp_path_factory.getbasetemp().resolve())

    def invoke(*arguments: object, columns: int = 100) -> Result:
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(users)])
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(users):
                del sys.modules[name]
        return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns)})

    return invoke


def run_interpreter(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": 300}
    return subprocess.run(command, env={**ENVIRONMENT, **variables}, **options)


@pytest.fixture
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m hessinit` in a process of its own."""
    return partial(run_interpreter, "-m", "hessinit")


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a line of Python in a process of its own."""
    return partial(run_interpreter, "-c")


def refused(result: Result) -> str:
    """What the command says on stderr; it must have ended with 2, and printed nothing else."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr or "as shown above" in result.stderr
    return result.stderr


def interrupt(number: int, is_time: Callable[[], Any], *command: object, **variables: str) -> tuple[Any, ...]:
    """Send the signal once it is time; return how the command ended, and its stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *map(str, command)],
        env={**ENVIRONMENT, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not is_time():
            assert time.monotonic() < deadline, process.poll()
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def on_a_terminal(*arguments: str, **variables: str) -> str:
    """Return what a person sees: stdout and stderr are the same pseudo-terminal."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *arguments],
        env={**ENVIRONMENT, "COLUMNS": "80", **variables}, stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(reader, 65536):
            seen += part
    os.close(reader)
    assert process.wait(timeout=300) == 0, seen
    return seen.decode()


def without_seconds(data: Any) -> Any:
    """Return JSON data without what differs from run to run."""
    if isinstance(data, list):
        return [without_seconds(each) for each in data]
    if isinstance(data, dict):
        timed = [key for key in data if "seconds" in key or key == "gradients"]
        return {key: without_seconds(value) for key, value in data.items() if key not in timed}
    return data
