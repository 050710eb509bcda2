"""One short training of a model, and the one verdict on it: learned, did not learn, or diverged.

Nothing here depends on a constant in the loss, or on its unit: losses are compared with what
training could gain (`LossRange`), and with the noise between mini-batches.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.measurement.loss_range import UNKNOWN, LossRange, find_loss_range
from hessinit.problem.batches import Batch, part_of, read_batches
from hessinit.problem.checks import all_finite, check_whole, unwrap
from hessinit.problem.preserve import (
    ModelState,
    UserState,
    remember_random_state,
    untouched_model,
    untouched_random_state,
)
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.ranks import (
    length_over_ranks,
    lockstep_ranks,
    mean_over_ranks,
    on_any_rank,
    tolerating,
)
from hessinit.problem.shards import local_part
from hessinit.progress import StepCounter
from hessinit.results.initialization import DID_NOT_LEARN, DIVERGED, LEARNED, Trial
from hessinit.training import loop, optimizers
from hessinit.training.loop import (
    FEWEST_TO_HALVE,
    copy_to,
    device_of,
    dtype_of,
    generator,
    half_of,
    order_by_content,
    seed_everything,
)
from hessinit.training.trial_data import TrialData, read_trial_data

Build = Callable[[float], optimizers.Stepper]

# What a forward or a loss raises on a batch that it was not made for.
BATCH_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError)


@dataclass(frozen=True)
class VerdictRules:
    """What counts as learning and as divergence; chosen with `benchmarks/answers.py verdicts`.

    `fall`, `rise` and `far` are parts of what training could gain.
    """

    fall: float = 0.02  # a fall by this part is learning
    rise: float = 0.05  # a rise by this part is divergence, if it is above the noise
    deviations: float = 3.0  # so many standard deviations of the noise between batches
    far: float = 2.0  # a rise by so much is divergence whatever the noise
    large_fall: float = 0.2  # a fall by this part says more than doubts about the weights


@dataclass(frozen=True)
class TrialLengths:
    """The steps of a trial; chosen with `benchmarks/advice.py` on its development problems."""

    steps: int = 32
    # Where the best trial has not learned yet, one of so many times the steps decides.
    times_longer: int = 4
    # On fresh mini-batches: so many for a training of `horizon` steps, and for others in proportion
    # to this power of their steps. Longer trials favour lower rates, as longer trainings do; chosen
    # on the development tasks of `benchmarks/untuned.py`.
    fresh: int = 48
    horizon: int = 300
    power: float = 1 / 4
    usual_horizon: int = 1000  # where the steps of the training are not known

    def for_training(self, steps: int | None) -> int:
        """Return the steps of a trial on fresh mini-batches for a training of so many.

        >>> [TrialLengths().for_training(steps) for steps in (300, 1000, None, 10_000)]
        [48, 65, 65, 115]
        """
        training = self.usual_horizon if steps is None else steps
        wanted = round(self.fresh * (training / self.horizon) ** self.power)
        return max(1, min(wanted, training))


VERDICT = VerdictRules()
LENGTHS = TrialLengths()


def judge(losses: Sequence[float], loss_range: LossRange = UNKNOWN) -> str:
    """Return the verdict on a training, from the loss of each of its steps.

    The level that counts is the median of the last third. The training has learned if the level is
    below its first loss and below that of every constant output, by 2 % of what it could gain; it
    has diverged if the level is above the first loss by 5 %. Where the loss has no known range, the
    noise decides alone.

    >>> judge([2.0, 1.9, 1.5, 1.0, 0.9, 0.8], LossRange(constant=2.3, free=0.0))
    'learned'
    >>> judge([1002.4, 1002.3, 1002.3, 1002.3], LossRange(constant=1002.3, free=1000.0))
    'did not learn'
    >>> judge([-5.0, -4.0, 3.0, 9.0], LossRange(constant=-4.0, free=-7.0))
    'diverged'
    """
    if not math.isfinite(losses[-1]):
        return DIVERGED
    last = math.ceil(len(losses) / 3)
    level = statistics.median(losses[-last:])
    if _level_rises(losses, last, level, loss_range):
        return DIVERGED
    enough = loss_range.left_after(VERDICT.fall, losses[0])
    if math.isnan(enough):
        enough = losses[0] - VERDICT.deviations * noise_of(losses[: last + 1])
    return LEARNED if level < enough else DID_NOT_LEARN


def _level_rises(losses: Sequence[float], last: int, level: float, loss_range: LossRange) -> bool:
    """Whether the `level` of the last losses is above the first ones by more than the noise."""
    first = losses[0]
    height = loss_range.height(first)
    noise = noise_of(losses[: last + 1])
    if math.isnan(height):
        # A chaotic training hides its height in its noise, but it begins far below all that
        # follows.
        is_far = min(losses[1:], default=first) > first + VERDICT.far * abs(first)
        margin = 0.0
    else:
        is_far = level > first + VERDICT.far * height
        margin = VERDICT.rise * height
        noise = max(noise, noise_of(losses[-last:]))
    if is_far:
        return True
    # Above the first loss, for a training that jumps at once; and above the mean of the first few,
    # which is known better, for one that climbs slowly. The first mini-batch may be an easy one.
    for count in {1, max(1, min(last, len(losses) - last))}:
        reference = statistics.fmean(losses[:count])
        by_chance = VERDICT.deviations * noise * math.sqrt(1 / count + 1 / last)
        if level > reference + margin + by_chance:
            return True
    return False


def is_far_above(losses: Sequence[float], loss_range: LossRange) -> bool:
    """Whether the last loss is so far above the first that no further step helps."""
    limit = losses[0] + VERDICT.far * loss_range.height(losses[0])
    return not math.isfinite(losses[-1]) or losses[-1] > limit


def ever_rises(losses: Sequence[float], loss_range: LossRange) -> bool:
    """Whether any loss is above the first by more than the noise, wherever the training ends."""
    margin = VERDICT.rise * loss_range.height(losses[0])
    by_chance = VERDICT.deviations * noise_of(losses)
    return highest(losses) > losses[0] + margin + by_chance


def highest(losses: Sequence[float]) -> float:
    """Return the highest loss; inf if one is not finite."""
    return max(loss if math.isfinite(loss) else math.inf for loss in losses)


def lead_of(new: Trial, own: Trial, loss_range: LossRange) -> float:
    """Return how far a trial ends below another, as a part of the larger fall of the two.

    The fall begins at the loss of the best constant output, or at the first loss of `own`. Where
    one of the two alone has learned, the lead is infinite; where none has, 0.
    """
    has_learned = (new.outcome == LEARNED, own.outcome == LEARNED)
    if not all(has_learned):
        difference = has_learned[0] - has_learned[1]
        return difference * math.inf if difference else 0.0
    top = loss_range.left_after(0.0, own.losses[0])
    fall = (own.losses[0] if math.isnan(top) else top) - min(new.score, own.score)
    # Scores on held-out batches may be above it, where the others were learned by heart.
    return (own.score - new.score) / fall if fall > 0 else 0.0


def learns_much(trial: Trial, loss_range: LossRange) -> bool:
    """Whether the trial learned a large part of what could be gained, if that is known."""
    enough = loss_range.left_after(VERDICT.large_fall, trial.losses[0])
    return trial.outcome == LEARNED and not trial.score > enough


def noise_of(losses: Sequence[float]) -> float:
    """Return the standard deviation of one loss, by the median step: jumps do not count."""
    differences = [abs(after - before) for before, after in itertools.pairwise(losses)]
    return statistics.median(differences or [0.0]) / (0.6745 * math.sqrt(2))


@dataclass(frozen=True)
class TrainingSetup:
    """What the short trainings of a model share: `build(lr)` builds their optimizer."""

    model: nn.Module
    loss: Loss
    build: Build
    forward: Forward | None = None
    seed: int = 0
    loss_range: LossRange = UNKNOWN
    accumulate: int = 1  # so many batches make a step

    @classmethod
    def of(cls, problem: Problem, training: optimizers.Training) -> TrainingSetup:
        """Return the setup of a problem; the range of its loss is not known yet."""
        model = unwrap(problem.model)
        return cls(
            model,
            problem.loss,
            lambda lr: training.build(model, lr),
            problem.forward,
            problem.seed,
            accumulate=training.accumulate,
        )

    def untouched(self) -> contextlib.AbstractContextManager[ModelState]:
        """Put back everything that trainings change, on exit."""
        return untouched_model(self.model, self.loss, self.forward)

    def copy(self, batch: Batch) -> tuple[Any, Any]:
        """Copy the batch to the device and the dtype of the model."""
        return copy_to(batch, device_of(self.model), dtype_of(self.model))

    def output_of(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the output of the model, and the copy of the batch that it was given."""
        inputs, targets = self.copy(batch)
        output = self.model(inputs) if self.forward is None else self.forward(self.model, inputs)
        return output, Batch(inputs, targets, batch.size)

    def make_steps(
        self,
        batches: Iterable[Batch],
        optimizer: optimizers.Stepper,
        warmup: int = 0,
        on_step: Callable[[int, float], object] | None = None,
    ) -> None:
        """Train on one batch after another."""
        loop.train(
            self.model,
            self.loss,
            map(self.copy, batches),
            optimizer,
            warmup=warmup,
            forward=self.forward,
            on_step=on_step,
        )
        self.model.zero_grad(set_to_none=True)


@dataclass(eq=False)
class ShortTraining:
    """A training of some steps, made at once or in parts, and the verdict on it so far.

    It starts at `initial`, or at the model's own weights, and changes nothing outside of
    `TrainingSetup.untouched`, whose `state` it needs.
    """

    setup: TrainingSetup
    state: ModelState
    lr: float
    name: str = "trial"
    initial: Sequence[Tensor] | None = None
    losses: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)  # the loss that counts, after each step
    outcome: str = ""
    reason: str = ""
    survived: bool = True
    # Until it goes on:
    _optimizer: optimizers.Stepper | None = None
    _saved: ModelState | None = None
    _rewind: Callable[[], object] = lambda: None  # the global generators

    def train(
        self,
        batches: Iterable[Batch],
        *,
        purpose: str,
        warmup: int = 0,
        first_loss: float = math.nan,
        score: Callable[[int, float], float] | None = None,
        on_step: Callable[[], object] = lambda: None,
        goes_on: bool = False,
    ) -> None:
        """Train on; then judge. `score(step, loss)` returns the loss that counts.

        `purpose` names the stream of random numbers, which goes on where the training does.
        `first_loss`, if known, takes the place of the first mini-batch's loss. The state is kept
        where the training `goes_on`.
        """

        def add(step: int, loss: float) -> None:
            is_replaced = not self.losses and not math.isnan(first_loss)
            self.losses.append(first_loss if is_replaced else loss)
            if score is None:
                self.scored.append(self.losses[-1])
            else:
                with optimizer.evaluating():
                    self.scored.append(score(step, loss))
            on_step()

        with self.state.with_stand_ins(self.setup.seed, self.initial):
            optimizer = self._optimizer or self.setup.build(self.lr)
            seed_everything(self.setup.seed, purpose)
            if self._saved is not None:
                self._saved.restore()
                self._rewind()
            self.setup.make_steps(batches, optimizer, warmup, add)
            if goes_on:
                self._optimizer = optimizer
                self._saved = ModelState(self.setup.model, self.setup.loss, self.setup.forward)
                self._rewind = remember_random_state()
        self.outcome = DIVERGED
        if all(map(math.isfinite, self.scored)):
            self.outcome = judge(self.losses, self.setup.loss_range)
        if self.outcome == DIVERGED:
            self.diverge()

    def diverge(self) -> None:
        """Take the training for diverged, and end it."""
        self.outcome = DIVERGED
        self.reason = f"diverged by step {len(self.losses)}"
        self.survived = False
        self._optimizer = None
        self._saved = None

    def count_earlier_learning(self) -> None:
        """Take a training that ends below every constant output for learned: its weights had."""
        if self.outcome == DID_NOT_LEARN and self.is_below_constant:
            self.outcome = LEARNED

    @property
    def is_below_constant(self) -> bool:
        """Whether the score is below the loss of every constant output; False if unknown."""
        return self.score < self.setup.loss_range.left_after(VERDICT.fall, math.inf)

    @property
    def score(self) -> float:
        """The mean of the last third; nan where the training diverged."""
        last_third = self.scored[-math.ceil(len(self.scored) / 3) :]
        return statistics.fmean(last_third) if self.survived else math.nan

    def trial(self) -> Trial:
        """Return the training as plain data."""
        return Trial(
            name=self.name,
            lr=self.lr,
            # No step is made with a loss that is not finite.
            steps=sum(map(math.isfinite, self.losses)),
            score=self.score,
            survived=self.survived,
            losses=tuple(self.losses),
            reason=self.reason,
            outcome=self.outcome,
        )


@dataclass(frozen=True)
class TrialSetting:
    """Trials of a model at several rates, from its present weights and on the same batches."""

    setup: TrainingSetup
    state: ModelState
    batches: Sequence[Batch]
    # Of the examples, where a step takes half of the batch, drawn anew: so it has the noise of a
    # mini-batch.
    order: Tensor | None = None
    first_loss: float = math.nan  # of the first batch before any step, nan if not known
    held_out: Sequence[Batch] = ()  # where there are some, their loss is the score
    is_fresh: bool = False  # whether the batches are other examples at every step
    on_batch: TrialSetting | None = None  # of fresh ones: the same on the batch
    counter: StepCounter = field(default_factory=lambda: StepCounter("steps"))

    def train(
        self, lr: float, *, steps: int = LENGTHS.steps, warmup: int = 0, patient: bool = False
    ) -> Trial:
        """Train for some steps, fewer where the loss gets far above its first, unless `patient`."""
        training = self.begin(lr)
        self.go_on(training, steps, warmup=warmup, patient=patient)
        return training.trial()

    def begin(
        self, lr: float, name: str = "trial", initial: Sequence[Tensor] | None = None
    ) -> ShortTraining:
        """Return a training of no steps yet, from the present weights or from `initial` ones."""
        return ShortTraining(self.setup, self.state, lr, name, initial)

    def go_on(
        self,
        training: ShortTraining,
        steps: int,
        *,
        warmup: int = 0,
        patient: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Continue to so many steps in all; the state is kept where the training `goes_on` later.

        The first loss from the present weights is that of the whole batch.
        """

        def is_lost() -> bool:
            losses = training.losses
            return bool(losses) and not patient and is_far_above(losses, self.setup.loss_range)

        done = len(training.losses)
        if not training.survived or done >= steps:
            return
        self.counter.expect(steps - done)
        batches = itertools.takewhile(lambda _: not is_lost(), self.pieces())
        training.train(
            itertools.islice(batches, done * self.setup.accumulate, steps * self.setup.accumulate),
            purpose="trial",
            warmup=warmup,
            first_loss=self.first_loss if training.initial is None else math.nan,
            on_step=lambda: self.counter.step(f"{training.name} at lr = {training.lr:.3g}"),
            score=self._score_held_out if self.held_out else None,
            goes_on=goes_on,
        )
        if is_lost():
            training.diverge()

    @torch.no_grad()
    def _score_held_out(self, step: int, loss: float) -> float:
        """Return the loss of a held-out batch, in the model's mode; what it writes is put back."""
        setup = self.setup
        if not all(map(all_finite, setup.model.parameters())):
            return math.nan
        batch = setup.copy(self.held_out[step % len(self.held_out)])
        state = UserState(setup.model, setup.loss, setup.forward)
        with untouched_random_state(), state.with_stand_ins(seed=setup.seed):
            return loop.evaluate_loss(setup.model, setup.loss, batch, setup.forward).item()

    def first_move(self, lr: float) -> float:
        """Return the length of the first step over that of all weights, per unit of rate."""
        return self._moves(lr, [self.batches[0]] * self.setup.accumulate)[0]

    def usual_move(self, lr: float, steps: int) -> float:
        """Return the median of the last third of so many steps, at a rate that moves little."""
        moves = self._moves(lr, itertools.islice(self.pieces(), steps * self.setup.accumulate))
        return statistics.median(moves[2 * steps // 3 :])

    def _moves(self, lr: float, batches: Iterable[Batch]) -> list[float]:
        """Return the length of each step over that of all weights, per unit of rate."""
        moves = []
        with self.state.with_stand_ins(self.setup.seed):
            optimizer = self.setup.build(lr)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            parts = [local_part(weight) for weight in weights]
            before = [part.clone() for part in parts]
            length = length_over_ranks(math.hypot(*(float(old.norm()) for old in before)))

            def add_move(step: int, loss: float) -> None:
                pairs = list(zip(parts, before, strict=True))
                move = math.hypot(*(float((part - old).norm()) for part, old in pairs))
                moves.append(length_over_ranks(move) / (length * lr) if length else math.inf)
                for part, old in pairs:
                    old.copy_(part)

            seed_everything(self.setup.seed, "trial")
            self.setup.make_steps(batches, optimizer, on_step=add_move)
        return moves

    def pieces(self) -> Iterator[Batch]:
        """Yield the batches of the steps: in turn, or random halves of them."""
        source = generator(self.setup.seed, "halves")
        for batch in itertools.cycle(self.batches):
            yield batch if self.order is None else half_of(batch, self.order, source)


def read_trials(
    problem: Problem,
    training: optimizers.Training,
    data: Any,
    steps: int | None,
    length: int | None,
) -> tuple[int, TrialData | None]:
    """Return the length of a trial for a training of `steps` steps, unless it is given, and data.

    >>> problem = Problem(nn.Linear(1, 1), nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
    >>> read_trials(problem, optimizers.Training("sgd"), None, steps=300, length=None)
    (48, None)
    """
    if steps is not None:
        steps = check_whole("steps", steps, at_least=1)
    if length is None:
        length = LENGTHS.for_training(steps)
    if data is None:
        return length, None
    batches = max(1, length) * training.accumulate
    return length, read_trial_data(data, problem.batch, batches, problem.seed)


@contextlib.contextmanager
def prepare_trials(
    setup: TrainingSetup,
    batches: Sequence[Batch],
    data: TrialData | None = None,
    counter: StepCounter | None = None,
) -> Iterator[TrialSetting]:
    """Prepare trials on the mini-batches of `data`, or on halves of the batch.

    Without data, several batches or an indivisible one are taken whole.
    """
    with torch.inference_mode(False), torch.enable_grad(), setup.untouched() as state:
        setting = TrialSetting(setup, state, batches, counter=counter or StepCounter("steps"))
        with tolerating(*BATCH_REFUSALS):
            setting = _with_first_loss(setting)
        ranks = lockstep_ranks()
        few = len(batches) > 1 or batches[0].size * (ranks.size if ranks else 1) < FEWEST_TO_HALVE
        if not on_any_rank(few):
            with tolerating(*BATCH_REFUSALS):
                halved = replace(setting, order=order_by_content(batches[0], setup.seed))
                if _accepts_half(halved):
                    setting = halved
        if data is not None and data.different > 1:
            fresh = replace(setting, batches=data.batches, order=None, held_out=data.held_out)
            setting = replace(fresh, is_fresh=True, on_batch=setting)
        yield setting


def _with_first_loss(setting: TrialSetting) -> TrialSetting:
    """Return the setting with the first loss and the range of the loss."""
    setup = setting.setup
    with setting.state.with_stand_ins(setup.seed):
        output, batch = setup.output_of(setting.batches[0])
        first_loss = mean_over_ranks(setup.loss(output, batch.targets)).item()
        loss_range = find_loss_range(
            lambda free, copied: setup.loss(free, copied.targets), output, [batch]
        )
    return replace(setting, setup=replace(setup, loss_range=loss_range), first_loss=first_loss)


def _accepts_half(setting: TrialSetting) -> bool:
    """Whether forward and loss accept half of the examples, and the loss is no sum over them.

    The gradient of a mean by the outputs of a half is twice as large when the others are left out.
    """
    loss = setting.setup.loss
    with setting.state.with_stand_ins(setting.setup.seed):
        output, batch = setting.setup.output_of(next(setting.pieces()))
        value = loss(output, batch.targets)
        free = output.detach().requires_grad_()
        half = part_of(Batch(free, batch.targets, batch.size), torch.arange(batch.size // 2))
        (together,) = torch.autograd.grad(loss(free, batch.targets), free)
        (alone,) = torch.autograd.grad(loss(half.inputs, half.targets), free)
    of_half = together[alone != 0]
    ratio = (alone * together).sum() / of_half.square().sum()
    is_sum = bool(of_half.any()) and float(ratio) < 1.5
    return not on_any_rank(is_sum or not value.isfinite())


@torch.inference_mode(False)
@torch.enable_grad()
def try_weights(
    setup: TrainingSetup, batch: Any, lr: float, steps: int, halves_only: bool = False
) -> Trial:
    """Train from the present weights on the batch, or on several in turn, and put everything back.

    This is done twice: on random halves of the batch, which differ as mini-batches do, and, unless
    `halves_only`, on the whole batch. Costs twice `steps` training steps at most.
    """
    batches = [read for _, read in read_batches(batch)]
    source = generator(setup.seed, "halves")
    ordered = itertools.cycle([(read, order_by_content(read, setup.seed)) for read in batches])
    steps *= setup.accumulate
    halves = [half_of(read, order, source) for read, order in itertools.islice(ordered, steps)]
    for pieces in (halves, batches):
        # Half of the examples may be no batch, as of a graph. The whole one then decides alone.
        refusals = BATCH_REFUSALS if pieces is halves else ()
        with tolerating(*refusals), setup.untouched() as state:
            training = ShortTraining(setup, state, lr, "present weights")
            in_turn = itertools.islice(itertools.cycle(pieces), steps)
            training.train(in_turn, purpose="steps from 0")
            training.count_earlier_learning()
            trial = training.trial()
            if halves_only or not trial.survived:
                break
    return trial
