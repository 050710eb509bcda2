"""The command line in this process (fast) and in one of its own (as people run it)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hessinit.cli.app import app

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., object]]:
    """Call as run("measure", "net.py:problem", columns=60); what a user's file leaves is taken away."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    written_by_tests = str(tmp_path_factory.getbasetemp())

    def invoke(*arguments: object, columns: int = 100) -> object:
        return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns)})

    yield invoke
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if not file or written_by_tests in file:
            del sys.modules[name]


def run_interpreter(
    *arguments: object,
    folder: Path,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture
def run_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m hessinit` in `tmp_path`."""
    return partial(run_interpreter, "-m", "hessinit", folder=tmp_path)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a line of Python in a process of its own."""
    return partial(run_interpreter, "-c", folder=tmp_path)


def on_a_terminal(*arguments: str, folder: Path, **variables: str) -> str:
    """What a person sees: stdout and stderr are the same pseudo-terminal."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    reader, terminal = pty.openpty()
    known = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**known, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *arguments],
        cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    seen = read_to_the_end(reader)
    assert process.wait(timeout=300) == 0, seen
    return seen


def read_to_the_end(reader: int) -> str:
    """What comes until the other end of a pseudo-terminal is closed."""
    seen = b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(reader)
    return seen.decode()


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.head = nn.Linear(3 * 36, 4)

    def forward(self, images, scale=None):
        logits = self.head(torch.tanh(self.conv(images)).flatten(1))
        return logits if scale is None else {"logits": scale * logits}


def data():
    return torch.rand(6, 1, 8, 8), torch.randint(4, (6,))


def problem():
    print("a word from the user's own code")
    return Net(), nn.CrossEntropyLoss(), data()


def scaled():
    call = lambda model, images: model(images, scale=2.0)["logits"]
    return Net(), nn.CrossEntropyLoss(), data(), {"forward": call, "curvature": "both", "seed": 3}


def unfinished():
    return Net(), nn.CrossEntropyLoss(), data(), {"max_iterations": 1, "estimator": "lanczos"}


def strictly_unfinished():
    return Net(), nn.CrossEntropyLoss(), data(), {"max_iterations": 1, "estimator": "lanczos", "strict": True}
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A user's file with a convolutional network, called in several ways."""
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path
