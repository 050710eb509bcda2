"""The log of a tracker: JSON lines written as they come, resumed after a kill; TensorBoard and W&B."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_loops import LOSS, tracked

import tiny
from calls import call
from hessinit import ProblemError, Tracker, Tracking, track
from hessinit.results.initialization import Initialization

TESTS = Path(__file__).parents[1]
SEARCHED = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}


def start(path: Path | str, model: torch.nn.Module | None = None, **options: Any) -> Tracker:
    settings: dict[str, Any] = {"every": 1, "max_overhead": 1.0, "log_to": None, "warn": False}
    return call(track, model or tiny.network(), LOSS, tiny.batch(), path=path, **{**settings, **options})


def run(path: Path, steps: int = 3, **options: Any) -> Tracking:
    tracker = start(path, **options)
    for loss in range(steps):
        tracker.step(float(loss))
    return tracker.close()


def test_the_file_has_a_header_and_a_line_for_each_point_at_once(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", every=2, optimizer="sgd", lr=0.1, each_layer=True)
    tracker.step(2.0)
    tracker.step(torch.tensor(1.5))
    header, *points = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (header["kind"], header["optimizer"]) == ("hessinit tracking", "SGD")
    assert [point["step"] for point in points] == [0, 2]
    assert points[1]["losses"] == [[1, 2.0], [2, 1.5]]
    assert points[1]["layers"] == tracker.tracking.points[1].layers
    tracker.step(1.0)
    tracking = tracker.close()
    assert Tracking.from_json((tmp_path / "run.jsonl").read_text()) == tracking
    assert Tracking.load(tmp_path / "run.jsonl") == tracking
    assert tracking.losses == ((1, 2.0), (2, 1.5), (3, 1.0))


def test_an_earlier_trackers_file_is_kept_as_a_backup_and_any_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "curvature.jsonl"
    run(path)
    before = path.read_bytes()
    assert len(run(path, steps=1).points) == 2
    assert (tmp_path / "curvature.jsonl.bak").read_bytes() == before
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ProblemError, match=r"mine.txt' exists and is not a tracker's file"):
        start(tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_every_beginning_of_a_file_is_readable(tmp_path: Path) -> None:
    """Wherever a kill cuts it: all whole lines count, and only half a header is no tracking."""
    run(tmp_path / "run.jsonl", steps=5, every=2, optimizer="sgd", lr=0.1)
    content = (tmp_path / "run.jsonl").read_bytes()
    header = content.index(b"\n")
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")][1:4]
    for length in range(header + 1, len(content), 7):
        found = Tracking.from_json(content[:length])
        assert len(found.points) == sum(end <= length for end in ends), length
    with pytest.raises(ValueError, match="is not JSON"):
        Tracking.from_json(content[: header - 5])


def test_a_killed_training_leaves_its_points(tmp_path: Path) -> None:
    script = (
        "import tiny, hessinit; problem = tiny.network(), tiny.LOSS, tiny.batch()\n"
        "tracker = hessinit.track(*problem, every=1, max_overhead=1.0, path='run.jsonl')\n"
        "while True: tracker.step(1.0)\n"
    )
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=SEARCHED)
    try:
        patience = time.monotonic() + 300
        while time.monotonic() < patience and not (path.exists() and path.read_bytes().count(b"\n") > 4):
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    steps = [point.step for point in Tracking.load(path).points]
    assert steps == list(range(max(3, len(steps))))
    tracker = start(path, resume=True)
    assert (tracker.path, tracker.steps) == (path, steps[-1])
    tracker.step(0.5)
    assert [point.step for point in tracker.close().points] == [*steps, len(steps)]
    assert Tracking.load(path) == tracker.tracking


def test_resuming_continues_the_file_with_its_steps_its_time_and_other_settings(tmp_path: Path) -> None:
    path, model = tmp_path / "run.jsonl", tiny.network()
    first = start(path, model, every=2, optimizer="sgd", lr=0.1)
    first.name = "mine"
    known = {"target": 1.0, "rule": "network", "scheme": "keep", "converged": True, "reason": "x"}
    first.initialization = Initialization(before=None, after=None, scales={}, **known)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    for loss in (3.0, 2.5, 2.0):
        first.step(loss)
    done = first.close()
    with path.open("a") as file:
        file.write('{"step": 99, "sec')
    second = start(path, good := tiny.network(), every=1, resume=True, optimizer="adam", lr=0.1)
    assert second.steps == 3
    assert second.tracking.seconds >= done.seconds
    with torch.no_grad():
        good[0].weight.fill_(math.nan)
    second.step(1.5)
    assert Tracking.load(path).notes == second.tracking.notes  # were it killed here
    tracking = second.close()
    assert Tracking.load(path) == tracking
    assert (tracking.name, tracking.initialization, tracking.every) == ("mine", first.initialization, 1)
    assert [point.step for point in tracking.points] == [0, 2, 4]
    assert tracking.losses == ((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5))
    *_, settings, failures = tracking.notes
    assert "optimizer was 'SGD' and is 'Adam" in settings
    assert failures.startswith("Steps 2 to 4 (2 measurements): 0.weight holds NaN")
    assert '"step": 99' not in path.read_text()


def test_going_back_takes_out_what_came_after(tmp_path: Path) -> None:
    tracker = start(path := tmp_path / "run.jsonl", every=10)
    for step in range(1, 51):
        tracker.step(float(step))
    tracker.steps = 12
    assert [point.step for point in tracker.tracking.points] == [0, 10]
    assert tracker.tracking.losses[-1] == (12, 12.0)
    assert tracker.measure().training_loss is None  # that of step 50 is another training's
    for _ in range(5):
        tracker.step(0.5)
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 10, 12]
    assert [step for step, _ in tracking.losses] == list(range(1, 18))
    assert tracking.losses[12:] == tuple((step, 0.5) for step in range(13, 18))
    assert Tracking.load(path) == tracking


def test_what_a_full_disk_did_not_take_or_someone_removed_follows_with_the_next_point(tmp_path: Path) -> None:
    tracker = start(path := tmp_path / "run.jsonl")
    tracker.step(1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))  # half a line fits
    try:
        tracker.step(2.0)
        tracker.step(3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [point.step for point in Tracking.load(path).points] == [0, 1]
    tracker.step(4.0)
    assert Tracking.load(path).points == tracker.tracking.points
    path.unlink()
    tracker.step(5.0)
    tracking = tracker.close()
    assert Tracking.load(path) == tracking
    assert tracking.losses == tuple((step, float(step)) for step in range(1, 6))
    assert all("run.jsonl could not be written: " in note for note in tracking.notes)
    assert tracking.notes


def test_a_file_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    for content in ("", "a,b", '{"kind": "other"}', '{"a": 1}\n'):
        (tmp_path / "data.jsonl").write_text(content)
        with pytest.raises(ProblemError, match=r"cannot resume: .*data.jsonl (is not|holds) "):
            start(tmp_path / "data.jsonl", resume=True)
        assert (tmp_path / "data.jsonl").read_text() == content
    run(path := tmp_path / "run.jsonl", steps=1)
    before = path.read_bytes()
    with pytest.raises(ProblemError, match="tracks curvature='gauss-newton', not 'hessian'"):
        start(path, resume=True, curvature="hessian")
    assert path.read_bytes() == before


def test_a_long_training_keeps_a_thousand_losses_evenly(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", every=1700, each_layer=False)
    for step in range(1, 5001):
        tracker.step(float(step))
    tracking = tracker.close()
    assert tracking.losses == tuple((step, float(step)) for step in range(8, 5001, 8))
    assert Tracking.load(tmp_path / "run.jsonl") == tracking
    again = start(tmp_path / "run.jsonl", every=1700, resume=True)
    for step in range(5001, 6001):
        again.step(float(step))
    assert again.close().losses == tuple((step, float(step)) for step in range(8, 6001, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own dependencies
def test_functions_and_tensorboard_get_every_scalar_and_a_failing_sink_is_left_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    seen: list[tuple[dict[str, float], int]] = []

    def full(values: dict[str, float], step: int) -> None:
        if step:
            raise OSError("no space left on device")

    with SummaryWriter(str(tmp_path)) as writer:
        sinks = [full, writer, lambda *call: seen.append(call)]
        tracker = tracked(tiny.network(), tiny.batch(), "sgd", lr=0.1, each_layer=True, log_to=sinks)
        tracker.step()
        tracker.step()
    tracking, events = tracker.close(), EventAccumulator(str(tmp_path)).Reload()
    assert [step for _, step in seen] == [0, 1, 2]
    point = tracking.points[1]
    scalars = {"norm": point.norm, "lr_times_norm": 0.1 * point.norm, "lr_over_limit": point.lr_over_limit}
    scalars |= {"loss": point.loss, "layers/0": point.layers["0"], "layers/2": point.layers["2"]}
    assert seen[1][0] == {f"hessinit/{name}": value for name, value in scalars.items()}
    for name in seen[0][0]:
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert read == [(step, pytest.approx(values[name], rel=1e-6)) for values, step in seen]
    assert tracking.notes[-1] == "Logging stopped at step 1: OSError('no space left on device')"


class WandbRun:
    """As a run of W&B: rows in the order of their steps; what comes for an earlier step is dropped."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = [(0, {})]
        self.metrics: dict[str, dict[str, str]] = {}

    @property
    def step(self) -> int:
        return self.rows[-1][0]

    def define_metric(self, name: str, **settings: str) -> None:
        self.metrics[name] = settings

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step, "dropped"
        if step > self.step:
            self.rows.append((step, {}))
        assert not values.keys() & self.rows[-1][1].keys(), "overwritten"
        self.rows[-1][1].update(values)

    def values(self, name: str) -> list[float]:
        return [row[name] for _, row in self.rows if name in row]


@pytest.mark.parametrize("given", [True, False])
def test_a_run_of_wandb_is_given_or_found_and_has_an_axis_of_its_own(given: bool, monkeypatch: Any) -> None:
    run = WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None if given else run))
    tracker = tracked(tiny.network(), tiny.batch(), every=2, log_to=run if given else "auto")
    for step in range(5):
        run.log({"train/loss": 1.0 - 0.1 * step}, step=10 * step)  # a step count of its own
        tracker.step()
        run.log({"train/late": step}, step=10 * step)
    for _ in range(3):  # two points without a row of the user's in between
        tracker.step()
    tracking = tracker.close()
    assert run.values("hessinit/step") == [0, 2, 4, 6, 8]
    assert run.values("hessinit/norm") == [point.norm for point in tracking.points]
    assert run.values("train/late") == [0, 1, 2, 3, 4]
    assert run.metrics == {"hessinit/step": {}, "hessinit/*": {"step_metric": "hessinit/step"}}
    assert tracking.notes == ()  # no logging failed
