"""Short trainings of schemes × learning rates × seeds as plain data, and which one is best."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hessinit.errors import choose
from hessinit.results.initialization import DID_NOT_LEARN
from hessinit.results.result import LATER, PlainData, Result

NETWORK = "network"  # the name under which `norms` holds the norm of all weights together
MOST_POINTS = 50  # points of a loss curve
# Significant digits of a loss curve, so that records stay small; first and final loss keep all.
DIGITS = 5


def window(steps: int) -> int:
    """Return how many losses the final one is the mean of."""
    return max(10, math.ceil(steps / 10))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run(PlainData):
    """One short training from one scheme, at one learning rate, with one seed.

    `losses` are training losses averaged over at most 50 chunks of steps, `first_loss` that of the
    first mini-batch, `final_loss` the mean over the last tenth of the steps, at least ten; inf or
    nan where the run broke off. `norms` are ‖H‖ at the initialization by layer, then of the
    "network"; None where they were not measured. `note` says why a scheme failed or what it could
    not reach.
    """

    scheme: str
    learning_rate: float
    seed: int
    losses: tuple[float, ...]
    first_loss: float
    final_loss: float
    steps_done: int
    diverged: bool
    norms: dict[str, float] | None
    seconds: float = field(compare=False)
    note: str = ""
    outcome: str = field(default="", metadata=LATER)  # the verdict of `training/trial.py`

    @property
    def applies(self) -> bool:
        """False where the scheme failed on this model: nothing was trained, and `note` says why."""
        return self.diverged or self.steps_done > 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.final_loss)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Result):
    """What `compare` or `sweep` found: every run, and what follows from them.

    `kind` is "compare" or "sweep"; a sweep has one learning rate, and `stds` holds the standard
    deviation of each of `schemes`. `rate_dependent` names the schemes whose weights depend on the
    learning rate. Two comparisons are equal when they hold the same numbers; the time they took
    does not count.

    >>> def run(scheme, seed, loss):
    ...     return Run(
    ...         scheme=scheme, learning_rate=0.1, seed=seed, losses=(2.0,), first_loss=2.3,
    ...         final_loss=loss, steps_done=20, diverged=False, norms=None, seconds=1)
    >>> runs = (run("he", 0, 1.0), run("he", 1, 1.4), run("lsuv", 0, 0.5), run("lsuv", 1, 0.7))
    >>> comparison = Comparison(
    ...     kind="compare", schemes=("he", "lsuv"), learning_rates=(0.1,), seeds=(0, 1), runs=runs,
    ...     steps=20, batch_size=8, optimizer="sgd", examples=100)
    >>> comparison.loss("he", 0.1), round(comparison.error("he", 0.1), 3), comparison.best
    (1.2, 0.2, ('lsuv', 0.1))
    >>> Comparison.from_json(comparison.to_json()) == comparison
    True
    """

    KIND: ClassVar[str] = "hessinit comparison"
    SCHEMA: ClassVar[int] = 2

    kind: str = field(metadata={"key": "experiment"})
    schemes: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    steps: int
    batch_size: int
    optimizer: str
    examples: int
    warmup: int | None = None  # steps of the schemes with "+warmup", where there is one
    stds: tuple[float, ...] = ()
    rate_dependent: tuple[str, ...] = ()
    seconds: float | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    # The mean loss of mini-batches at the best output that ignores the inputs; None if unknown.
    constant_loss: float | None = field(default=None, metadata=LATER)
    settings: dict[str, Any] = field(default_factory=dict)  # what else was asked for: plain data
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose("kind", self.kind, ["compare", "sweep"])

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers whose norms were measured, in the order they run."""
        measured = next((run.norms for run in self.runs if run.norms), {})
        return tuple(name for name in measured if name != NETWORK)

    def runs_of(self, scheme: str, learning_rate: float) -> tuple[Run, ...]:
        """Return the runs of all seeds, in the order of the seeds."""
        choose("scheme", scheme, list(self.schemes))
        if learning_rate not in self.learning_rates:
            rates = ", ".join(map(repr, self.learning_rates))
            raise ValueError(f"learning_rate={learning_rate!r} was not tried; choose from {rates}.")
        return tuple(
            run for run in self.runs if (run.scheme, run.learning_rate) == (scheme, learning_rate)
        )

    def applies(self, scheme: str) -> bool:
        """Return False where the scheme failed on this model in every run."""
        return any(run.applies for run in self.runs if run.scheme == scheme)

    def loss(self, scheme: str, learning_rate: float) -> float:
        """Return the mean final loss over seeds.

        It is inf where a loss is not finite, nan where the scheme does not apply.
        """
        if not (losses := self._final_losses(scheme, learning_rate)):
            return math.nan
        return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf

    def error(self, scheme: str, learning_rate: float) -> float:
        """Return the standard error of `loss`; nan for one seed, or if a loss is not finite."""
        losses = self._final_losses(scheme, learning_rate)
        if len(losses) < 2 or not all(map(math.isfinite, losses)):
            return math.nan
        return statistics.stdev(losses) / math.sqrt(len(losses))

    def diverged(self, scheme: str, learning_rate: float) -> int:
        return sum(run.diverged for run in self.runs_of(scheme, learning_rate))

    def norm(self, scheme: str, learning_rate: float | None = None, layer: str = NETWORK) -> float:
        """Return the mean initial ‖H‖ of a layer, or of the network; nan where not measured.

        For a scheme that depends on the rate, no `learning_rate` means its best one.
        """
        if learning_rate is None:
            learning_rate = self.best_rate(scheme)
        runs = [run for run in self.runs if run.scheme == scheme]
        if scheme in self.rate_dependent:
            runs = [run for run in runs if run.learning_rate == learning_rate]
        norms = [run.norms[layer] for run in runs if run.norms is not None and layer in run.norms]
        return statistics.fmean(norms) if norms else math.nan

    def trains(self, scheme: str, learning_rate: float) -> bool:
        """Return whether every seed ended in a finite loss, and none diverged."""
        return math.isfinite(self.loss(scheme, learning_rate)) and not self.diverged(
            scheme, learning_rate
        )

    def learns(self, scheme: str, learning_rate: float) -> bool:
        """Return whether the scheme trains, and with every seed learns more than a constant."""
        stuck = any(run.outcome == DID_NOT_LEARN for run in self.runs_of(scheme, learning_rate))
        return self.trains(scheme, learning_rate) and not stuck

    def best_rate(self, scheme: str) -> float:
        """Return the rate of the lowest loss; nan where the scheme trains at none."""
        rates = [rate for rate in self.learning_rates if self.trains(scheme, rate)]
        return min(rates, key=lambda rate: self.loss(scheme, rate), default=math.nan)

    @property
    def learners(self) -> tuple[str, ...]:
        """The schemes that learn with every seed at their best rate, the lowest loss first."""
        rates = {scheme: self.best_rate(scheme) for scheme in self.schemes}
        losses = {
            scheme: self.loss(scheme, rate)
            for scheme, rate in rates.items()
            if not math.isnan(rate) and self.learns(scheme, rate)
        }
        return tuple(sorted(losses, key=losses.__getitem__))

    @property
    def best(self) -> tuple[str, float]:
        """The scheme and the rate of the lowest loss of all, where every seed trains and learns."""
        if not self.learners:
            raise ValueError(
                "no scheme learns with every seed at any rate; print(comparison) says more."
            )
        return self.learners[0], self.best_rate(self.learners[0])

    def _final_losses(self, scheme: str, learning_rate: float) -> list[float]:
        return [run.final_loss for run in self.runs_of(scheme, learning_rate) if run.applies]
