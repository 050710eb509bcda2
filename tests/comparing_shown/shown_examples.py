"""Comparisons made by hand, small enough to work out what must be shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hessinit.results.comparison import Comparison, Run

Losses = Mapping[tuple[str, float], Sequence[float | None]]


def make_run(start: str, rate: float, seed: int, final: float | None, **changes: Any) -> Run:
    """A run that begins at 2 and ends at `final`; None: the start does not apply."""
    applies, finite = final is not None, final is not None and math.isfinite(final)
    given: dict[str, Any] = {
        "losses": (2.0, final) if finite else (2.0, 50.0) if applies else (),
        "first_loss": 2.0 if applies else math.nan,
        "final_loss": final if final is not None else math.nan,
        "steps_done": (20 if finite else 12) if applies else 0,
        "diverged": applies and (not finite or final > 2.1),
        "norms": {"fc1": 3.0, "fc2": 1.0, "network": 4.0} if applies else None,
        "note": "" if applies else "it needs residual branches",
        "seconds": 0.1,
    }
    return Run(scheme=start, learning_rate=rate, seed=seed, **{**given, **changes})


def make_comparison(losses: Losses, **changes: Any) -> Comparison:
    """One entry of `losses` for each start and rate: the final losses by seed."""
    seeds = len(next(iter(losses.values())))
    given: dict[str, Any] = {
        "kind": "compare",
        "schemes": tuple(dict.fromkeys(start for start, _ in losses)),
        "learning_rates": tuple(dict.fromkeys(rate for _, rate in losses)),
        "seeds": tuple(range(seeds)),
        "runs": tuple(
            make_run(start, rate, seed, final)
            for (start, rate), finals in losses.items()
            for seed, final in enumerate(finals)
        ),
        "steps": 20,
        "batch_size": 8,
        "optimizer": "sgd",
        "examples": 100,
        "seconds": 1.5,
        "versions": {"torch": "2.13.0"},
    }
    return Comparison(**{**given, **changes})


def make_two_starts() -> Comparison:
    """he is lowest at 0.1 and diverges at 1; lsuv is lower at its best rate and trains at both."""
    return make_comparison(
        {
            ("he", 0.1): (1.0, 1.2),
            ("he", 1.0): (0.9, math.inf),
            ("lsuv", 0.1): (1.4, 1.6),
            ("lsuv", 1.0): (0.5, 0.6),
        }
    )


def make_sweep(losses: Mapping[float, Sequence[float]], norms: Mapping[float, float]) -> Comparison:
    """At the rate 0.1."""
    named = {(f"std {std!r}", 0.1): finals for std, finals in losses.items()}
    bare = make_comparison(named, kind="sweep", stds=tuple(losses))
    by_start = {f"std {std!r}": norm for std, norm in norms.items()}
    runs = tuple(
        make_run(run.scheme, 0.1, run.seed, run.final_loss,
                 norms={"fc1": by_start[run.scheme] / 2, "network": by_start[run.scheme]})
        for run in bare.runs
    )  # fmt: skip
    return make_comparison(named, kind="sweep", stds=tuple(losses), runs=runs)
