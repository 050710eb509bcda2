"""A race of initial weights: short trainings on the user's own model, with everything put back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.checks import all_finite
from hessinit.problem.preserve import (
    ModelState,
    UserState,
    untouched_random_state,
    untouched_sources,
)
from hessinit.progress import OnProgress, StepCounter
from hessinit.results.initialization import LEARNED, Trial
from hessinit.training import loop
from hessinit.training.data import read_data, seed_everything
from hessinit.training.trial import LENGTHS, ShortTraining, TrainingSetup

# Batches are held out if there are at least this many; then one in this many is.
HELD_OUT_ONE_IN = 5


class Candidate(NamedTuple):
    """Initial weights to try; `write_` writes them in place, and finds the user's own weights.

    To pass a candidate without it, one with a `handicap` must have fallen by this part more below
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
    """Read the batches for `steps` steps, at most as many from a loader; the seed decides which.

    `data` is a DataLoader, a list of ready batches, or `(inputs, targets)` with all examples, which
    are cut into batches of the size of `batch`. Where there are at least five batches, but fewer
    than steps, a fifth of them is held out for the score.
    """
    _check_read_again(data)
    read = read_data(data, 1, steps)
    if not read.ready:
        read = replace(read, batch_size=min(read_batches(batch)[0][1].size, read.examples))
    held_out = tuple[Batch, ...]()
    if HELD_OUT_ONE_IN <= read.different < steps:
        read, scoring = read.hold_out(read.different // HELD_OUT_ONE_IN, seed)
        held_out = scoring.parts
    batches = tuple(itertools.islice(read.minibatches(seed), steps))
    return RaceData(batches, min(read.different, steps), held_out)


def _check_read_again(data: Any) -> None:
    """Raise ProblemError if the data can be read only once: training would find them used up."""
    source = data.dataset if isinstance(data, DataLoader) else data
    if not hasattr(source, "__iter__") or isinstance(source, (Sequence, Tensor)):
        return
    with untouched_random_state(), untouched_sources(source):
        is_used_up = iter(source) is iter(source)
    if is_used_up:
        name = "data" if source is data else "the dataset of data"
        raise ProblemError(
            f"{name}, a {type(source).__name__}, can be read only once: the race would use up "
            "batches that training needs. Pass a DataLoader over a dataset that can be read again, "
            "or a list of batches."
        )


@torch.inference_mode(False)
@torch.enable_grad()
def race_(
    setup: TrainingSetup,
    data: RaceData,
    candidates: Sequence[Candidate],
    steps: int,
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
    with setup.untouched() as state:
        runners = [_start(setup, state, candidate) for candidate in candidates]
        # Its clock starts here: to fit the candidates may take longer than their steps.
        race = _Race(setup, state, data, steps, StepCounter("steps", progress))
        finalists = race.longer(race.knock_out([run for run in runners if run.survived]))
        finalists = finalists or race.second_chance(runners)
        if finalists:
            state.choose(finalists[0].initial)
        ranking = [*finalists, *sorted(runners, key=_Runner.order)]
        return [runner.trial() for runner in dict.fromkeys(ranking)]


@dataclass(eq=False)
class _Runner(ShortTraining):
    """The training of a candidate."""

    handicap: float = 0.0

    def order(self) -> tuple[int, float]:
        """Sort by steps, the most first, then by the score."""
        return -len(self.losses), self.score if self.survived else math.inf


def _start(setup: TrainingSetup, state: ModelState, candidate: Candidate) -> _Runner:
    """Write the candidate's weights and remember them."""
    runner = _Runner(setup, state, candidate.lr, candidate.name, handicap=candidate.handicap)
    with state.with_stand_ins(setup.seed):
        seed_everything(setup.seed, "weights")
        try:
            candidate.write_()
        except ProblemError as failure:
            runner.leave(f"failed: {failure}", survived=False)
            return runner
        weights = [weight.detach().clone() for weight in setup.model.parameters()]
    return replace(runner, initial=weights)


@dataclass
class _Race:
    """Trains one candidate after another on the same model; those that wait keep their state."""

    setup: TrainingSetup
    state: ModelState
    data: RaceData
    steps: int
    counter: StepCounter
    _ends: list[int] = field(init=False)  # of the rounds

    def __post_init__(self) -> None:
        self._ends = sorted({math.ceil(self.steps * part / 3) for part in (1, 2, 3)})

    def knock_out(self, runners: list[_Runner]) -> list[_Runner]:
        """Train the better half on, round by round; returns the finalists, the best one first."""
        self._plan(len(runners))
        for end in self._ends:
            for runner in runners:
                self._train(runner, end)
            is_final = end == self.steps
            stay = len(runners) if is_final else _better_half(len(runners))
            alive = [runner for runner in runners if runner.survived]
            lowest = min((runner.score for runner in alive), default=math.nan)
            ranks = {
                runner: (is_final and runner.outcome != LEARNED, self._rank(runner, lowest))
                for runner in alive
            }
            alive.sort(key=ranks.__getitem__)
            for runner in alive[stay:]:
                runner.leave(f"dropped after {end} steps")
            runners = alive[:stay]
        return runners

    def longer(self, finalists: list[_Runner]) -> list[_Runner]:
        """Train the best finalist on if it has not learned; returns those that survive."""
        if finalists and finalists[0].outcome != LEARNED:
            self._train(finalists[0], LENGTHS.times_longer * self.steps)
        return [runner for runner in finalists if runner.survived]

    def second_chance(self, runners: Sequence[_Runner]) -> list[_Runner]:
        """Train those that were dropped from the start, in turn, until one survives to the end."""
        for runner in sorted((run for run in runners if run.survived), key=_Runner.order):
            runner.begin_again()
            for end in self._ends:
                if runner.survived:
                    self._train(runner, end)
            if runner.survived:
                return [runner]
        return []

    def _plan(self, count: int) -> None:
        for start, end in itertools.pairwise((0, *self._ends)):
            self.counter.expect(count * (end - start))
            count = _better_half(count)

    def _rank(self, runner: _Runner, lowest: float) -> float:
        """Return the score, with the handicap; all that have learned next to nothing are equal.

        With one batch, so are those that fell at least half as far as the one with the `lowest`
        score.
        """
        constant = self.setup.loss_range.constant
        if self.data.different == 1:
            return float(runner.outcome != LEARNED or runner.score > (constant + lowest) / 2)
        if runner.is_below_constant:
            return runner.score + runner.handicap * (constant - runner.score)
        is_unknown = math.isnan(self.setup.loss_range.gain(math.inf))
        return runner.score if is_unknown else constant

    def _train(self, runner: _Runner, end: int) -> None:
        """Go on to step `end`, counted from 1, and judge the training there."""
        first = len(runner.losses)

        def score(step: int, loss: float) -> float:
            scored = self._held_out_loss(step) if self.data.held_out else loss
            self.counter.step(runner.name)
            return scored

        batches = itertools.islice(itertools.cycle(self.data.batches), first, end)
        runner.train(batches, purpose=f"steps from {first}", score=score, goes_on=True)
        runner.count_earlier_learning()

    @torch.no_grad()
    def _held_out_loss(self, step: int) -> float:
        """Return the loss of a held-out batch, in the model's mode; what it writes is put back."""
        setup = self.setup
        if not all(map(all_finite, setup.model.parameters())):
            return math.nan
        batch = setup.copy(self.data.held_out[step % len(self.data.held_out)])
        with UserState(setup.model, setup.loss, setup.forward).with_stand_ins(seed=setup.seed):
            return loop.evaluate_loss(setup.model, setup.loss, batch, setup.forward).item()


def _better_half(count: int) -> int:
    return min(count, max(2, math.ceil(count / 2)))
