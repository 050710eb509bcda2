"""One short training, and the one verdict on it: learned, did not learn, or diverged.

Nothing here depends on a constant in the loss, or on its unit: losses are compared in parts of what
training could gain (`LossRange`), and with the noise between mini-batches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hessinit.measurement.loss_range import UNKNOWN, LossRange, find_loss_range
from hessinit.problem.batches import Batch, part_of, tensors_in
from hessinit.problem.preserve import ModelState, untouched_model
from hessinit.problem.problem import Forward, Loss
from hessinit.results.initialization import DID_NOT_LEARN, DIVERGED, LEARNED, Trial
from hessinit.training import loop
from hessinit.training.data import copy_to, device_of, generator, seed_everything

Build = Callable[[float], Optimizer]

STEPS = 32
# Half of fewer examples may be far sharper than the batch.
LEAST_HALVED = 16
# What a forward or a loss raises on a batch that it was not made for.
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError)
# Where the best trial has not learned yet, one of so many times the steps decides.
LONGER = 4
# Of what training could gain: a fall by this part is learning, and a rise by that part is
# divergence, if it is larger than so many standard deviations of the noise between batches. FAR
# above, noise does not count.
LEAST_FALL = 0.02
LEAST_RISE = 0.05
DEVIATIONS = 3.0
FAR = 2.0


def judge(losses: Sequence[float], loss_range: LossRange = UNKNOWN) -> str:
    """The verdict on a training, from the loss of each of its steps.

    The level that counts is the median of the last third. It has learned if that is below its first
    loss and below that of every constant output, by 2 % of what it could gain; and diverged if that
    is above the first loss by 5 %. Where the loss has no known range, the noise decides alone.

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
    first = losses[0]
    level = statistics.median(losses[-last:])
    if _rises(losses, last, level, loss_range):
        return DIVERGED
    enough = loss_range.left_after(LEAST_FALL, first)
    if math.isnan(enough):
        least = DEVIATIONS * noise_of(losses[: last + 1])
        return LEARNED if level < first - least else DID_NOT_LEARN
    return LEARNED if level < enough else DID_NOT_LEARN


def _rises(losses: Sequence[float], last: int, level: float, loss_range: LossRange) -> bool:
    first = losses[0]
    height = loss_range.height(first)
    # Without a range a chaotic training hides its height in its noise, but begins far below all
    # that follows.
    least = min(losses[1:], default=first) if math.isnan(height) else level
    if least > first + FAR * (abs(first) if math.isnan(height) else height):
        return True
    margin = 0.0 if math.isnan(height) else LEAST_RISE * height
    noise = noise_of(losses[: last + 1])
    if not math.isnan(height):
        noise = max(noise, noise_of(losses[-last:]))
    # Above the first loss, for a training that jumps at once; and above the mean of the first few,
    # which is known better, for one that climbs slowly. The first mini-batch may be an easy one.
    for count in {1, max(1, min(last, len(losses) - last))}:
        reference = statistics.fmean(losses[:count])
        by_chance = DEVIATIONS * noise * math.sqrt(1 / count + 1 / last)
        if level > reference + margin + by_chance:
            return True
    return False


def noise_of(losses: Sequence[float]) -> float:
    """The standard deviation of one loss, from the median difference of neighbours: jumps do not count."""
    differences = [abs(after - before) for before, after in itertools.pairwise(losses)]
    return statistics.median(differences or [0.0]) / (0.6745 * math.sqrt(2))


@dataclass(frozen=True)
class TrialSetting:
    """What the trials of one model share.

    Each starts from the same weights, and everything is put back.
    """

    model: nn.Module
    loss: Loss
    batches: Sequence[Batch]
    forward: Forward | None
    seed: int
    state: ModelState
    # Of the examples, where a step takes half of the batch, drawn anew: it has the noise of a whole
    # one.
    order: Tensor | None
    first: float  # the loss of the first batch before any step, nan if not known
    loss_range: LossRange

    def train(
        self, build: Build, lr: float, *, steps: int = STEPS, warmup: int = 0, patient: bool = False
    ) -> Trial:
        """Train for some steps, fewer where the loss gets far above its first, unless `patient`.

        The first loss is that of the whole batch.
        """
        losses: list[float] = []

        def add(_: int, value: float) -> None:
            losses.append(value if losses or math.isnan(self.first) else self.first)

        def pairs() -> Iterator[tuple[Any, Any]]:
            for batch in itertools.islice(_pieces(self.batches, self.order, self.seed), steps):
                if losses and not patient and self._is_lost(losses):
                    return
                yield self._copy(batch)

        with self.state.with_stand_ins(self.seed):
            optimizer = build(lr)
            seed_everything(self.seed, "trial")
            loop.train(
                self.model,
                self.loss,
                pairs(),
                optimizer,
                warmup=loop.Warmup(optimizer, warmup),
                forward=self.forward,
                on_step=add,
            )
            self.model.zero_grad(set_to_none=True)
        is_lost = not patient and self._is_lost(losses)
        outcome = DIVERGED if is_lost else judge(losses, self.loss_range)
        survived = outcome != DIVERGED
        return Trial(
            name="trial",
            lr=lr,
            steps=len(losses),
            score=statistics.fmean(losses[-math.ceil(len(losses) / 3) :]) if survived else math.nan,
            survived=survived,
            losses=tuple(losses),
            outcome=outcome,
            reason="" if survived else f"diverged by step {len(losses)}",
        )

    def first_move(self, build: Build, lr: float) -> float:
        """The length of the first step over that of all weights that may move, per unit of rate."""
        with self.state.with_stand_ins(self.seed):
            optimizer = build(lr)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            before = [weight.detach().clone() for weight in weights]
            seed_everything(self.seed, "trial")
            loop.train(
                self.model,
                self.loss,
                [self._copy(self.batches[0])],
                optimizer,
                forward=self.forward,
            )
            self.model.zero_grad(set_to_none=True)
            after = [weight.detach() for weight in weights]
            step = math.hypot(
                *(float((new - old).norm()) for new, old in zip(after, before, strict=True))
            )
        length = math.hypot(*(float(weight.norm()) for weight in before))
        return step / (length * lr) if length else math.inf

    def _copy(self, batch: Batch) -> tuple[Any, Any]:
        return copy_to(batch, device_of(self.model), self._dtype)

    @functools.cached_property
    def _dtype(self) -> torch.dtype | None:
        dtypes = {
            parameter.dtype
            for parameter in self.model.parameters()
            if parameter.is_floating_point()
        }
        return dtypes.pop() if len(dtypes) == 1 else None

    def _is_lost(self, losses: Sequence[float]) -> bool:
        return not math.isfinite(losses[-1]) or losses[-1] > losses[
            0
        ] + FAR * self.loss_range.height(losses[0])


@contextlib.contextmanager
def prepare_trials(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    *,
    forward: Forward | None = None,
    seed: int = 0,
) -> Iterator[TrialSetting]:
    """Trials on halves of the batch; several batches, and one that cannot be halved, are taken whole."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        untouched_model(model, loss, forward) as state,
    ):
        setting = TrialSetting(model, loss, batches, forward, seed, state, None, math.nan, UNKNOWN)
        with contextlib.suppress(*_REFUSALS):
            setting = _look_at_loss(setting)
        if len(batches) == 1 and batches[0].size >= LEAST_HALVED:
            with contextlib.suppress(*_REFUSALS):
                halves = replace(setting, order=own_order(batches[0], seed))
                setting = halves if _accepts_half(halves) else setting
        yield setting


def _look_at_loss(setting: TrialSetting) -> TrialSetting:
    """With the first loss and its range."""
    with setting.state.with_stand_ins(setting.seed):
        output, batch = _output_of(setting, setting.batches[0])
        first = setting.loss(output, batch.targets).item()
    loss_range = find_loss_range(
        lambda found, one: setting.loss(found, one.targets), output, [batch]
    )
    return replace(setting, first=first, loss_range=loss_range)


def _output_of(setting: TrialSetting, batch: Batch) -> tuple[Tensor, Batch]:
    inputs, targets = setting._copy(batch)
    model = setting.model
    forward = setting.forward
    output = model(inputs) if forward is None else forward(model, inputs)
    return output, Batch(inputs, targets, batch.size)


def _accepts_half(setting: TrialSetting) -> bool:
    """Whether forward and loss accept half of the examples, and the loss is no sum over them.

    The gradient of a mean by the outputs of a half is twice as large when the others are left out.
    """
    with setting.state.with_stand_ins(setting.seed):
        output, batch = _output_of(
            setting, next(_pieces(setting.batches, setting.order, setting.seed))
        )
        value = setting.loss(output, batch.targets)
    free = output.detach().requires_grad_()
    half = part_of(Batch(free, batch.targets, batch.size), torch.arange(batch.size // 2))
    (together,) = torch.autograd.grad(setting.loss(free, batch.targets), free)
    (alone,) = torch.autograd.grad(setting.loss(half.inputs, half.targets), free)
    own = together[alone != 0]
    is_sum = bool(own.any()) and float((alone * together).sum() / own.square().sum()) < 1.5
    return bool(value.isfinite()) and not is_sum


def _pieces(batches: Sequence[Batch], order: Tensor | None, seed: int) -> Iterator[Batch]:
    source = generator(seed, "halves")
    for batch in itertools.cycle(batches):
        yield batch if order is None else half_of(batch, order, source)


def half_of(batch: Batch, order: Tensor, source: torch.Generator) -> Batch:
    """Half of the examples in `order`, drawn at random."""
    return part_of(
        batch, order[torch.randperm(len(order), generator=source)[: max(1, len(order) // 2)]]
    )


def own_order(batch: Batch, seed: int) -> Tensor:
    """Indices of the examples, by content: random halves of them do not depend on the order in the batch.

    A batch that is repeated as a whole counts once.
    """
    place = _project(batch, batch.inputs, seed)
    content = place + _project(batch, batch.targets, seed + 1)
    # By targets, which may be renamed, only where the inputs are the same.
    order = content.argsort(stable=True)
    order = order[place[order].argsort(stable=True)]
    sorted_content = content[order]
    is_new = (
        sorted_content.diff(prepend=torch.tensor([math.inf])).abs() > 1e-6 * content.abs().max()
    )
    times = math.gcd(*is_new.cumsum(0).bincount()[1:].tolist())
    return order[::times] if len(order) >= times * LEAST_HALVED else order


def _project(batch: Batch, part: Any, seed: int) -> Tensor:
    """A number for each example: its content along a random direction."""
    rows = [
        (torch.view_as_real(one) if one.is_complex() else one)
        .detach()
        .reshape(batch.size, -1)
        .float()
        for one in tensors_in(part)
        if one.ndim and len(one) % batch.size == 0
    ]
    keys = (
        row @ torch.randn(row.shape[1], generator=generator(seed, "order")).to(row) for row in rows
    )
    return sum((key.cpu() for key in keys), torch.zeros(batch.size))
