"""A made-up comparison and a made-up sweep, for demos, doctests and tests; nothing in them was measured."""

from __future__ import annotations

import math

from hessinit.results.comparison import Comparison, Run

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
GUESSING = math.log(10)
STEPS = 200
# ‖H‖ at the start, and how quickly the loss falls per unit of lr·‖H‖ below 2.
STARTS = {"default": (2.1, 0.3), "he": (31.0, 1.0), "lsuv": (14.0, 1.1), "hessinit": (math.nan, 1.2)}
STDS = {1.0: 900.0, 0.5: 120.0, 0.1: 5.2, 0.05: 1.3, 0.005: 0.012}


def example_comparison() -> Comparison:
    """Four starts at five rates with three seeds: he diverges at the largest rates, fixup does not apply."""
    runs = []
    for rate in RATES:
        for start, (norm, speed) in STARTS.items():
            depends = math.isnan(norm)
            sharpness = min(2 / rate, 60.0) if depends else norm
            for seed in range(3):
                measured = depends or rate == RATES[0]
                runs.append(_train(start, rate, seed, sharpness, speed, measured))
        reason = "fixup needs residual branches, and the model has none"
        runs += [_failed("fixup", rate, seed, reason) for seed in range(3)]
    return _compare("compare", (*STARTS, "fixup"), RATES, runs, rate_dependent=("hessinit",))


def example_sweep() -> Comparison:
    """Five standard deviations at one rate, as in the paper's experiment; the largest one is too sharp."""
    runs = [
        _train(f"std {std:g}", 0.01, seed, norm, 4.0, measured=True)
        for std, norm in STDS.items()
        for seed in range(3)
    ]
    return _compare("sweep", tuple(f"std {std:g}" for std in STDS), (0.01,), runs, stds=tuple(STDS))


def _compare(
    kind: str,
    starts: tuple[str, ...],
    rates: tuple[float, ...],
    runs: list[Run],
    *,
    stds: tuple[float, ...] = (),
    rate_dependent: tuple[str, ...] = (),
) -> Comparison:
    return Comparison(
        kind=kind,
        schemes=starts,
        learning_rates=rates,
        seeds=(0, 1, 2),
        runs=tuple(runs),
        steps=STEPS,
        batch_size=64,
        optimizer="sgd",
        examples=1797,
        stds=stds,
        rate_dependent=rate_dependent,
        seconds=41.0,
        versions={"hessinit": "example"},
    )


def _train(start: str, rate: float, seed: int, norm: float, speed: float, measured: bool) -> Run:
    first = GUESSING * (1 + 0.02 * seed + norm / 300)
    edge = rate * norm
    breaks_off = edge > 4 + seed
    fall = speed * (min(rate, 2 / norm) * 40 + 0.3 * min(edge, 2))
    points = 12 if breaks_off else 50
    losses = [
        first * 3**point if breaks_off else first * math.exp(-fall * (point + 1) / 50) + 0.004 * (seed + 1)
        for point in range(points)
    ]
    return Run(
        scheme=start,
        learning_rate=rate,
        seed=seed,
        losses=tuple(losses),
        first_loss=first,
        final_loss=math.inf if breaks_off else losses[-1],
        steps_done=points * STEPS // 50,
        diverged=breaks_off,
        norms={"fc1": 0.6 * norm, "fc2": 0.3 * norm, "fc3": 0.5 * norm, "network": norm}
        if measured
        else None,
        seconds=0.4,
    )


def _failed(start: str, rate: float, seed: int, reason: str) -> Run:
    return Run(
        scheme=start,
        learning_rate=rate,
        seed=seed,
        losses=(),
        first_loss=math.nan,
        final_loss=math.nan,
        steps_done=0,
        diverged=False,
        norms=None,
        seconds=0.0,
        note=reason,
    )
