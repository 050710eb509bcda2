"""The JSON lines: written as they come, kept, read back after a kill, gone on with."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_loops import LOSS, batches, train

import tiny
from hessinit.errors import ProblemError
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking
from hessinit.training.track import Tracker, track


def start(path: Path | str, model: torch.nn.Module | None = None, **options: Any) -> Tracker:
    settings: dict[str, Any] = {"every": 2, "max_overhead": 1.0, "log_to": None, "warn": False}
    return track(model or tiny.network(), LOSS, tiny.batch(), path=path, **{**settings, **options})


def test_the_file_has_a_header_and_a_line_for_each_point_at_once(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", optimizer="sgd", lr=0.1, each_layer=True)
    tracker.step(2.0)
    tracker.step(torch.tensor(1.5))
    header, *points = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (header["kind"], header["schema"], header["optimizer"]) == (Tracking.KIND, 1, "SGD")
    assert [point["step"] for point in points] == [0, 2]
    assert points[1]["losses"] == [[1, 2.0], [2, 1.5]]
    assert points[1]["layers"] == tracker.tracking.points[1].layers
    tracker.step(1.0)
    tracking = tracker.close()
    assert Tracking.from_json((tmp_path / "run.jsonl").read_text()) == tracking
    assert Tracking.load(tmp_path / "run.jsonl") == tracking
    assert tracking.losses == ((1, 2.0), (2, 1.5), (3, 1.0))


def test_an_existing_file_is_kept_and_the_next_free_name_taken(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        tracker = start(tmp_path / "curvature.jsonl")
        tracker.close()
        paths.append(tracker.path)
    names = ["curvature.jsonl", "curvature-2.jsonl", "curvature-3.jsonl"]
    assert paths == [tmp_path / name for name in names]
    (tmp_path / "mine.txt").write_text("precious")
    assert start(tmp_path / "mine.txt").path == tmp_path / "mine-2.txt"
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_the_default_file_is_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with track(tiny.network(), LOSS, tiny.batch()) as tracker:
        pass
    assert os.listdir(tmp_path) == ["curvature.jsonl"]
    assert tracker.path == Path("curvature.jsonl")


def test_every_beginning_of_a_file_is_readable(tmp_path: Path) -> None:
    """Wherever a kill cuts it: all whole lines count, and only half a header is no tracking."""
    tracker = start(tmp_path / "run.jsonl", optimizer="sgd", lr=0.1)
    model = tiny.network()
    train(model, batches(5), torch.optim.SGD(model.parameters(), lr=0.1), tracker)
    tracker.close()
    content = (tmp_path / "run.jsonl").read_bytes()
    header = content.index(b"\n")
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")][1:4]
    for length in range(header + 1, len(content), 7):
        found = Tracking.from_json(content[:length])
        assert len(found.points) == sum(end <= length for end in ends), length
    with pytest.raises(ValueError, match="does not begin with a tracker's header"):
        Tracking.from_json(content[: header - 5])


def test_a_killed_training_leaves_its_points(tmp_path: Path) -> None:
    script = (
        "import torch, tiny, time\n"
        "from hessinit.training.track import track\n"
        "tracker = track(tiny.network(), tiny.LOSS, tiny.batch(), every=1, max_overhead=1.0, path='run.jsonl')\n"
        "while True:\n"
        "    tracker.step(1.0)\n"
    )
    path = tmp_path / "run.jsonl"
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")])}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    try:
        patience = time.monotonic() + 300
        while time.monotonic() < patience and not (path.exists() and path.read_bytes().count(b"\n") > 4):
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = Tracking.load(path)
    assert len(killed.points) >= 3
    assert [point.step for point in killed.points] == list(range(len(killed.points)))
    tracker = start(path, resume=True, every=1)
    assert tracker.path == path
    assert tracker.steps == killed.points[-1].step
    tracker.step(0.5)
    assert [point.step for point in tracker.close().points] == list(range(len(killed.points) + 1))
    assert Tracking.load(path) == tracker.tracking


def test_resuming_goes_on_in_the_file_with_its_steps_its_time_and_half_a_line_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = start(path, optimizer="sgd", lr=0.1)
    for loss in (3.0, 2.5, 2.0):
        first.step(loss)
    done = first.close()
    with path.open("a") as file:
        file.write('{"step": 99, "sec')
    second = start(path, resume=True, optimizer="sgd", lr=0.1)
    assert second.steps == 3
    assert second.tracking.seconds >= done.seconds
    second.step(1.5)
    tracking = second.close()
    assert [point.step for point in tracking.points] == [0, 2, 4]
    assert tracking.losses == ((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5))
    assert Tracking.load(path) == tracking
    assert '"step": 99' not in path.read_text()


def test_a_training_that_goes_back_to_a_checkpoint_overwrites_what_came_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tracker = start(path, every=1)
    for loss in (5.0, 4.0, 3.0):
        tracker.step(loss)
    tracker.close()
    again = start(path, every=1, resume=True)
    again.steps = 1
    again.step(4.5)
    tracking = again.close()
    assert [point.step for point in tracking.points] == [0, 1, 2]
    assert tracking.losses == ((1, 5.0), (2, 4.5))
    assert Tracking.load(path) == tracking


def test_resuming_where_there_is_no_file_begins_one(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", resume=True)
    assert tracker.path == tmp_path / "run.jsonl"
    assert [point.step for point in tracker.close().points] == [0]


def test_resuming_with_other_settings_is_noted(tmp_path: Path) -> None:
    start(tmp_path / "run.jsonl", optimizer="sgd", lr=0.1).close()
    tracking = start(tmp_path / "run.jsonl", resume=True, optimizer="adam", lr=0.1).close()
    assert "Resumed with other settings: optimizer was 'SGD' and is 'Adam" in tracking.notes[-1]


def test_failures_are_told_once_also_after_resuming(tmp_path: Path) -> None:
    model, path = tiny.network(), tmp_path / "run.jsonl"
    tracker = start(path, model, every=1)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    tracker.step()
    tracker.close()
    good = tiny.network()
    again = start(path, good, every=1, resume=True)
    with torch.no_grad():
        good[0].weight.fill_(math.nan)
    again.step()
    tracking = again.close()
    (note,) = tracking.notes
    assert note.startswith("Steps 1 to 2 (2 measurements): 0.weight holds NaN")
    assert Tracking.load(path) == tracking


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(
        ProblemError, match="cannot resume: .*data.jsonl does not begin with a tracker's header"
    ):
        start(tmp_path / "data.jsonl", resume=True)
    assert (tmp_path / "data.jsonl").read_text() == '{"a": 1}\n'


def test_a_line_in_the_middle_that_was_edited_is_named(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", every=1)
    tracker.step()
    tracker.close()
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    lines[1] = lines[1][:-5]
    with pytest.raises(ValueError, match="line 2 of the text is not a tracked point"):
        Tracking.from_json("\n".join(lines) + "\n")


def test_an_exception_in_a_with_closes_the_file_and_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), start(tmp_path / "run.jsonl"):
        raise KeyError("mine")
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["line"] == "end"


def test_a_long_training_keeps_a_thousand_losses_evenly(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", every=1700, each_layer=False)
    for step in range(1, 5001):
        tracker.step(float(step))
    tracking = tracker.close()
    steps = [step for step, _ in tracking.losses]
    assert 500 <= len(steps) <= 1000
    assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {8}
    assert all(step == loss for step, loss in tracking.losses)
    read = Tracking.load(tmp_path / "run.jsonl")
    assert read == tracking
    again = start(tmp_path / "run.jsonl", every=1700, resume=True)
    for step in range(5001, 6001):
        again.step(float(step))
    assert again.close().losses == tuple((step, float(step)) for step in range(8, 6001, 8))


def test_a_file_that_cannot_be_written_does_not_end_a_training(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tracker = start(tmp_path / "folder" / "run.jsonl", every=1)
    shutil.rmtree(tmp_path / "folder")
    tracker.step(1.0)
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 1]
    assert "run.jsonl could not be written at step 1: " in tracking.notes[-1]


def test_what_a_full_disk_did_not_take_follows_when_there_is_room_again(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl", every=1)
    tracker.step(1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / "run.jsonl").stat().st_size + 100, limits[1])
    )  # half a line fits
    try:
        tracker.step(2.0)
        tracker.step(3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [point.step for point in Tracking.load(tmp_path / "run.jsonl").points] == [0, 1]
    tracker.step(4.0)
    assert [point.step for point in Tracking.load(tmp_path / "run.jsonl").points] == [0, 1, 2, 3, 4]
    tracking = tracker.close()
    assert Tracking.load(tmp_path / "run.jsonl") == tracking
    told = [note for note in tracking.notes if " could not be written at step " in note]
    assert len(told) == 1
    assert "run.jsonl could not be written at step 2: " in told[0]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_file_that_was_taken_away_is_begun_anew_with_what_follows(tmp_path: Path, resumed: bool) -> None:
    tracker = start(tmp_path / "run.jsonl", every=1)
    if resumed:
        tracker.close()
        tracker = start(tmp_path / "run.jsonl", every=1, resume=True)
    (tmp_path / "run.jsonl").rename(tmp_path / "moved.jsonl")
    tracker.step(1.0)
    assert Tracking.load(tmp_path / "run.jsonl").points == tracker.close().points[1:]
    assert [point.step for point in Tracking.load(tmp_path / "moved.jsonl").points] == [0]


def test_a_training_that_changes_its_folder_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = start("run.jsonl", every=1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    tracker.step()
    assert Tracking.load(tmp_path / "run.jsonl").points == tracker.close().points
    assert os.listdir(tmp_path / "other") == []


def test_an_initialization_and_a_name_travel(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run.jsonl")
    tracker.name = "mine"
    tracker.initialization = Initialization(
        before=None,
        after=None,
        scales={},
        target=1.0,
        rule="network",
        scheme="keep",
        converged=True,
        reason="x",
    )
    tracking = tracker.close()
    read = Tracking.load(tmp_path / "run.jsonl")
    assert read == tracking
    assert (read.name, read.initialization) == ("mine", tracker.initialization)
