"""Going on in a file: which file, with what, and from which step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from hessinit.errors import ProblemError
from hessinit.results.track_record import Tracking
from hessinit.training.track import Tracker, track


def start(path: Path | str, **options: Any) -> Tracker:
    settings: dict[str, Any] = {"every": 1, "max_overhead": 1.0, "log_to": None, "warn": False}
    return track(tiny.network(), tiny.LOSS, tiny.batch(), path=path, **{**settings, **options})


def run(path: Path, losses: int = 3, **options: Any) -> Tracker:
    tracker = start(path, **options)
    for loss in range(losses):
        tracker.step(float(loss))
    tracker.close()
    return tracker


def test_going_back_takes_out_what_came_after_also_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tracker = start(path, every=10)
    for step in range(1, 51):
        tracker.step(float(step))
    tracker.steps = 12
    assert [point.step for point in tracker.tracking.points] == [0, 10]
    assert tracker.tracking.losses[-1] == (12, 12.0)
    assert Tracking.load(path).points == tracker.tracking.points  # were it killed here
    assert Tracking.load(path).losses == tracker.tracking.losses
    assert tracker.measure().training_loss is None  # that of step 50 is another training's
    for _ in range(5):
        tracker.step(0.5)
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 10, 12]
    assert [step for step, _ in tracking.losses] == list(range(1, 18))
    assert tracking.losses[12:] == tuple((step, 0.5) for step in range(13, 18))
    assert Tracking.load(path) == tracking


def test_setting_the_step_that_it_is_at_writes_nothing(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl")
    tracker.step(1.0)
    before = (tmp_path / "run.jsonl").read_text()
    for step in (1, 5, 5):
        tracker.steps = step
    assert (tmp_path / "run.jsonl").read_text() == before


def test_another_curvature_is_not_put_into_the_same_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(path)
    before = path.read_bytes()
    with pytest.raises(ProblemError, match="follows curvature='gauss-newton', and 'hessian' was asked for"):
        start(path, resume=True, curvature="hessian")
    assert path.read_bytes() == before


@pytest.mark.parametrize("ends", [True, False])
def test_other_settings_are_those_of_the_file_from_then_on(tmp_path: Path, ends: bool) -> None:
    path = tmp_path / "run.jsonl"
    run(path)
    tracker = start(path, resume=True, every=2, max_overhead=0.9, optimizer="adam", lr=0.1)
    tracker.step()
    tracking = tracker.close() if ends else tracker.tracking
    read = Tracking.load(path)
    assert (read.every, read.max_overhead) == (tracking.every, tracking.max_overhead) == (2, 0.9)
    assert read.notes == tracking.notes
    assert "optimizer was '' and is 'Adam" in read.notes[-1]
    assert read.seconds == pytest.approx(tracking.seconds, abs=0.5)
    assert read.seconds >= read.points[-1].seconds
    if ends:
        assert read == tracking


def test_a_newer_file_beside_it_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "curvature.jsonl"
    first, second = run(path), run(path)
    assert second.path is not None
    os.utime(path, ns=(1, 1))
    before = path.read_bytes()
    with pytest.raises(
        ProblemError, match=r"in curvature.jsonl: curvature-2.jsonl .* newer.*path='.*-2.jsonl', "
    ):
        start(path, resume=True)
    assert path.read_bytes() == before
    assert start(second.path, resume=True).steps == 3
    assert start(path, resume="anyway").path == first.path
    os.utime(second.path, ns=(1, 1))
    assert start(path, resume=True).path == path


@pytest.mark.parametrize("content", ["", '{"kind": "hess', '{"kind": "hessinit tracking", "schema": 1, "li'])
def test_a_file_that_was_killed_within_its_header_is_begun_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    tracker = run(path, resume=True)
    assert tracker.path == path
    assert [point.step for point in Tracking.load(path).points] == [0, 1, 2, 3]
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "hessinit tracking"


@pytest.mark.parametrize("content", ["a,b", '{"kind": "other"}', '{"kind": "hessinit report", "sch'])
def test_half_a_line_of_something_else_is_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ProblemError, match="does not begin with a tracker's header"):
        start(path, resume=True)
    assert path.read_text() == content


def test_resume_is_a_switch_or_a_word() -> None:
    with pytest.raises(ProblemError, match="resume='yes' must be True or False"):
        start("curvature.jsonl", resume="yes")


class Graph:
    """Not a structure that hessinit knows."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes


def test_the_examples_inside_an_object_of_ones_own_are_kept_too() -> None:
    inputs, targets = tiny.batch()
    graph = Graph(inputs.clone())
    tracker = track(
        tiny.network(), tiny.LOSS, (graph, targets), forward=lambda model, one: model(one.nodes), path=None
    )
    first = tracker.tracking.points[0].norm
    graph.nodes.zero_()
    assert tracker.measure().norm == first
