"""The learning rate that short trials favour: steps on halves of the batch, at rates a factor 2 apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessinit.results.advice import Descent, TriedRates, WarmupAdvice, tried_warmup
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training import loop
from hessinit.training.optimizer_rules import AnyOptimizer, OptimizerRule, unwrap_optimizer
from hessinit.training.trial import LONGER, Build, TrialSetting

# All chosen on the development problems of benchmarks/advice.py. The trials are short and see one
# batch; the best rate of 300 steps lay between theirs and the one whose first step is this part of
# the weights' length.
PART_SGD = 0.05
PART_MOMENTUM = 0.003
PART_ADAM = 0.01
MOST_TRIALS = 14
# A loss that changes by less than this part of what could be gained stands still, and at lower
# rates, too.
STILL = 1e-3

# The advice over the rate that trials favour stays between these: trials are short and see one
# batch, so that they survive rates at which a training fails in the end.
TIMES_TRIALS = 0.25, 0.6
# Warmup is tried over a third of a training of this length.
WARMUP_TRIAL = 96


def search_rate(
    setting: TrialSetting, build: Build, optimizer: OptimizerRule, best: float, steps: int
) -> TriedRates:
    """The trials of the rate search, from the rate of the largest guaranteed decrease, `best`, on.

    The rate is a geometric mean of the one that the trials favour, counted twice, and of the one
    whose first step moves the weights by a fixed part of their length; it is one that was tried, or
    lies between two.
    """
    part = part_of_length(optimizer)
    # A step that is lost in the rounding of the weights has no length.
    moved = setting.first_move(build, best if 0 < best < math.inf else 1.0)
    search = RateSearch(setting, build, _starting_rate(optimizer, best, moved), steps)
    chosen = search.run()
    trials = tuple(search.trials[power] for power in sorted(search.trials))
    if search.longer is not None:
        trials = (*trials, search.longer)
    if not search.learned:
        return TriedRates(trials=trials)
    favoured = search.interpolated(chosen)
    reach = part / moved if 0 < moved < math.inf else 0.0
    times = min(max((reach / favoured) ** (1 / 3), TIMES_TRIALS[0]), TIMES_TRIALS[1])
    tried = [trial.lr for trial in trials if trial.survived]
    rate = min(max(times * favoured, min(tried)), max(tried))
    stopped = chosen in (min(search.trials), max(search.trials))
    return TriedRates(trials=trials, rate=rate, favoured=favoured, stopped_at_end=stopped)


def try_warmup(setting: TrialSetting, build: Build, lr: float) -> WarmupAdvice:
    """Whether a warmup helps at this rate: two trainings on the same batches, with and without."""
    steps = WARMUP_TRIAL // 3
    without = setting.train(build, lr, steps=WARMUP_TRIAL)
    warmed = setting.train(build, lr, steps=WARMUP_TRIAL, warmup=steps)
    advised = warmed.survived and not warmed.score >= without.score  # a score of nan: diverged
    return tried_warmup(advised, steps, without, warmed)


@dataclass
class RateSearch:
    """Trials from `start` on, by factors of 2 up or down, until the loss is higher on both sides."""

    setting: TrialSetting
    build: Build
    start: float
    steps: int
    trials: dict[int, Trial] = field(default_factory=dict)
    longer: Trial | None = None

    def run(self) -> int:
        """The power of 2 of the best rate; `learned` says whether the network learns there."""
        best = 0
        while self._falls(0) and len(self.trials) < MOST_TRIALS and self._is_better(best + 1, best):
            best += 1
        if not (
            best and self.learned
        ):  # a network that a high rate has killed says nothing of lower rates
            while not self._is_settled(best) and len(self.trials) < MOST_TRIALS:
                best -= 1
        if len(self.trials) >= MOST_TRIALS or not self.learned:
            best = min(self.trials, key=self._score)
        if self.trials[best].outcome not in (LEARNED, DIVERGED):
            rate = self.start * 2.0**best
            self.longer = self.setting.train(self.build, rate, steps=LONGER * self.steps)
        return best

    def _is_settled(self, power: int) -> bool:
        """Whether some rate has learned and half of this one is worse, yet lowers the loss; or nothing moves.

        Among rates that destroy the network at once, the differences mean nothing, and near them a
        dead network may end just below its first loss.
        """
        pair = [self._trial(power), self._trial(power - 1)]
        gain = self.setting.loss_range.gain(pair[0].losses[0])
        if all(
            trial.survived and abs(trial.score - trial.losses[0]) < STILL * gain for trial in pair
        ):
            return True
        falls = self._falls(power) and self._falls(power - 1)
        return self.learned and falls and self._is_better(power, power - 1)

    @property
    def learned(self) -> bool:
        made = [*self.trials.values(), *([self.longer] if self.longer else [])]
        return any(trial.outcome == LEARNED for trial in made)

    def interpolated(self, best: int) -> float:
        """The rate at the bottom of a parabola through the best trial and its neighbours."""
        middle = self._score(best)
        most = self._score(best) + 2 * self._largest_fall()
        # A neighbour that was not tried, because there were too many trials, counts as an equal.
        scores = [
            self._score(power) if power in self.trials else middle for power in (best - 1, best + 1)
        ]
        below, above = (min(score, most) for score in scores)
        bend = below - 2 * middle + above
        shift = 0.5 * (below - above) / bend if bend > 0 else 0.0
        return self.start * 2.0 ** (best + min(max(shift, -0.5), 0.5))

    def _trial(self, power: int) -> Trial:
        if power not in self.trials:
            self.trials[power] = self.setting.train(
                self.build, self.start * 2.0**power, steps=self.steps
            )
        return self.trials[power]

    def _score(self, power: int) -> float:
        trial = self._trial(power)
        return trial.score if trial.survived else math.inf

    def _falls(self, power: int) -> bool:
        return self._score(power) < self._trial(power).losses[0]

    def _largest_fall(self) -> float:
        falls = [trial.losses[0] - trial.score for trial in self.trials.values() if trial.survived]
        return max(falls, default=0.0)

    def _is_better(self, power: int, other: int) -> bool:
        return self._score(power) < self._score(other)


def _starting_rate(steps: OptimizerRule, best: float, moved: float) -> float:
    """Where the trials begin: near the rate that they favour as a rule.

    `best` is the rate of the largest guaranteed decrease. Where the curvature sets none, the first
    step is a fixed part of the length of the weights; `moved` is that part per unit of rate.
    """
    if 0 < best < math.inf:
        is_plain = isinstance(steps.rule, Descent) and not steps.rule.momentum
        return best if is_plain else 2 * best
    return part_of_length(steps) / moved if 0 < moved < math.inf else 1e-3


def part_of_length(steps: OptimizerRule) -> float:
    """The length of a good first step, as a part of the length of the weights."""
    if not isinstance(steps.rule, Descent):
        return PART_ADAM
    return PART_MOMENTUM if steps.rule.momentum else PART_SGD


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
    inner = unwrap_optimizer(optimizer)
    names = {id(one) for one in model.parameters()}
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
