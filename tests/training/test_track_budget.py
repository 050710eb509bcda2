"""Measuring takes no more than its share of the time; time is told, not waited for."""

from __future__ import annotations

import pytest
from hessinit.tracking import budget
from hessinit.tracking.sharpness import Sharpness, Subject
from hypothesis import given
from hypothesis import strategies as st
from training_loops import FakeClock, tracked

import tiny
from hessinit.training.track import Budget

FOUND = Sharpness(2.3, 4.0, 0.01, True, 0.5, {}, 9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(budget, "now", made)
    monkeypatch.setattr("hessinit.tracking.pointing.now", made)
    return made


def measuring_takes(clock: FakeClock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "measure", clock.lasting(seconds, lambda subject: FOUND))


def test_points_come_when_they_are_due_as_long_as_they_are_cheap(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring_takes(clock, 0.1, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.1)
    for _ in range(50):
        clock.time += 1.0
        tracker.step()
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 10, 20, 30, 40, 50]
    assert tracking.seconds == pytest.approx(50.6)
    assert tracking.overhead == tracker.overhead == pytest.approx(0.6 / 50.6)
    assert [point.measuring_seconds for point in tracking.points] == pytest.approx([0.1] * 6)
    assert tracking.points[1].seconds == pytest.approx(10.2)


def test_what_does_not_fit_is_put_off_and_not_lost(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s a measurement and 1 s a step: at 25 % the next may start once 20 s are a quarter of the time."""
    measuring_takes(clock, 10.0, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.25)
    for _ in range(120):
        clock.time += 1.0
        tracker.step()
    # After n measurements and s steps: 10(n + 1) <= 0.25 (10 n + s), so s >= 30 n + 40; first for n = 1.
    assert [point.step for point in tracker.close().points] == [0, 70, 100]


def test_a_point_that_was_put_off_does_not_move_the_next(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring_takes(clock, 0.5, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.05)
    for _ in range(60):
        clock.time += 1.0
        tracker.step()
    assert [point.step for point in tracker.close().points] == [0, 20, 30, 40, 50, 60]


def test_an_explicit_measurement_is_made_at_once_and_counts(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring_takes(clock, 1.0, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=1, max_overhead=0.5, at_start=False)
    assert tracker.measure().step == 0
    clock.time += 0.5
    assert tracker.step() is None  # 1 + 1 > 0.5 · 1.5
    clock.time += 2.5
    assert tracker.step() is not None  # 1 + 1 <= 0.5 · 4


def test_logging_counts_as_measuring(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s a measurement and 0.9 s to log it: 1 s each, in the budget and in what is said of it."""
    measuring_takes(clock, 0.1, monkeypatch)
    log = clock.lasting(0.9, lambda values, step: None)
    tracker = tracked(tiny.network(), tiny.batch(), every=1, max_overhead=0.1, log_to=log)
    for _ in range(40):
        clock.time += 1.0
        tracker.step()
    assert tracker.overhead == pytest.approx(4 / 44)
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 19, 28, 37]  # n + 1 <= 0.1 (n + s): s >= 9 n + 10
    assert tracking.overhead == pytest.approx(4 / 44)
    assert [point.measuring_seconds for point in tracking.points] == pytest.approx([0.1] * 4)


def test_a_share_of_one_is_no_limit(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring_takes(clock, 5.0, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=1, max_overhead=1.0)
    assert all(tracker.step() is not None for _ in range(3))


def test_setting_the_count_of_steps_keeps_what_was_put_off(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring_takes(clock, 1.0, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.1)
    for step in range(1, 26):
        clock.time += 1.0
        tracker.steps = step - 1  # as a trainer does that has its own count
        tracker.step()
    assert [point.step for point in tracker.close().points] == [0, 19]  # 1 + 1 <= 0.1 · (1 + 19)


@given(
    max_overhead=st.floats(0.01, 0.99),
    events=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), max_size=60),
)
def test_at_the_start_of_each_measurement_the_spent_and_the_expected_fit(
    share: float, events: list[tuple[float, float]]
) -> None:
    clock = FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "now", clock)
        kept = Budget(share)
        spent, last, began = 0.0, 0.0, clock.time
        for training, measuring in events:
            clock.time += training
            if kept.affords():
                assert spent + last <= share * (clock.time - began) + 1e-9
                clock.time += measuring
                kept.count(measuring)
                spent += measuring
                if measuring <= last:  # as expected: then the promise holds afterwards, too
                    assert spent <= share * (clock.time - began) + 1e-9
                last = measuring
            else:
                assert spent + last > share * (clock.time - began) - 1e-9
