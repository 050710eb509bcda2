"""Finished runs are kept and never made again, after any interruption; other settings are refused.

Runs in this process, in worker processes and on executors give the same numbers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import digit_problem as problem
import pytest
import torch
from torch import nn

from hessinit.errors import ProblemError
from hessinit.training.jobs import file_name

TESTS = Path(__file__).parent
SOURCE = TESTS.parents[1] / "src"


def _stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted((folder / "runs").glob("*.json"))}


def _path(folder: Path, scheme: str, rate: float, seed: int) -> Path:
    return folder / "runs" / file_name(f"{scheme}, lr {rate!r}, seed {seed}")


def test_more_schemes_rates_and_seeds_reuse_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = problem.small(folder=folder)
    stamps = _stamps(folder)
    assert len(stamps) == 8
    assert problem.small(folder=folder) == first
    assert _stamps(folder) == stamps
    more = {"schemes": ("he", "glorot", "default"), "learning_rates": (0.5, 0.02, 0.1), "seeds": 3}
    assert problem.small(folder=folder, **more) == problem.small(**more)
    after = _stamps(folder)
    assert len(after) == 27
    assert {name: after[name] for name in stamps} == stamps
    assert problem.small(folder=folder, learning_rates=[0.5]).norm("he") == first.norm("he")


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("used")
    problem.small(folder=folder, schemes=["default", "he", "he+warmup"], warmup=3, seeds=1)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 13}, "steps was 12 there and is 13 here"),
        ({"optimizer": "adam"}, "optimizer was 'sgd' there and is 'adam' here"),
        ({"data": tuple(tensor.flip(0) for tensor in problem.data())}, "hash of the data was"),
        ({"build": problem.build_with_dropout}, "model was 'Sequential"),
        ({"build": problem.build_partly_frozen}, "parameters was '1.weight: float32"),
        ({"build": problem.build_larger}, "loss of a new model was '2.3.*' there and is"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss of a new model was"),
        ({"forward": lambda model, x: model(x)}, "forward was 'None' there and is '.*<lambda>' here"),
        ({"measure_curvature": False}, "measure_curvature was True there and is False here"),
        ({"schemes": {"he": "glorot"}}, "he was 'he' there and is 'glorot' here"),
        ({"schemes": ["he+warmup"], "warmup": 4}, "was 'he with 3 steps of warmup' there and is 'he with 4"),
    ],
)
def test_other_settings_are_refused(used: Path, changes: dict[str, Any], message: str) -> None:
    before = {path: path.read_bytes() for path in used.rglob("*.json")}
    with pytest.raises(ProblemError, match=f"(?s)folder='.*' .*{message}.*another folder"):
        problem.small(**{"folder": used, "seeds": 1, **changes})
    assert {path: path.read_bytes() for path in used.rglob("*.json")} == before


def test_files_that_were_edited_or_moved_are_named(tmp_path: Path, used: Path) -> None:
    problem.small(folder=tmp_path, seeds=1, steps=13)
    path = _path(tmp_path, "he", 0.1, 0)
    whole = path.read_text()
    data = json.loads(whole)
    data["value"].pop("losses")
    for text, message in [
        (whole[:50], "cannot be read .*Delete it, and it is run again"),
        (json.dumps(data), "is not a whole run: .*losses"),
        (_path(used, "he", 0.1, 0).read_text(), "belongs to another experiment or run .*Delete it"),
    ]:
        path.write_text(text)
        with pytest.raises(ProblemError, match=f"{path.name} {message}"):
            problem.small(folder=tmp_path, seeds=1, steps=13)


SCRIPT = """
import sys
import digit_problem as problem

if __name__ == "__main__":
    rates = (0.1, 0.2, 0.5)
    problem.small(folder=sys.argv[1], workers=2, forward=problem.call_slowly, learning_rates=rates)
"""


def _begin(folder: Path) -> subprocess.Popen[str]:
    """Start the script in a process group of its own, and wait until it has finished another run."""
    script = folder.with_name("script.py")
    script.write_text(SCRIPT)
    known, deadline = len(_stamps(folder)), time.monotonic() + 300
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while len(_stamps(folder)) <= known and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()
    return process


def _children(pid: int) -> list[Path]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/stat") for child in found]


def _wait_for_end_of(processes: list[Path]) -> None:
    deadline = time.monotonic() + 300
    while any(stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z" for stat in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_killed_or_interrupted_it_ends_its_workers_continues_and_gives_the_same_table(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    process = _begin(folder)
    workers = _children(process.pid)
    assert len(workers) >= 2
    process.kill()
    _wait_for_end_of(workers)
    process.communicate()
    killed = _stamps(folder)

    process = _begin(folder)
    workers = _children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = process.communicate(timeout=300)
    _wait_for_end_of(workers)
    assert f"of 12 runs are kept in {folder}. The same call or command continues from there." in errors

    assert len(killed) < len(_stamps(folder)) < 12
    settings: dict[str, Any] = {"learning_rates": (0.1, 0.2, 0.5)}
    whole = problem.small(folder=folder, forward=problem.call_slowly, **settings)
    assert whole.runs == problem.small(**settings).runs
    after = _stamps(folder)
    assert len(after) == 12
    assert {name: after[name] for name in killed} == killed


SETTINGS: dict[str, Any] = {
    "build": problem.build_with_dropout,  # draws in every step
    "schemes": {"default": "default", "lsuv": "lsuv", "drawn": problem.draw, "odd": problem.fail},
    "optimizer": problem.adam_without_momentum,
    "learning_rates": (0.01, 0.03),
}


def test_processes_threads_and_another_order_give_the_same_bits(capfd: pytest.CaptureFixture[str]) -> None:
    alone = problem.small(**SETTINGS)
    before = torch.random.get_rng_state()
    assert problem.small(**SETTINGS, workers=2) == alone
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    with ThreadPoolExecutor(3) as executor:
        assert problem.small(**SETTINGS, workers=None, executor=executor) == alone
        assert executor.submit(int).result() == 0  # the executor stays open
    schemes = dict(reversed(SETTINGS["schemes"].items()))
    shuffled = problem.small(**{**SETTINGS, "schemes": schemes, "seeds": (1, 0)})
    assert all(run in shuffled.runs for run in alone.runs)


def test_processes_of_an_executor_get_the_callers_dtype_and_send_their_errors_back() -> None:
    images, labels = problem.data()
    settings = {"data": (images.double(), labels), "schemes": ["he"], "seeds": 1}
    torch.set_default_dtype(torch.float64)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            elsewhere: dict[str, Any] = {**settings, "workers": None, "executor": executor}
            assert problem.small(**elsewhere) == problem.small(**settings)
            assert not labels.is_shared()
    finally:
        torch.set_default_dtype(torch.float32)
    wrong = labels.clone()
    wrong[300:] = 99  # not in every mini-batch: the check of the first model finds nothing
    with ThreadPoolExecutor(1) as threads, pytest.raises(IndexError, match="Target 99 is out of bounds"):
        problem.small(data=(images, wrong), batch_size=1, steps=60, workers=None, executor=threads)


def test_what_cannot_be_sent_to_other_processes_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ProblemError, match="cannot be sent to other processes: .*lambda.*Pass workers=1"):
        problem.small(build=lambda: problem.build(), workers=2)
    main, script = sys.modules["__main__"], tmp_path / "script.py"
    script.write_text("import hessinit\n")
    for file in (str(script), "<stdin>"):
        monkeypatch.setattr(main, "__file__", file, raising=False)
        with pytest.raises(ProblemError, match=f"would run {file} again.*__name__.*Or pass workers=1"):
            problem.small(workers=2)


def test_without_a_wish_for_workers_it_runs_here_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    comparison = problem.small(build=lambda: problem.build(), workers=None)
    assert comparison.notes[0].startswith("All runs were made in one process, one after another: ")
    assert comparison.runs == problem.small().runs
