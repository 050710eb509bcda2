"""`--dask`: a real scheduler and workers, each in an empty folder, where only hessinit can be imported."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hessinit import Comparison
from hessinit.cli import runs

from .conftest import ENVIRONMENT, interrupt, refused, run_interpreter

Client = pytest.importorskip("distributed", reason="needs Dask").Client

# The user's file, and one beside it. A worker differs from the user's process by its folder.
MINE = """
import functools, os, random, sys, time
import torch
from torch import nn
from beside import FACTOR, load

DRAWN = random.random()
HERE = {folder!r}

@functools.cache
def data():
    return load()

class Net(nn.Sequential):
    pass

def problem():
    model = Net(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    return model, lambda output, target: FACTOR * DRAWN * nn.functional.cross_entropy(output, target), data()

def here():
    return os.getcwd() == HERE

def slow(model, images):
    time.sleep(0.02)
    return model(images)

def slowly():
    with open(HERE + "/built", "a") as log:
        print(os.getpid(), file=log)
    return *problem(), {{"forward": slow}}

def reads_a_file():
    open("here.txt").close()
    return problem()

def imports_late():
    if not here():
        import elsewhere
    return problem()

def dies():
    if not here():
        os._exit(1)
    return problem()
"""
BESIDE = """
from hessinit.digits import load_digits

FACTOR = {factor}

def load():
    images, labels = load_digits()
    return images[:200], labels[:200]
"""
SMALL = "--steps 10 --batch-size 32 --seeds 2 --schemes default,he --learning-rates 0.1"


class Cluster:
    """Processes of a scheduler and its workers."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.processes, self.variables = folder, [], variables
        self._start("scheduler", "--port", "0", "--scheduler-file", str(folder / "where.json"))
        wait_until(lambda: (folder / "where.json").exists() and (folder / "where.json").read_text())
        self.address = json.loads((folder / "where.json").read_text())["address"]

    def add_worker(self, threads: int = 1, **variables: str) -> subprocess.Popen[bytes]:
        self.variables.update(variables)
        return self._start("worker", self.address, "--no-nanny", "--nthreads", str(threads))

    def wait_for_workers(self, count: int) -> None:
        with Client(self.address, set_as_default=False) as client:
            wait_until(lambda: len(client.nthreads()) == count)

    def _start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        name = f"{what}-{len(self.processes)}"
        (self.folder / name).mkdir()
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", what, *options, "--host", "127.0.0.1", "--no-dashboard"],
                cwd=self.folder / name, env={**ENVIRONMENT, **self.variables}, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def wait_until(is_time: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not is_time():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker with one thread, and one with two, which take turns."""
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    for threads in (1, 2):
        started.add_worker(threads)
    started.wait_for_workers(2)
    yield started
    started.end()


@pytest.fixture
def mine(folder: Path) -> Path:
    """The user's folder."""
    (folder / "mine.py").write_text(MINE.format(folder=str(folder)))
    (folder / "beside.py").write_text(BESIDE.format(factor=1))
    return folder


def read(result) -> Comparison:
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return Comparison.from_json(result.stdout)


def test_the_files_travel_as_they_are_now_and_the_numbers_are_those_of_one_process(run, dask, mine):
    command = ["compare", "mine.py:problem", *SMALL.split(), "--json"]
    first = read(run(*command, "--dask", dask.address))
    assert first == read(run(*command, "--workers", 1))
    (mine / "beside.py").write_text(BESIDE.format(factor=2))  # the workers have imported the old one
    second = read(run(*command, "--dask", dask.address))
    assert second == read(run(*command, "--workers", 1))
    assert second.loss("he", 0.1) > 1.5 * first.loss("he", 0.1)


def test_a_sweep_and_a_table_are_those_of_one_process(run, dask, mine):
    sweep = ["sweep", "mine.py:problem", "--steps", 10, "--seeds", 2, "--stds", "0.3,0.01", "--json"]
    sweep += ["--learning-rate", 1]
    assert read(run(*sweep, "--dask", dask.address)) == read(run(*sweep, "--workers", 1))
    table = ["reproduce", "table-2", "--data", "digits", "--seeds", 2, "--json"]
    ways = ["--dask", dask.address], ["--workers", 1]
    (elsewhere,), (here,) = (json.loads(run(*table, *way, "--folder", way[0]).stdout) for way in ways)
    assert (elsewhere["results"], elsewhere["findings"]) == (here["results"], here["findings"])


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_a_killed_worker_costs_its_unfinished_runs_only(run, dask, mine):
    victim = dask.add_worker()
    dask.wait_for_workers(3)
    command = ["compare", "mine.py:slowly", *SMALL.split(), "--learning-rates", "0.2,0.3", "--json"]
    built = mine / "built"

    def stamps() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (mine / "kept" / "runs").glob("[!.]*.json")}

    process = subprocess.Popen(
        [sys.executable, "-m", "hessinit", *command, "--dask", dask.address, "--folder", "kept"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: stamps() and str(victim.pid) in built.read_text().split())
        victim.kill()
        before = stamps()
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (0, "")
    assert 0 < len(before) < 12
    assert {name: at for name, at in stamps().items() if name in before} == before
    assert Comparison.from_json(stdout) == read(run(*command, "--workers", 1))


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interruption_cancels_what_is_left_and_the_same_command_continues(run, dask, mine):
    command = ["compare", "mine.py:slowly", *SMALL.split(), "--learning-rates", "0.2,0.3", "--folder", "kept"]
    kept = mine / "kept" / "runs"
    command += ["--dask", dask.address]
    code, stdout, stderr = interrupt(signal.SIGINT, lambda: list(kept.glob("[!.]*.json")), *command)
    assert (code, stdout) == (130, ""), stderr
    said = r"Interrupted: stopped; \d+ of 12 runs are kept in kept\. The same call or command .*\.\n"
    assert re.fullmatch(said, stderr), stderr
    started = len((mine / "built").read_text().split())
    time.sleep(1)
    assert len((mine / "built").read_text().split()) <= started + 2  # a thread that waited for its turn
    assert len(read(run(*command, "--json")).runs) == 12


SCRIPT = """
import sys
import beside
from distributed import Client
from torch import nn
from hessinit import RunSettings, compare

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))

def loss(output, target):
    return beside.FACTOR * nn.functional.cross_entropy(output, target)

if __name__ == "__main__":
    options = dict(schemes=["he"], learning_rates=[0.1], seeds=2, steps=10, batch_size=32)
    here = compare(build, loss, beside.load(), settings=RunSettings(workers=1), **options)
    with Client(sys.argv[1]) as client:
        for executor in (client.get_executor(), client.get_executor(retries=1), client):
            settings = RunSettings(executor=executor)
            there = compare(lambda: build(), loss, beside.load(), settings=settings, **options)
            assert there.runs == here.runs
        assert client.submit(int).result() == 0  # the client stays open
"""


def test_the_executor_of_a_client_takes_what_a_script_defines(dask, mine):
    (mine / "script.py").write_text(SCRIPT)
    found = run_interpreter("script.py", dask.address)
    assert (found.returncode, found.stderr) == (0, "")


def test_errors_on_a_worker_are_told_as_those_here(run, dask, mine):
    Path("here.txt").touch()
    told = refused(run("compare", "mine.py:reads_a_file", *SMALL.split(), "--dask", dask.address))
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'here.txt'" in told
    assert f'File "{mine / "mine.py"}", line' in told
    assert told.endswith("reads_a_file() of mine.py failed, as shown above.\n")
    told = refused(run("compare", "mine.py:imports_late", *SMALL.split(), "--dask", dask.address))
    assert told == (
        "Error: the Dask cluster has no module 'elsewhere'. Install there what is installed here; what your "
        "functions use of your own files is sent with them, if it is imported at the top of a file.\n"
    )


def test_workers_that_lack_hessinit_or_die_are_told(run, mine, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("hessinit.training.cluster.PATIENCE", 1.0)
    (mine / "sitecustomize.py").write_text("import sys; sys.modules['hessinit'] = None")
    fragile = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    alone = Cluster(tmp_path_factory.mktemp("alone"), **fragile)
    try:
        blind = alone.add_worker(PYTHONPATH=str(mine))
        alone.wait_for_workers(1)
        problem = ["compare", "mine.py:problem", *SMALL.split(), "--dask", alone.address]
        assert refused(run(*problem)).startswith("Error: the Dask cluster has no module 'hessinit")
        blind.kill()
        alone.wait_for_workers(0)
        alone.add_worker(PYTHONPATH=ENVIRONMENT["PYTHONPATH"])
        alone.wait_for_workers(1)
        told = refused(run("compare", "mine.py:dies", *SMALL.split(), "--dask", alone.address))
        assert told.startswith("Error: a run was begun again and again, and every worker died; it may need")
        told = refused(run(*problem))
        assert "no worker for 1 s" in told
        assert f"dask worker {alone.address}" in told
    finally:
        alone.end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dask", "127.0.0.1:8786"], "--dask 127.0.0.1:8786 must be an address with its protocol"),
        (["--dask", "tcp://127.0.0.1"], "protocol and port, such as tcp://192.168.0.10:8786"),
        (["--dask", "tcp://[::1]:1", "--workers", 2], "--workers 2 and --dask tcp:.*1 are both given; leave"),
    ],
)
@pytest.mark.parametrize("command", ["compare net.py:drawn", "sweep net.py:drawn", "reproduce table-2"])
def test_wrong_options_are_refused(run, command, options, message):
    assert re.match(f"Error: .*{message}", refused(run(*command.split(), *options)))


def test_a_scheduler_that_does_not_answer_is_refused_before_any_work(run, dask, monkeypatch):
    monkeypatch.setattr(runs, "CONNECTING", 1)
    # Nobody, a worker, and a program that waits for more to be said, as a web server does.
    with Client(dask.address, set_as_default=False) as client:
        worker = next(iter(client.nthreads()))
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        for address in ("tcp://127.0.0.1:1", worker, f"tcp://127.0.0.1:{silent.getsockname()[1]}"):
            started = time.monotonic()
            told = refused(run("compare", "net.py:fails", "--dask", address))
            assert time.monotonic() - started < 4
            assert told.startswith(f"Error: --dask {address}: no Dask scheduler answers there within 1")
            assert told.endswith("Start one with `dask scheduler`, and give the address it prints.\n")


def test_without_dask_it_is_told_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    told = refused(run("compare", "net.py:drawn", "--dask", "tcp://127.0.0.1:1"))
    assert told.endswith('not installed. Run pip install "hessinit[dask]".\n')
