"""The same numbers wherever the runs are made, and refusals of what cannot travel to other processes."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import digit_problem as problem
import pytest
import torch

from hessinit.comparing.executing import ALONE
from hessinit.errors import ProblemError
from hessinit.results.comparison import Comparison

SETTINGS: dict[str, Any] = {
    "build": problem.build_with_dropout,  # draws in every step
    "schemes": {"default": "default", "lsuv": "lsuv", "drawn": problem.draw, "odd": problem.fail},
    "optimizer": problem.adam_without_momentum,
    "learning_rates": (0.01, 0.03),
}


@pytest.fixture(scope="module")
def alone() -> Comparison:
    return problem.small(**SETTINGS)


def test_two_workers_give_the_same_numbers(alone: Comparison, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state()
    assert problem.small(**SETTINGS, workers=2) == alone
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_processes_of_an_executor_get_the_callers_default_dtype_and_no_shared_memory() -> None:
    images, labels = problem.data()
    settings = {"data": (images.double(), labels), "schemes": ["he"], "seeds": 1}
    torch.set_default_dtype(torch.float64)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            there = problem.small(**settings, workers=None, executor=executor)
        assert there == problem.small(**settings)
        assert not labels.is_shared()
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_of_an_executor_give_the_same_numbers(alone: Comparison) -> None:
    with ThreadPoolExecutor(3) as executor:
        assert problem.small(**SETTINGS, workers=None, executor=executor) == alone
        assert executor.submit(int).result() == 0  # it is the caller's, and goes on


def test_another_order_gives_the_same_numbers(alone: Comparison) -> None:
    schemes = dict(reversed(SETTINGS["schemes"].items()))
    rates = tuple(reversed(SETTINGS["learning_rates"]))
    shuffled = problem.small(**{**SETTINGS, "schemes": schemes, "learning_rates": rates, "seeds": (1, 0)})
    assert set(shuffled.schemes) == set(alone.schemes)
    for run in alone.runs:
        (same,) = (one for one in shuffled.runs_of(run.scheme, run.learning_rate) if one.seed == run.seed)
        assert same == run


def test_a_function_that_cannot_travel_is_refused_with_the_way_out() -> None:
    with pytest.raises(ProblemError, match="cannot be sent to other processes: .*lambda.*Pass workers=1"):
        problem.small(build=lambda: problem.build(), workers=2)


def test_without_a_wish_for_workers_it_runs_here_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hessinit.comparing.executing._default_workers", lambda experiment: 2)
    comparison = problem.small(build=lambda: problem.build(), workers=None)
    assert comparison.notes[0].startswith(ALONE)
    assert comparison.runs == problem.small().runs


def test_a_function_of_an_interactive_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(main, "build_here", problem.build, raising=False)
    monkeypatch.setattr(problem.build, "__module__", "__main__")
    monkeypatch.setattr(problem.build, "__qualname__", "build_here")
    with pytest.raises(ProblemError, match="interactive session.*Put it into a file.*workers=1"):
        problem.small(workers=2)


def test_a_script_that_would_start_itself_again_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import hessinit\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(ProblemError, match="script.py would run as a whole in every worker.*__name__"):
        problem.small(workers=2)


def test_a_program_from_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(
        ProblemError, match="comes from <stdin>, no file .*Put it into a file. Or pass workers=1"
    ):
        problem.small(workers=2)


def test_an_error_in_a_run_reaches_the_caller() -> None:
    labels = problem.data()[1].clone()
    labels[300:] = 99  # not in every mini-batch: the first look finds nothing
    settings = {"data": (problem.data()[0], labels), "schemes": ["he"], "batch_size": 1, "steps": 60}
    with ThreadPoolExecutor(1) as executor, pytest.raises(IndexError, match="Target 99 is out of bounds"):
        problem.small(**settings, workers=None, executor=executor)
    with pytest.raises(IndexError, match="Target 99 is out of bounds"):
        problem.small(**settings)


class StubbornError(Exception):
    """Cannot be made anew from its arguments, so no process can send it to another."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def _refuse(model: Any, images: torch.Tensor) -> torch.Tensor:
    if multiprocessing.parent_process() is not None:
        raise StubbornError("this", "that")
    output: torch.Tensor = model(images)
    return output


def test_an_error_that_cannot_be_sent_still_says_what_it_was() -> None:
    with pytest.raises(RuntimeError, match="^StubbornError: this and that$"):
        problem.small(forward=_refuse, schemes=["default"], workers=2, curvature_at_start=False)
