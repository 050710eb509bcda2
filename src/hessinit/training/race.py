"""A race of initial weights: short trainings on the user's own model, with everything put back."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hessinit.errors import ProblemError
from hessinit.measurement.loss_range import UNKNOWN, LossRange
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.preserve import (
    ModelState,
    UserState,
    untouched_model,
    untouched_random_state,
    untouched_sources,
)
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import all_finite
from hessinit.progress import OnProgress, StepCounter
from hessinit.results.initialization import DID_NOT_LEARN, DIVERGED, LEARNED, Trial
from hessinit.training import loop
from hessinit.training.data import copy_to, device_of, generator, read_data, seed_everything
from hessinit.training.trial import LEAST_FALL, LONGER, half_of, judge, own_order

HOLD_OUT = 5  # batches are held out if there are at least this many, and then one in this many


class Candidate(NamedTuple):
    """Initial weights to try; `write_` writes them in place, and finds the user's own weights.

    To pass one without it, a candidate with a `handicap` must have fallen by this part more below
    the loss of the best constant output: a few steps do not tell small differences.
    """

    name: str
    lr: float
    write_: Callable[[], None]
    handicap: float = 0.0


class RaceData(NamedTuple):
    """The batches of a race, taken in turn, how many of them differ, and those that only score.

    One batch alone tells who survives, not who learns.
    """

    batches: tuple[Batch, ...]
    different: int
    held_out: tuple[Batch, ...] = ()


def read_race_data(data: Any, batch: Any, steps: int, seed: int = 0) -> RaceData:
    """The batches for `steps` steps, the same for the same seed; at most that many are read from a loader.

    `data` is a DataLoader, a list of ready batches, or `(inputs, targets)` with all examples, which
    are cut into batches of the size of `batch`. Where there are at least five batches, but fewer
    than steps, a fifth of them is held out for the score.
    """
    source = data.dataset if isinstance(data, DataLoader) else data
    if hasattr(source, "__iter__") and not isinstance(source, (Sequence, Tensor)):
        with untouched_random_state(), untouched_sources(source):
            once = iter(source) is iter(source)
        if once:  # training would find it used up
            what = "data" if source is data else "the dataset of data"
            raise ProblemError(
                f"{what}, a {type(source).__name__}, can be read only once: the race would use up batches "
                "that training needs. Pass a DataLoader over a dataset that can be read again, or a list of "
                "batches."
            )
    read = read_data(data, 1, steps)
    held_out = tuple[Batch, ...]()
    if not read.ready:
        read = replace(read, batch_size=min(read_batches(batch)[0][1].size, read.examples))
    if HOLD_OUT <= read.different < steps:
        read, scoring = read.hold_out(read.different // HOLD_OUT, seed)
        held_out = scoring.parts
    batches = tuple(itertools.islice(read.minibatches(seed), steps))
    return RaceData(batches, min(read.different, steps), held_out)


@torch.inference_mode(False)
@torch.enable_grad()
def race_(
    model: nn.Module,
    loss: Loss,
    data: RaceData,
    candidates: Sequence[Candidate],
    *,
    optimizer: str | loop.MakeOptimizer,
    steps: int,
    momentum: float = 0.9,
    loss_range: LossRange = UNKNOWN,
    forward: Forward | None = None,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> list[Trial]:
    """Train every candidate briefly and leave the initial weights of the best one in the model.

    All see the same batches in the same order, and the same random numbers. After each third of the
    steps the better half goes on, at least two. A candidate is out where it diverged (`judge`).
    With one batch, where losses tell who fits it best and not who learns, all that learned are
    equal, in the order given, but for those that fell less than half as far as the best. If no
    finalist has learned, the best one goes on, four times as long. Where all finalists are out,
    those that were dropped are trained to the end in turn.

    The score is the mean loss of the last third. The winner is the first. If it did not survive,
    nobody has, and the old weights are back. All but the weights is left as found; whatever is
    raised, the weights are, too. Costs 7/12 of `steps` for a candidate, on average, and memory for
    its weights, buffers and optimizer. `progress` is called after each step.
    """
    with untouched_model(model, loss, forward) as found:
        trainer = _Trainer(
            model,
            loss,
            forward,
            data,
            optimizer,
            momentum,
            loss_range,
            seed,
            found,
            StepCounter("steps", progress),
        )
        runs = [trainer.start(candidate) for candidate in candidates]
        ends = sorted({math.ceil(steps * part / 3) for part in (1, 2, 3)})
        alive = [run for run in runs if run.survived]
        trainer.plan(len(alive), ends)
        for end in ends:
            for run in alive:
                trainer.train(run, end)
            stay = _better_half(len(alive)) if end < steps else len(alive)
            alive = [run for run in alive if run.survived]
            lowest = min((run.score for run in alive), default=math.nan)
            alive.sort(
                key=lambda run: (end == steps and run.outcome != LEARNED, trainer.rank(run, lowest))
            )
            for run in alive[stay:]:
                run.leave(f"dropped after {end} steps")
            alive = alive[:stay]
        if alive and alive[0].outcome != LEARNED:
            trainer.train(alive[0], LONGER * steps)
            alive = [run for run in alive if run.survived]
        waiting = sorted((run for run in runs if run.survived), key=_Run.order)
        while waiting and not alive:
            run = waiting.pop(0)
            run.reason = ""
            run.losses = []
            run.scored = []
            for end in ends:
                if run.survived:
                    trainer.train(run, end)
            alive = [run] if run.survived else []
        found.choose(alive[0].initial if alive else None)
        return [run.trial() for run in dict.fromkeys([*alive, *sorted(runs, key=_Run.order)])]


@torch.inference_mode(False)
@torch.enable_grad()
def survives(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float,
    optimizer: str | loop.MakeOptimizer,
    loss_range: LossRange = UNKNOWN,
    steps: int = 24,
    momentum: float = 0.9,
    forward: Forward | None = None,
    seed: int = 0,
) -> Trial:
    """Train from the present weights on the batch, or on several in turn, then put everything back.

    So it is done twice: on the batch, and on random halves of it, which differ as batches do. Costs
    twice `steps` training steps at most.
    """
    batches = [one for _, one in read_batches(batch)]
    source = generator(seed, "halves")
    whole = itertools.cycle([(one, own_order(one, seed)) for one in batches])
    halves = [half_of(one, order, source) for one, order in itertools.islice(whole, steps)]
    for chosen in (halves, batches):
        data = RaceData(tuple(chosen), len(chosen))
        # Half of the examples may be no batch, as of a graph. The whole one then decides alone.
        refusals = (RuntimeError, ValueError, IndexError, TypeError) if chosen is halves else ()
        with contextlib.suppress(*refusals), untouched_model(model, loss, forward) as found:
            trainer = _Trainer(
                model, loss, forward, data, optimizer, momentum, loss_range, seed, found
            )
            run = trainer.start(Candidate("present weights", lr, lambda: None))
            trainer.train(run, steps)
            trial = run.trial()
            if not trial.survived:
                break
    return trial


@dataclass(eq=False)
class _Run:
    candidate: Candidate
    initial: list[Tensor]
    reason: str = ""
    survived: bool = True
    outcome: str = ""
    losses: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)  # the loss that counts, after each step
    # Until it goes on:
    optimizer: Optimizer | None = None
    state: ModelState | None = None

    def leave(self, reason: str, survived: bool = True) -> None:
        self.reason = reason
        self.survived = survived
        self.optimizer = self.state = None

    @property
    def score(self) -> float:
        last_third = self.scored[-math.ceil(len(self.scored) / 3) :]
        return statistics.fmean(last_third) if self.survived else math.nan

    def order(self) -> tuple[int, float]:
        return -len(self.losses), self.score if self.survived else math.inf

    def trial(self) -> Trial:
        made = sum(map(math.isfinite, self.losses))  # no step is made with a loss that is not
        return Trial(
            name=self.candidate.name,
            lr=self.candidate.lr,
            steps=made,
            score=self.score,
            survived=self.survived,
            losses=tuple(self.losses),
            reason=self.reason,
            outcome=self.outcome,
        )


@dataclass
class _Trainer:
    """Trains one run after another on the same model, and keeps the state of those that wait."""

    model: nn.Module
    loss: Loss
    forward: Forward | None
    data: RaceData
    optimizer: str | loop.MakeOptimizer
    momentum: float
    loss_range: LossRange
    seed: int
    found: ModelState
    counter: StepCounter = field(default_factory=lambda: StepCounter("steps"))

    def plan(self, count: int, ends: Sequence[int]) -> None:
        for length in (end - start for start, end in itertools.pairwise((0, *ends))):
            self.counter.expect(count * length)
            count = _better_half(count)

    def rank(self, run: _Run, lowest: float) -> float:
        """The score, with the handicap; all that have learned next to nothing so far are equal.

        With one batch, so are those that fell at least half as far as the one with the `lowest`
        score.
        """
        if self.data.different == 1:
            return float(
                run.outcome != LEARNED or run.score > (self.loss_range.constant + lowest) / 2
            )
        if self._is_below_constant(run):
            return run.score + run.candidate.handicap * (self.loss_range.constant - run.score)
        return run.score if math.isnan(self.loss_range.gain(math.inf)) else self.loss_range.constant

    def _is_below_constant(self, run: _Run) -> bool:
        return run.score < self.loss_range.left_after(
            LEAST_FALL, math.inf
        )  # False where that is not known

    def start(self, candidate: Candidate) -> _Run:
        reason = ""
        with self.found.with_stand_ins(self.seed):
            seed_everything(self.seed, "weights")
            try:
                candidate.write_()
            except ProblemError as failure:
                reason = f"failed: {failure}"
            weights = [] if reason else [one.detach().clone() for one in self.model.parameters()]
        return _Run(candidate, weights, reason, survived=not reason)

    def train(self, run: _Run, end: int) -> None:
        """Go on to step `end`, counted from 1, and judge the run there."""
        first = len(run.losses)

        def after_step(number: int, value: float) -> None:
            run.scored.append(self._held_out_loss(number) if self.data.held_out else value)
            self.counter.step(run.candidate.name)

        with self.found.with_stand_ins(self.seed, run.initial):
            if run.state is not None:
                run.state.restore()
            rate = run.candidate.lr
            optimizer = run.optimizer or loop.make_optimizer(
                self.optimizer, self.model, rate, self.momentum
            )
            seed_everything(self.seed, f"steps from {first}")
            batches = map(
                self._copy, itertools.islice(itertools.cycle(self.data.batches), first, end)
            )
            losses, _ = loop.train(
                self.model, self.loss, batches, optimizer, forward=self.forward, on_step=after_step
            )
            run.losses += losses
            self.model.zero_grad(set_to_none=True)
            run.optimizer = optimizer
            run.state = ModelState(self.model, self.loss, self.forward)
        run.outcome = (
            judge(run.losses, self.loss_range) if all(map(math.isfinite, run.scored)) else DIVERGED
        )
        if run.outcome == DID_NOT_LEARN and self._is_below_constant(run):
            run.outcome = LEARNED  # as the weights had before the race
        if run.outcome == DIVERGED:
            where = (
                f"within {end} steps" if math.isfinite(losses[-1]) else f"at step {len(run.losses)}"
            )
            run.leave(f"diverged {where}", survived=False)

    def _copy(self, batch: Batch) -> tuple[Any, Any]:
        dtypes = {one.dtype for one in self.model.parameters() if one.is_floating_point()}
        return copy_to(batch, device_of(self.model), dtypes.pop() if len(dtypes) == 1 else None)

    @torch.no_grad()
    def _held_out_loss(self, number: int) -> float:
        """The loss of one held-out batch, in the model's mode; nothing that the forward writes stays."""
        if not all(map(all_finite, self.model.parameters())):
            return math.nan
        batch = self._copy(self.data.held_out[number % len(self.data.held_out)])
        with UserState(self.model, self.loss, self.forward).with_stand_ins(seed=self.seed):
            return loop.evaluate_loss(self.model, self.loss, batch, self.forward).item()


def _better_half(count: int) -> int:
    return min(count, max(2, math.ceil(count / 2)))
