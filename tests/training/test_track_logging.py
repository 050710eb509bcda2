"""Scalars in TensorBoard, in Weights & Biases, and in any function: with the real libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_loops import tracked

import tiny


def test_a_function_gets_every_scalar_by_name() -> None:
    seen: list[tuple[dict[str, float], int]] = []
    tracker = tracked(
        tiny.network(), tiny.batch(), "sgd", lr=0.1, each_layer=True, log_to=lambda *call: seen.append(call)
    )
    tracker.step()
    points = tracker.close().points
    assert [step for _, step in seen] == [0, 1]
    assert seen[1][0] == {
        "hessinit/norm": points[1].norm,
        "hessinit/lr_times_norm": 0.1 * points[1].norm,
        "hessinit/edge": points[1].lr_over_limit,
        "hessinit/loss": points[1].loss,
        "hessinit/layers/0": points[1].layers["0"],
        "hessinit/layers/2": points[1].layers["2"],
    }


def test_what_is_not_known_is_not_logged() -> None:
    seen: list[dict[str, float]] = []
    tracked(tiny.network(), tiny.batch(), log_to=[lambda values, step: seen.append(values)])
    assert set(seen[0]) == {"hessinit/norm", "hessinit/loss"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own dependencies
def test_tensorboard_reads_back_what_was_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        tracker = tracked(tiny.network(), tiny.batch(), "sgd", lr=0.1, log_to=writer)
        tracker.step()
        tracker.step()
    events = EventAccumulator(str(tmp_path)).Reload()
    points = tracker.close().points
    for name, attribute in (("norm", "norm"), ("edge", "lr_over_limit"), ("lr_times_norm", "lr_times_norm")):
        read = events.Scalars(f"hessinit/{name}")
        assert [event.step for event in read] == [0, 1, 2]
        assert [event.value for event in read] == pytest.approx(
            [getattr(point, attribute) for point in points], rel=1e-6
        )


WANDB = """
import glob, json, struct, wandb, tiny
from wandb.proto.wandb_internal_pb2 import Record
from hessinit.training.track import track

def records(data, place=7, text=b""):  # LevelDB's log: blocks of 32 KiB, pieces with a head of 7 bytes
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        text += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(text)
            text = b""

def read(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

run = wandb.init(project="hessinit-test", mode="offline", dir=".")
options = {"optimizer": "sgd", "lr": 0.1, "every": 2, "max_overhead": 1.0, "path": None}
tracker = track(tiny.network(), tiny.LOSS, tiny.batch(), **options)
for step in range(5):
    run.log({"train/loss": 1.0 - 0.1 * step}, step=10 * step)  # a step count of its own
    tracker.step()
    run.log({"train/late": step}, step=10 * step)
tracker.step()
tracker.step()  # two points without a row of the user's in between
tracker.step()
tracking = tracker.close()
run.finish()
wandb.teardown()  # the process that writes has ended: finish() does not wait for the file
with open(glob.glob("wandb/offline-run-*/*.wandb")[0], "rb") as file:
    rows = [read(one.history.item) for one in records(file.read()) if one.HasField("history")]
points = [[point.step, point.norm] for point in tracking.points]
print(json.dumps({"rows": rows, "points": points, "notes": tracking.notes}))
"""


def test_an_active_run_of_wandb_is_found_and_has_an_axis_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tests = Path(__file__).parents[1]
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {
        **known, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")]),
        "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-c", WANDB]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr  # W&B's word for what it drops
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    def values(name: str) -> list[Any]:
        return [row[name] for row in found["rows"] if name in row]

    ours = [[step, norm] for step, norm in zip(values("hessinit/step"), values("hessinit/norm"), strict=True)]
    assert ours == found["points"]
    assert values("hessinit/step") == [0, 2, 4, 6, 8]
    assert values("train/loss") == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert values("train/late") == [0, 1, 2, 3, 4]
    assert not any("Logging" in note for note in found["notes"])


def test_a_sink_that_fails_is_left_alone_and_training_goes_on() -> None:
    calls = []

    def full(values: dict[str, float], step: int) -> None:
        calls.append(step)
        if step:
            raise OSError("no space left on device")

    tracker = tracked(tiny.network(), tiny.batch(), log_to=full)
    for _ in range(3):
        tracker.step()
    tracking = tracker.close()
    assert calls == [0, 1]
    assert len(tracking.points) == 4
    assert tracking.notes == ("Logging stopped at step 1: OSError: no space left on device",)
