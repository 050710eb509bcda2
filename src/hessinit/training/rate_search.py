"""The learning rate that short trials favour: steps on halves of the batch, at rates a factor 2 apart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessinit.curvature.preconditioner import part_of
from hessinit.problem.batches import Batch
from hessinit.problem.preserve import ModelState, untouched_model
from hessinit.problem.problem import Forward, Loss
from hessinit.results.advice import Descent
from hessinit.results.initialization import Trial
from hessinit.training import loop
from hessinit.training.data import copy_to, device_of, generator, seed_everything
from hessinit.training.optimizer_rules import AnyOptimizer, OptimizerRule, unwrap_optimizer

Build = Callable[[float], Optimizer]

# All chosen on the development problems of benchmarks/advice.py. The trials are short and see one batch; the
# best rate of 300 steps lay between theirs and the one whose first step is this part of the weights' length.
TRIAL_STEPS = 24
PART_SGD, PART_MOMENTUM, PART_ADAM = 0.05, 0.003, 0.01
# Twice the rate must lower the loss by 2 %: where rates hardly differ, the lower one is safe.
TILT = 0.02
# A loss this many times the first one blows up; such a rate counts as one with e² times the lowest loss.
BLOWN_UP, HEIGHT_BLOWN_UP = 4.0, 2.0
LOWEST = 1e-4  # of the first loss: what is below is fitted exactly
MOST_TRIALS = 10


def search_rate(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], build: Build, *, start: float, first_loss: float,
    halves: bool, steps: int = TRIAL_STEPS, forward: Forward | None = None, seed: int = 0,
) -> tuple[float, tuple[Trial, ...], float]:  # fmt: skip
    """The rate at which the trials would end lowest, by a parabola through three, all trials by rate, and
    the first step on a batch over the length of the weights, per unit of rate.

    From `start` the rate is raised or lowered by factors of 2 while that helps. Half of a batch, drawn
    anew for each step, has the gradient noise of a whole one. Several batches, and a batch that cannot be
    halved, are taken whole. nan if every trial blows up. The model is put back, bit for bit. Costs `steps`
    steps on half the batch for each trial; three trials if `start` is near.
    """
    trials: dict[int, Trial] = {}
    with untouched_model(model, loss, forward) as found:
        halves = halves and len(batches) == 1 and _can_halve(found, model, loss, batches[0], forward)

        def height(power: int) -> float:
            if power not in trials and len(trials) == MOST_TRIALS:
                return math.inf
            if power not in trials:
                with found.with_stand_ins(seed):
                    pieces = itertools.islice(_pieces(batches, halves, seed), steps)
                    rate = start * 2.0**power
                    made = build(rate)
                    trials[power] = try_rate(model, loss, pieces, made, rate, first_loss, forward, seed)
            trial = trials[power]
            return _height(trial.score, first_loss) + TILT * power if trial.survived else math.inf

        def learns(power: int) -> bool:
            return height(power) < math.inf and trials[power].score < first_loss

        best = 0
        if learns(0) and height(1) < height(0):
            while height(best + 1) < height(best):
                best += 1
        else:  # Among rates that destroy the network at once, the differences mean nothing. Near them a
            # dead network may end just below the first loss: half of the rate must learn, too.
            while len(trials) < MOST_TRIALS and not (
                learns(best) and height(best) < height(best - 1) and learns(best - 1)
            ):
                best -= 1
        middle = height(best)
        # A neighbour that was not tried, because there were too many trials, counts as an equal.
        sides = [height(best + step) if best + step in trials else middle for step in (-1, 1)]
        with found.with_stand_ins(seed):
            moved = _move(model, loss, batches[0], build(start), forward, seed)
    below, above = (min(side, middle + HEIGHT_BLOWN_UP) if math.isinf(side) else side for side in sides)
    bend = below - 2 * middle + above
    shift = 0.5 * (below - above) / bend if math.isfinite(bend) and bend > 0 else 0.0
    rate = start * 2.0 ** (best + min(max(shift, -0.5), 0.5))
    by_rate = tuple(trials[power] for power in sorted(trials))
    return rate if math.isfinite(middle) else math.nan, by_rate, moved / start


def try_rate(
    model: nn.Module, loss: Loss, batches: Iterator[Batch], optimizer: Optimizer, rate: float, first: float,
    forward: Forward | None, seed: int,
) -> Trial:  # fmt: skip
    """Train until the batches end or the loss blows up; the score is the mean loss of the last third."""
    losses: list[float] = []
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    seed_everything(seed, "trial")

    def pairs() -> Iterator[tuple[Any, Any]]:
        for batch in batches:
            if losses and losses[-1] > first + (BLOWN_UP - 1) * abs(first):
                return
            yield copy_to(batch, device_of(model), dtype)

    made, _ = loop.train(
        model, loss, pairs(), optimizer, forward=forward, on_step=lambda _, value: losses.append(value)
    )
    model.zero_grad(set_to_none=True)
    survived = all(map(math.isfinite, made)) and made[-1] <= first + (BLOWN_UP - 1) * abs(first)
    score = statistics.fmean(made[-math.ceil(len(made) / 3) :]) if survived else math.nan
    reason = "" if survived else f"blew up at step {len(made)}"
    return Trial(
        name="trial", lr=rate, steps=len(made), score=score, survived=survived, losses=tuple(made),
        reason=reason,
    )  # fmt: skip


def _move(
    model: nn.Module, loss: Loss, batch: Batch, optimizer: Optimizer, forward: Forward | None, seed: int
) -> float:
    """Make the first step of an optimizer; its length over that of all weights that it may move."""
    own = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in own]
    length = math.hypot(*(float(weight.norm()) for weight in before))
    try_rate(model, loss, iter([batch]), optimizer, 0.0, math.inf, forward, seed)
    step = math.hypot(*(float((now.detach() - then).norm()) for now, then in zip(own, before, strict=True)))
    return step / length if length else math.inf


def _height(score: float, first: float) -> float:
    """The logarithm of the score; a loss that begins at or below 0 has none and is taken as it is."""
    return math.log(max(score / first, LOWEST)) if first > 0 else score / (abs(first) or 1.0)


def _pieces(batches: Sequence[Batch], halves: bool, seed: int) -> Iterator[Batch]:
    source = generator(seed, "halves")
    for batch in itertools.cycle(batches):
        if halves and batch.size >= 4:
            yield part_of(batch, torch.randperm(batch.size, generator=source)[: batch.size // 2])
        else:
            yield batch


def _can_halve(
    found: ModelState, model: nn.Module, loss: Loss, batch: Batch, forward: Forward | None
) -> bool:
    """Whether forward and loss accept half of the examples."""
    half = next(_pieces([batch], True, 0))
    try:
        with found.with_stand_ins(0), torch.no_grad():
            return bool(loop.evaluate_loss(model, loss, copy_to(half, device_of(model)), forward).isfinite())
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False


def start_and_part(steps: OptimizerRule, best: float) -> tuple[float, float]:
    """Where the trials begin, near the rate that they favour as a rule, and the part of the first step."""
    if not isinstance(steps.rule, Descent):
        return 2 * best, PART_ADAM
    return (2 * best, PART_MOMENTUM) if steps.rule.momentum else (best, PART_SGD)


def builder(steps: OptimizerRule, optimizer: AnyOptimizer, model: nn.Module) -> Build:
    """A function of the rate that builds the optimizer anew, with the proportions of its groups."""
    rule: Any = steps.rule
    if isinstance(optimizer, str):
        own = [one for one in model.parameters() if one.requires_grad]
        kept: Mapping[str, Any] = {"weight_decay": rule.weight_decay}
        if isinstance(rule, Descent):
            return lambda lr: SGD(own, lr, momentum=rule.momentum, nesterov=rule.nesterov, **kept)
        kind = AdamW if rule.decoupled else Adam
        return lambda lr: kind(own, lr, betas=(rule.beta1, rule.beta2), eps=rule.eps, **kept)
    if not isinstance(optimizer, Optimizer):
        return lambda lr: loop.make_optimizer(optimizer, model, lr)
    inner, names = unwrap_optimizer(optimizer), {id(one) for one in model.parameters()}
    base: Any = next(kind for kind in (SGD, AdamW, Adam) if isinstance(inner, kind))
    largest = max(steps.rates.values())

    def build(lr: float) -> Optimizer:
        groups = []
        for group in inner.param_groups:
            own = [one for one in group["params"] if id(one) in names]
            part = float(group.get("initial_lr", group["lr"])) / largest if largest else 1.0
            groups += [{**group, "params": own, "lr": lr * part}] if own else []
        made: Optimizer = base(groups, lr=lr)
        return made

    return build
