"""Initial weights on trial: made flatter until they survive, or raced against each other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hessinit.errors import ProblemError
from hessinit.init.fit import fit_weights_
from hessinit.init.options import NOT_SCALED, FitRequest
from hessinit.init.scales import ProblemFactory, ScaledModel
from hessinit.init.weights import Target
from hessinit.present.advice import WAYS_TO_LEARN
from hessinit.problem.batches import Batch, read_batches
from hessinit.problem.checks import all_finite
from hessinit.problem.preserve import (
    ModelState,
    UserState,
    untouched_random_state,
    untouched_sources,
)
from hessinit.progress import OnProgress, StepCounter
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import LEARNED, Initialization, Trial
from hessinit.training import loop
from hessinit.training.advise import search_rate
from hessinit.training.loop import read_data, seed_everything
from hessinit.training.optimizer_rules import build_optimizer_rule
from hessinit.training.optimizers import Training
from hessinit.training.trial import (
    LENGTHS,
    ShortTraining,
    TrainingSetup,
    prepare_trials,
    try_weights,
)


@dataclass(frozen=True)
class SurvivalRules:
    """How fitted weights are tried; chosen with benchmarks/arena/trial_and_race.py."""

    steps: int = 24
    # The trial is at so many times the rate: weights that only just survive on one batch do not on
    # fresh ones.
    margin: float = 1.25
    # κ is divided by these in turn until the weights survive.
    flatter: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    # The old weights are tried at the rate divided by powers of 4, so many of them.
    quarters: int = 12


SURVIVAL = SurvivalRules()


@dataclass(frozen=True)
class FittedWeights:
    """Fits weights in place and tries them; the old weights are a `restore()` away."""

    factory: ProblemFactory
    targets: list[Target]
    restore: Callable[[], None]
    training: Training

    def fit_(self, request: FitRequest) -> Initialization:
        """Write weights that fit, from the old ones on."""
        self.restore()
        return fit_weights_(self.factory, self.targets, request, self.restore)

    @functools.cached_property
    def setup(self) -> TrainingSetup:
        """What trials and races share."""
        setup = TrainingSetup.of(self.factory.problem, self.training)
        return replace(setup, loss_range=self.factory.loss_range)

    def trial(
        self, lr: float, margin: float = SURVIVAL.margin, steps: int = SURVIVAL.steps
    ) -> Trial:
        """Train from the present weights on the batch, a little above the rate; put all back."""
        return try_weights(self.setup, self.factory.problem.batch, margin * lr, steps)

    def report(self, every_layer: bool = False) -> CurvatureReport:
        """Measure the present weights."""
        return ScaledModel(self.factory, [], 0.1).report(every_layer)

    def describe(self, result: Initialization, scheme: str, request: FitRequest) -> Initialization:
        """Return a result for present weights that were not fitted: drawn ones, or the old ones."""
        is_drawn = scheme != "keep" and request.reports
        return replace(
            result,
            after=self.report() if is_drawn else result.before,
            scales=dict.fromkeys(result.scales, 1.0),
            scheme=scheme,
            scaling=NOT_SCALED,
            symmetries=(),
            plan=None,
            measurements=(),
            kappa=None,
            target=None,
        )

    def nothing_learned_(
        self, result: Initialization, request: FitRequest, trials: Sequence[Trial]
    ) -> Initialization:
        """Put back the old weights, as no trial got below the loss of a constant output."""
        self.restore()
        steps = max(trial.steps for trial in trials)
        return replace(
            self.describe(result, "keep", request),
            converged=False,
            trials=tuple(trials),
            survival=None,
            lr=None if request.lr == "auto" else result.lr,
            reason=f"Nothing learned in trials of up to {steps} steps, and nothing was written. "
            f"What may help: {WAYS_TO_LEARN}",
        )

    def old_weights_(
        self, result: Initialization, request: FitRequest, fault: str
    ) -> Initialization:
        """Put back the old weights, with the largest rate at which they survive.

        Where they survive at none, the flattest weights are written.
        """
        lr = _rate_of(result)
        self.restore()
        rate, trial = self._largest_rate(lr)
        outcome = "so the old weights were put back; they"
        described = self.describe(result, "keep", request)
        if trial is None and result.kappa is not None:
            flattest = self.fit_(replace(request, lr=lr, flatter=SURVIVAL.flatter[-1]))
            rate, trial = self._largest_rate(lr)
            if trial is None:
                self.restore()
            else:
                outcome = "and the old weights survive at no rate; these"
                described = flattest
        survived = "at none that was tried" if trial is None else f"at lr = {rate:.3g}"
        return replace(
            described,
            converged=False,
            survival=trial,
            reason=f"{fault}, {outcome} survive {survived}",
            lr=rate,
        )

    def _largest_rate(self, lr: float) -> tuple[float, Trial | None]:
        """Return the largest of lr, lr/4, lr/16 … that the present weights survive, and its trial.

        Where they survive none of them, these are `lr` and None.
        """
        for power in range(SURVIVAL.quarters):
            rate = lr / 4**power
            trial = self.trial(rate)
            if trial.survived:
                return rate, trial
        return lr, None


def survive_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> tuple[Initialization, FitRequest]:
    """Make the weights flatter until they survive a trial; else put back the old ones.

    Returns the request that the weights were fitted to, too.
    """
    lr = _rate_of(result)
    fitted, used, trial = _flatter_until_survival_(weights, result, replace(request, lr=lr))
    if not trial.survived:
        fault = f"at lr = {lr:g} the loss blew up in every trial"
        return weights.old_weights_(result, used, fault), replace(used, flatter=1.0)
    change = _describe_change(fitted, used, request)
    reason = fitted.reason
    if change:
        reason = f"{reason}; with {change}, since without the loss blew up in a trial"
    fitted = replace(fitted, survival=trial, reason=reason)
    if request.lr == "auto" and trial.outcome != LEARNED:
        fitted = _search_rate_(weights, fitted, request)
    return fitted, used if change else request


def _flatter_until_survival_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> tuple[Initialization, FitRequest, Trial]:
    """Return the first weights that survive, how they were fitted, and their last trial."""
    lr = _rate_of(result)
    trial = weights.trial(lr)
    barely: FitRequest | None = None  # survives at the rate itself, without the margin
    for flatter in _flatter_requests(result, request):
        if trial.survived:
            break
        if barely is None and weights.trial(lr, margin=1.0).survived:
            barely = request
        request = flatter
        result = weights.fit_(request)
        trial = weights.trial(lr)
    if not trial.survived and barely is not None:
        request = barely
        result = weights.fit_(request)
        trial = weights.trial(lr, margin=1.0)
    return result, request, trial


def _flatter_requests(result: Initialization, request: FitRequest) -> list[FitRequest]:
    """Return what to try in turn where the weights do not survive."""
    flatter: list[FitRequest] = []
    if result.kappa is not None:
        flatter = [replace(request, flatter=divisor) for divisor in SURVIVAL.flatter]
    if result.scaling == "small-output":
        flatter.insert(0, request.with_options(scaling="last"))
    if has_branches(result) and request.fit.residual == "auto":
        small = [option.with_options(residual="small") for option in (request, *flatter)]
        flatter = [*flatter[:1], *small]
    return flatter


def _describe_change(result: Initialization, used: FitRequest, request: FitRequest) -> str:
    """Say how the weights were made flatter than requested; empty where they were not."""
    changes = []
    if used.fit.residual != request.fit.residual:
        changes.append("small residual branches")
    if used.fit.scaling != request.fit.scaling:
        changes.append("the last weight scaled")
    if used.flatter > 1 and result.kappa:
        changes.append(f"κ = {result.kappa:.3g}")
    return " and ".join(changes)


def _search_rate_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> Initialization:
    """Search a rate, as `advise` does, for weights that learn nothing at theirs in a long trial."""
    lr = _rate_of(result)
    longer = weights.trial(lr, margin=1.0, steps=LENGTHS.times_longer * SURVIVAL.steps)
    if longer.outcome == LEARNED:
        return replace(result, survival=longer)
    return search_rate_(weights, result, request)


def search_rate_(
    weights: FittedWeights, result: Initialization, request: FitRequest
) -> Initialization:
    """Search a rate for the present weights, as `advise` does; put the old ones back if none is."""
    rule = build_optimizer_rule(weights.training, weights.factory.model, layers="**")
    if rule.tunes_itself:
        return replace(result, lr=1.0)
    lr = result.lr or math.nan
    with prepare_trials(weights.setup, weights.factory.problem.batches) as setting:
        rates = search_rate(setting, rule, lr, LENGTHS.steps)
    if math.isnan(rates.rate):
        return weights.nothing_learned_(result, request, rates.trials)
    learned = [trial for trial in rates.trials if trial.outcome == LEARNED]
    return replace(
        result,
        lr=rates.rate,
        kappa=result.kappa and result.kappa * rates.rate / lr,
        survival=min(learned, key=lambda trial: abs(math.log(trial.lr / rates.rate))),
    )


def has_branches(result: Initialization) -> bool:
    """Whether some weight closes a residual branch."""
    return any(row.closes_residual for row in result.plan or ())


def _rate_of(result: Initialization) -> float:
    assert result.lr is not None
    return result.lr


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
        count = len(runners)
        for start, end in itertools.pairwise((0, *self._ends)):
            self.counter.expect(count * (end - start))
            count = _better_half(count)
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

        size = self.setup.accumulate
        batches = itertools.islice(itertools.cycle(self.data.batches), size * first, size * end)
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
