"""The learning rate that short trials favour, among rates a factor 2 apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hessinit.results.advice import Descent, TriedRates, WarmupAdvice, tried_warmup
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training.optimizer_rules import OptimizerRule
from hessinit.training.trial import LENGTHS, TrialSetting


@dataclass(frozen=True)
class SearchRules:
    """How rates are searched; chosen on the development problems of `benchmarks/advice.py`."""

    # The trials are short and see one batch; the best rate of 300 steps lay between theirs and the
    # one whose first step is this part of the weights' length.
    part_sgd: float = 0.05
    part_momentum: float = 0.003
    part_adam: float = 0.01
    most_trials: int = 14
    # A loss that changes by less than this part of what could be gained stands still, and at lower
    # rates, too.
    still: float = 1e-3
    # The advice over the rate that trials favour stays between these: trials survive rates at which
    # a training fails in the end.
    least_times: float = 0.25
    most_times: float = 0.6
    # Warmup is tried over a third of a training of this length.
    warmup_trial: int = 96
    # Where the curvature sets no rate and no step moves the weights.
    fallback: float = 1e-3


SEARCH = SearchRules()


def search_rate(
    setting: TrialSetting, optimizer: OptimizerRule, best: float, steps: int
) -> TriedRates:
    """Search the rate by trials, from that of the largest guaranteed decrease, `best`, on.

    The rate is a geometric mean of the one that the trials favour, counted twice, and of the one
    whose first step moves the weights by a fixed part of their length; it is one that was tried, or
    lies between two.
    """
    # A step that is lost in the rounding of the weights has no length.
    moved = setting.first_move(best if 0 < best < math.inf else 1.0)
    reach = _part_of_length(optimizer) / moved if 0 < moved < math.inf else 0.0
    search = RateSearch(setting, _starting_rate(optimizer, best, reach), steps)
    chosen = search.run()
    trials = tuple(search.trials[power] for power in sorted(search.trials))
    if search.longer is not None:
        trials = (*trials, search.longer)
    if not search.learned:
        return TriedRates(trials=trials)
    favoured = search.interpolated(chosen)
    times = min(max((reach / favoured) ** (1 / 3), SEARCH.least_times), SEARCH.most_times)
    survivors = [trial.lr for trial in trials if trial.survived]
    rate = min(max(times * favoured, min(survivors)), max(survivors))
    stopped = chosen in (min(search.trials), max(search.trials))
    return TriedRates(trials=trials, rate=rate, favoured=favoured, stopped_at_end=stopped)


def try_warmup(setting: TrialSetting, lr: float) -> WarmupAdvice:
    """Find whether a warmup helps at this rate, by two trainings on the same batches."""
    steps = SEARCH.warmup_trial // 3
    without = setting.train(lr, steps=SEARCH.warmup_trial)
    warmed = setting.train(lr, steps=SEARCH.warmup_trial, warmup=steps)
    advised = warmed.survived and not warmed.score >= without.score  # a score of nan: diverged
    return tried_warmup(advised, steps, without, warmed)


@dataclass
class RateSearch:
    """Trials from `start` on, by factors of 2, until the loss is higher on both sides."""

    setting: TrialSetting
    start: float
    steps: int
    trials: dict[int, Trial] = field(default_factory=dict)
    longer: Trial | None = None

    def run(self) -> int:
        """Return the power of 2 of the best rate; `learned` says whether any trial learned."""
        best = 0
        while self._falls(0) and self._has_room and self._is_better(best + 1, best):
            best += 1
        # A network that a high rate has killed says nothing of lower rates.
        if not (best and self.learned):
            while not self._is_settled(best) and self._has_room:
                best -= 1
        if not self._has_room or not self.learned:
            best = min(self.trials, key=self._score)
        if self.trials[best].outcome not in (LEARNED, DIVERGED):
            rate = self.start * 2.0**best
            self.longer = self.setting.train(rate, steps=LENGTHS.times_longer * self.steps)
        return best

    @property
    def _has_room(self) -> bool:
        return len(self.trials) < SEARCH.most_trials

    def _is_settled(self, power: int) -> bool:
        """Whether the search may stop above this power.

        Some rate has learned, and half of this one is worse, yet lowers the loss; or nothing moves.
        Among rates that destroy the network at once, the differences mean nothing, and near them a
        dead network may end just below its first loss.
        """
        pair = [self._trial(power), self._trial(power - 1)]
        gain = self.setting.setup.loss_range.gain(pair[0].losses[0])
        if all(self._stands_still(trial, gain) for trial in pair):
            return True
        falls = self._falls(power) and self._falls(power - 1)
        return self.learned and falls and self._is_better(power, power - 1)

    @staticmethod
    def _stands_still(trial: Trial, gain: float) -> bool:
        return trial.survived and abs(trial.score - trial.losses[0]) < SEARCH.still * gain

    @property
    def learned(self) -> bool:
        """Whether the network learned in any trial."""
        trials = (*self.trials.values(), self.longer)
        return any(trial is not None and trial.outcome == LEARNED for trial in trials)

    def interpolated(self, best: int) -> float:
        """Return the rate at the minimum of a parabola through the best trial and the next ones."""
        middle = self._score(best)
        falls = [trial.losses[0] - trial.score for trial in self.trials.values() if trial.survived]
        most = middle + 2 * max(falls, default=0.0)
        # A neighbour that was not tried, because there were too many trials, counts as an equal.
        below, above = (
            min(self._score(power) if power in self.trials else middle, most)
            for power in (best - 1, best + 1)
        )
        bend = below - 2 * middle + above
        shift = 0.5 * (below - above) / bend if bend > 0 else 0.0
        return self.start * 2.0 ** (best + min(max(shift, -0.5), 0.5))

    def _trial(self, power: int) -> Trial:
        if power not in self.trials:
            self.trials[power] = self.setting.train(self.start * 2.0**power, steps=self.steps)
        return self.trials[power]

    def _score(self, power: int) -> float:
        trial = self._trial(power)
        return trial.score if trial.survived else math.inf

    def _falls(self, power: int) -> bool:
        return self._score(power) < self._trial(power).losses[0]

    def _is_better(self, power: int, other: int) -> bool:
        return self._score(power) < self._score(other)


def _starting_rate(optimizer: OptimizerRule, best: float, reach: float) -> float:
    """Return where the trials begin: near the rate that they favour as a rule.

    `best` is the rate of the largest guaranteed decrease. Where the curvature sets none, it is
    `reach`, at which the first step is a fixed part of the length of the weights.
    """
    if not 0 < best < math.inf:
        return reach or SEARCH.fallback
    is_plain = isinstance(optimizer.rule, Descent) and not optimizer.rule.momentum
    return best if is_plain else 2 * best


def _part_of_length(optimizer: OptimizerRule) -> float:
    """Return the length of a good first step, as a part of the length of the weights."""
    if not isinstance(optimizer.rule, Descent):
        return SEARCH.part_adam
    return SEARCH.part_momentum if optimizer.rule.momentum else SEARCH.part_sgd
