"""What a measurement tells while it runs, before it runs, and about its cost."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from calls import call, measure
from hessinit.curvature.engine_choice import evaluate
from hessinit.curvature.progress import Progress
from hessinit.measurement import plan as costs
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from hessinit.progress import ProgressState, progress_bar
from hessinit_paper import quadratic_form
from tiny import LOSS, batch, network
from zoo.snapshot import differences, snapshot

TICK = 0.1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on by a tenth of a second whenever somebody looks."""
    now = [0.0]

    def look() -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(time, "perf_counter", look)
    return now


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "gram"},
        {"estimator": "lanczos"},
        {"curvature": "hessian"},
        {"curvature": "hessian", "network": False},
    ],
)
def test_progress_begins_after_two_seconds_and_ends_with_every_layer_and_product(
    clock: list[float], options: dict[str, Any]
) -> None:
    states: list[ProgressState] = []
    report = measure(network(), LOSS, batch(), progress=states.append, tolerance=1e-6, **options)
    rows = (*report.layers, report.network) if options.get("network", True) else report.layers
    *running, last = states
    assert running
    assert all(state.seconds >= 2 and state.seconds_left > 0 for state in running)
    pairs = zip(running, running[1:], strict=False)
    assert all(after.seconds - before.seconds >= 0.25 for before, after in pairs)
    assert {state.name for state in running} <= {*report.names, "network"}
    assert [state.done for state in states] == sorted(state.done for state in states)
    assert (last.done, last.total, last.seconds_left, last.name) == (len(report), len(report), 0, "")
    assert last.products == sum(row.products for row in rows)


def test_both_matrices_and_each_batch_count_as_one_layer(clock: list[float]) -> None:
    states: list[ProgressState] = []
    batches = [batch(), batch()]
    report = measure(network(), LOSS, batches, curvature="both", progress=states.append, details="trace")
    assert {state.total for state in states} == {len(report)}
    assert "spectrum" in {state.name for state in states}
    assert states[-1].done == len(report)


@pytest.mark.usefixtures("still_clock")
def test_what_takes_less_than_two_seconds_tells_nothing_and_has_no_cost_in_gradients() -> None:
    states: list[ProgressState] = []
    report = hessinit.measure(network(), LOSS, batch(), progress=states.append)
    assert (states, report.seconds, report.gradients) == ([], 0.0, None)


def test_the_time_left_is_that_of_the_products_to_come(clock: list[float]) -> None:
    states: list[ProgressState] = []
    progress = Progress(states.append, 2, typical=10)
    clock[0] += 5
    for _ in range(4):
        progress.product("fc1.weight")
        clock[0] += 1 - TICK
    # 6 more for fc1, 10 for fc2, 10 for the network; a second each.
    assert [state.seconds_left for state in states][1:] == pytest.approx([28, 27, 26])
    assert states[-1].name == "fc1"
    progress.layer_done("fc1.weight")
    progress.product("fc2.weight")
    # fc1 took 4, so fc2 needs 3 more, and the network 4.
    assert states[-1].seconds_left == pytest.approx(7)
    assert (states[-1].done, states[-1].products) == (1, 5)


def test_an_exception_of_the_callback_ends_the_measurement_and_leaves_the_model(clock: list[float]) -> None:
    class EnoughError(Exception):
        pass

    def stop(state: ProgressState) -> None:
        raise EnoughError

    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    before = snapshot(model, LOSS, batch())
    with pytest.raises(EnoughError):
        hessinit.measure(model, LOSS, batch(), progress=stop, tolerance=1e-6)
    assert differences(before, snapshot(model, LOSS, batch())) == []


@pytest.mark.parametrize("watched", [True, False])
def test_a_terminal_shows_layers_products_and_time_left(monkeypatch: Any, watched: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return watched

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("Measuring net …") as report:
        report(ProgressState("layers", 3, 12, 4.0, 8.0, "fc3", 40))
    assert ("3 of 12 layers, 40 products, 8 seconds left: fc3" in stream.getvalue()) is watched
    assert bool(stream.getvalue()) is watched


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (network(), {}),
        (network(), {"estimator": "lanczos"}),
        (network(), {"curvature": "hessian"}),
        (network(), {"curvature": "both"}),
        (normalized(), {}),
        (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 300)), {}),
    ],
)
def test_a_plan_names_the_engine_of_the_measurement_and_changes_nothing(
    model: nn.Module, options: Any
) -> None:
    before = snapshot(model, LOSS, batch())
    plan = call(hessinit.plan, model, LOSS, batch(), **options)
    assert differences(before, snapshot(model, LOSS, batch())) == []
    report = measure(model, LOSS, batch(), **options)
    assert isinstance(plan, hessinit.MeasurementPlan)
    assert (plan.engine, plan.engine_reason) == (report.engine, report.engine_reason)
    assert (plan.layers, plan.parameters) == (len(report), report.network.parameters)
    assert (plan.examples, plan.curvature) == (report.examples, report.curvature)
    assert plan.seconds == plan.gradients * plan.gradient_seconds > 0
    assert plan.training_steps == plan.memory / plan.training_memory > 1


@pytest.mark.usefixtures("still_clock")
def test_the_expected_gradients_follow_the_formula() -> None:
    model, products = nn.Linear(4, 3), 13.6

    def expected(**options: Any) -> float:
        return call(hessinit.plan, model, LOSS, batch(), **options).gradients

    # The root of a softmax of three classes has two columns; the layer's and the network's products.
    assert expected() == pytest.approx(8 + 2 * 0.4 + 2 * products * 0.4)
    assert expected(network=False) == pytest.approx(8 + 2 * 0.4 + products * 0.4)
    # The whole forward lies behind the only layer.
    lanczos = 2 * products * 0.9
    assert expected(estimator="lanczos") == pytest.approx(8 + lanczos)
    assert expected(estimator="lanczos", tolerance=0.1) == pytest.approx(8 + 2 * 7.2 * 0.9)
    assert expected(estimator="lanczos", max_iterations=5) == pytest.approx(8 + 2 * 5 * 0.9)
    assert expected(curvature="hessian") == pytest.approx(8 + 2 * lanczos)
    both = expected(curvature="both", estimator="lanczos")
    assert both == pytest.approx(8 + (1 + 2) * lanczos)


def test_the_expected_memory_counts_what_the_graph_saves_once() -> None:
    def saved(examples: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        batch = torch.randn(examples, 4), torch.randn(examples, 2)
        problem = FunctionalProblem(Problem(model, nn.MSELoss(), batch))
        with problem.settings():
            return costs._saved_bytes(evaluate(problem)[0].loss, problem)

    # For each example: 4 inputs and 5 outputs of tanh, saved twice, in float32; the loss in float64 saves its
    # input and its target.
    assert saved(8) == 8 * (4 * 4 + 5 * 4 + 2 * 8 + 2 * 8)
    assert saved(24) == 3 * saved(8)


MEMORY = """
import torch
from torch import nn
import hessinit
from timing import PeakMemory

def build(kind, size):
    first = nn.EmbeddingBag(size, 64) if kind == "embedding" else nn.Linear(size, 64)
    inputs = torch.randint(size, (16, 8)) if kind == "embedding" else torch.randn(16, size)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 4))
    return model, nn.CrossEntropyLoss(), (inputs, torch.arange(16) % 4)

torch.set_num_threads(1)
cases = ("dense", {}), ("embedding", {}), ("dense", {"estimator": "lanczos", "tolerance": 0.1})
for kind, options in cases:
    hessinit.measure(*build(kind, 10), **options)
    problem = build(kind, 60_000)
    plan = hessinit.plan(*problem, **options)
    with PeakMemory() as peak:
        hessinit.measure(*problem, **options)
    print(plan.memory / (peak.mebibytes * 2**20 + sum(one.nbytes for one in problem[0].parameters())))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux")
def test_the_expected_memory_is_within_a_factor_of_two_where_weights_dominate() -> None:
    # In a process of its own. The weights, one copy and the graphs alone are a fifth of it.
    root = Path(__file__).parents[2]
    paths = f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-W", "ignore", "-c", MEMORY]
    found = subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=300)
    ratios = [float(one) for one in found.stdout.split()]
    assert len(ratios) == 3
    assert 0.5 < min(ratios) <= max(ratios) < 2, ratios


def test_what_is_not_counted_is_said() -> None:
    plan = hessinit.plan(network(), LOSS, batch(), details=["trace", "jacobians"])
    assert plan.notes == ("Not counted: trace, jacobians.",)


def test_every_result_of_a_measurement_has_its_cost_in_gradients(tmp_path: Path) -> None:
    model, optimizer = network(), torch.optim.SGD
    found = hessinit.initialize_(model, LOSS, batch(), lr=0.1)
    log = {"path": tmp_path / "curvature.jsonl", "optimizer": optimizer(model.parameters(), 0.1)}
    with hessinit.track(model, LOSS, batch(), **log) as tracker:
        tracker.measure()
    assert found.before is not None
    assert found.after is not None
    results: list[Any] = [
        hessinit.measure(model, LOSS, batch()), hessinit.advise(model, LOSS, batch()),
        quadratic_form(hessinit.Problem(model, LOSS, batch())), found, found.before, found.after,
        *tracker.tracking.points,
    ]  # fmt: skip
    assert all(result.gradients > 0 for result in results)
    assert "gradients)" in str(results[0])
