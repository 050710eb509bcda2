"""One short training from one start, at one learning rate, with one seed: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.report.json_form import Plain, read_number, read_numbers, to_plain

NETWORK = "network"  # the name under which `norms` holds the norm of all weights together
MOST_POINTS = 50  # points of a loss curve
DIGITS = 5  # significant digits of a loss curve; first and final loss keep every bit


def window(steps: int) -> int:
    """How many losses the final one is the mean of: a tenth of the steps, at least ten.

    >>> window(50), window(201)
    (10, 21)
    """
    return max(10, math.ceil(steps / 10))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """How one training went.

    `losses` are training losses averaged over chunks of steps (at most 50 points of equal length, the last
    one may be shorter), `first_loss` that of the very first mini-batch, `final_loss` the mean over the last
    tenth of the steps, at least ten; inf or nan where the run broke off. `norms` are the curvature norms at
    the start: layer → ‖H‖ in the order the layers run, then "network"; None where they were not measured
    (starts that do not depend on the rate are measured once for each seed; `Comparison.norm` looks it up).
    `note` says why a start failed or what it could not reach.

    >>> run = Run(scheme="he", learning_rate=0.1, seed=0, losses=(2.0, 1.0), first_loss=2.3, final_loss=0.9,
    ...           steps_done=20, diverged=False, norms={"fc1": 3.0, "network": 4.0}, seconds=0.5)
    >>> run.applies, run.finite, run_from_dict(run.to_dict()) == run
    (True, True, True)
    """

    scheme: str
    learning_rate: float
    seed: int
    losses: tuple[float, ...]
    first_loss: float
    final_loss: float
    steps_done: int
    diverged: bool  # not finite, or final_loss above first_loss by more than 5 % and more than chance allows
    norms: dict[str, float] | None
    seconds: float
    note: str = ""

    @property
    def applies(self) -> bool:
        """False where the start itself failed on this model, so that nothing was trained; `note` says why."""
        return self.diverged or self.steps_done > 0

    @property
    def finite(self) -> bool:
        """Whether the run came to its end with a loss that is a number."""
        return math.isfinite(self.final_loss)

    # In plain form, where nan equals nan. The time that it took is no part of the answer.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return bool({**self.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0})

    def __hash__(self) -> int:
        return hash((self.scheme, self.learning_rate, self.seed))

    def to_dict(self) -> dict[str, Plain]:
        """The run as what strict JSON can hold."""
        return dict(to_plain(self))


def run_from_dict(data: Plain) -> Run:
    """Rebuild a run from what `to_dict` gave; unknown keys are ignored."""
    norms = data["norms"]
    return Run(
        scheme=str(data["scheme"]),
        learning_rate=read_number(data["learning_rate"]),
        seed=int(data["seed"]),
        losses=read_numbers(data["losses"]),
        first_loss=read_number(data["first_loss"]),
        final_loss=read_number(data["final_loss"]),
        steps_done=int(data["steps_done"]),
        diverged=bool(data["diverged"]),
        norms=None if norms is None else {str(name): read_number(norm) for name, norm in norms.items()},
        seconds=read_number(data["seconds"]),
        note=str(data["note"]),
    )


def round_loss(loss: float) -> float:
    """A loss as curves keep it, so that records stay small.

    >>> round_loss(2.3025851), round_loss(float("inf"))
    (2.3026, inf)
    """
    return float(f"{loss:.{DIGITS}g}")
