"""The search for a learning rate, by short trainings at rates a factor 2 apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hessinit.init.weights import reason_to_keep
from hessinit.present import advice as say
from hessinit.results.advice import Descent, TriedRates, WarmupAdvice
from hessinit.results.initialization import DIVERGED, LEARNED, Trial
from hessinit.training.optimizer_rules import OptimizerRule, Rule
from hessinit.training.trial import LENGTHS, ShortTraining, TrialSetting


@dataclass(frozen=True)
class StepRules:
    """How the rate of one kind of optimizer is searched."""

    # The trials are short and see one batch; the best rate of 300 steps lay between theirs and the
    # one whose first step is this part of the weights' length.
    part: float
    # The first trial, in rates of the largest guaranteed decrease; 0: where the part says.
    start: float = 2.0
    # The advice over the rate that trials favour is this power of the ratio of the two, and at most
    # the next: trials survive rates at which a training fails in the end.
    power: float = 1 / 3
    most_times: float = 0.6
    longer: int = 1  # than others' trials, by this factor


@dataclass(frozen=True)
class SearchRules:
    """How rates are searched; chosen on the development problems of `benchmarks/advice.py`."""

    sgd: StepRules = StepRules(0.05, start=1.0)
    momentum: StepRules = StepRules(0.003)
    adam: StepRules = StepRules(0.01)
    # Of optimizers without a closed form the first steps say little: the length that counts is the
    # usual one among so many moves.
    any: StepRules = StepRules(0.027, start=0.0, power=1 / 2, most_times=1.0, longer=3)
    moves: int = 48
    # The length of the first of these moves, as a part of that of the weights: next to none.
    small_move: float = 1e-5
    least_times: float = 0.25  # as most_times
    most_trials: int = 14
    # A loss that changes by less than this part of what could be gained stands still, and at lower
    # rates, too.
    still: float = 1e-3
    # Beside frozen weights, or with adapters, the length of what is trained says nothing, as B of
    # LoRA starts at 0; chosen on the development half of `benchmarks/finetuning.py`.
    adapter_times: float = 0.85
    # Warmup is tried over a third of a training of this length.
    warmup_trial: int = 96
    # Where the curvature sets no rate and no step moves the weights.
    fallback: float = 1e-3
    # On fresh mini-batches the best trials of each round go on to the next, up to these parts of
    # their length; chosen on the development tasks of `benchmarks/untuned.py`.
    rounds: tuple[float, ...] = (0.25, 0.5, 1.0)
    kept: int = 2  # trainings so many powers of 2 from the best one are kept to go on
    # Two trials that differ by less than this part of the fall are equal there: of these the higher
    # rate ends lower, as the schedule of the training takes its noise away.
    tie: float = 0.02

    def of(self, rule: Rule | None) -> StepRules:
        """Return those of an optimizer with this closed form."""
        if isinstance(rule, Descent):
            return self.momentum if rule.momentum else self.sgd
        return self.adam if rule else self.any


SEARCH = SearchRules()


def search_rate(
    setting: TrialSetting, optimizer: OptimizerRule, best: float, steps: int
) -> TriedRates:
    """Search the rate by trials, from that of the largest guaranteed decrease, `best`, on.

    On fresh mini-batches the rate is the one that trials of `steps` steps favour. On one batch it
    is a geometric mean of that rate and of the one at which a step moves the weights by a fixed
    part of their length; beside frozen weights, which were trained, it is a fixed part of the
    former. It is one that was tried, or lies between two.
    """
    stepping = SEARCH.of(optimizer.rule)
    reach = _find_reach(setting, optimizer, best)
    start = (stepping.start * best if best < math.inf else 0.0) or reach or SEARCH.fallback
    lengths: tuple[int, ...] = (stepping.longer * steps,)
    if setting.is_fresh:
        # From below: above the best rate a deep network may stay on a plateau whatever the rate.
        start = reach or start
        lengths = tuple(math.ceil(part * steps) for part in SEARCH.rounds)
    search = RateSearch(setting, start, lengths)
    chosen = search.run()
    trials = tuple(search.trials[exponent] for exponent in sorted(search.trials))
    if search.longer is not None:
        trials = (*trials, search.longer)
    tried = TriedRates(
        trials=trials,
        trained_before=bool(reason_to_keep(setting.setup.model)),
        fresh=setting.is_fresh,
        stopped_at_end=chosen in (min(search.trials), max(search.trials)),
    )
    if not search.learned:
        if setting.on_batch is None:
            return tried
        # On one batch, which comes again and again, a network leaves a plateau sooner.
        rates = search_rate(setting.on_batch, optimizer, best, LENGTHS.steps)
        return replace(rates, trials=(*trials, *rates.trials))
    if setting.is_fresh:
        rate = search.trials[chosen].lr
        return replace(tried, rate=rate, favoured=rate)
    favoured = search.interpolated(chosen)
    times = (reach / favoured) ** stepping.power
    times = min(max(times, SEARCH.least_times), stepping.most_times)
    if tried.trained_before:
        times = SEARCH.adapter_times
    survivors = [trial.lr for trial in trials if trial.survived]
    rate = min(max(times * favoured, min(survivors)), max(survivors))
    return replace(tried, rate=rate, favoured=favoured)


def _find_reach(setting: TrialSetting, optimizer: OptimizerRule, best: float) -> float:
    """Return the rate at which a step moves the weights by a fixed part; 0 where none does."""
    # A step that is lost in the rounding of the weights has no length.
    moved = setting.first_move(best if 0 < best < math.inf else 1.0)
    if optimizer.rule is None and 0 < moved < math.inf:
        moved = setting.usual_move(SEARCH.small_move / moved, SEARCH.moves) or moved
    return SEARCH.of(optimizer.rule).part / moved if 0 < moved < math.inf else 0.0


def try_warmup(setting: TrialSetting, lr: float) -> WarmupAdvice:
    """Find whether a warmup helps at this rate, by two trainings on the same batches."""
    steps = SEARCH.warmup_trial // 3
    without = setting.train(lr, steps=SEARCH.warmup_trial)
    warmed = setting.train(lr, steps=SEARCH.warmup_trial, warmup=steps)
    advised = warmed.survived and not warmed.score >= without.score  # a score of nan: diverged
    return WarmupAdvice(
        advised=advised,
        steps=steps if advised else 0,
        reason=say.explain_tried_warmup(advised, steps, without, warmed),
        trials=(without, warmed),
    )


@dataclass
class RateSearch:
    """Trials from `start` on, by factors of 2, until the loss is higher on both sides.

    In each round they are continued to one of the `lengths`, where the search needs them.
    """

    setting: TrialSetting
    start: float
    lengths: tuple[int, ...]
    trials: dict[int, Trial] = field(default_factory=dict)
    longer: Trial | None = None
    _steps: int = 0  # of a trial in this round
    _trainings: dict[int, ShortTraining] = field(default_factory=dict)

    def run(self) -> int:
        """Return the power of 2 of the best rate; `learned` says whether any trial learned."""
        best = 0
        for steps in self.lengths:
            self._steps = steps
            best = self._climb(best)
            self._forget_far_from(best)
        if not (self._is_fresh or (self._has_room and self.learned)):
            best = min(self.trials, key=self._score)
        if self.trials[best].outcome not in (LEARNED, DIVERGED):
            rate = self.start * 2.0**best
            self.longer = self.setting.train(rate, steps=LENGTHS.times_longer * self._steps)
        return best

    def _climb(self, origin: int) -> int:
        """Go up while the loss gets lower, or else down until it gets higher."""
        best = origin
        # Longer trials favour lower rates, so the last of several rounds does not look higher.
        may_rise = not self._is_last_round if self._is_fresh else self._falls(origin)
        while may_rise and self._has_room and self._is_better(best + 1, best):
            best += 1
        # A network that a high rate has killed says nothing of lower rates.
        if best == origin or not (self._is_fresh or self.learned):
            while not self._is_settled(best) and self._has_room:
                best -= 1
        return best

    def _forget_far_from(self, best: int) -> None:
        """Free the memory of trainings that the next round will hardly need."""
        for power in list(self._trainings):
            if self._is_last_round or abs(power - best) > SEARCH.kept:
                del self._trainings[power]

    @property
    def _is_fresh(self) -> bool:
        return self.setting.is_fresh

    @property
    def _is_last_round(self) -> bool:
        return self._steps == self.lengths[-1]

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
        still = SEARCH.still * gain
        if all(trial.survived and abs(trial.score - trial.losses[0]) < still for trial in pair):
            return True
        if not self._is_better(power, power - 1):
            return False
        # The search on fresh mini-batches comes from below, and its first round is short.
        return self._is_fresh or (self.learned and self._falls(power) and self._falls(power - 1))

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
        """Return the trial at this power of 2, continued to the length of this round."""
        known = self.trials.get(power)
        if known is None or (known.survived and known.steps < self._steps):
            if power not in self._trainings:
                self._trainings[power] = self.setting.begin(self.start * 2.0**power)
            goes_on = not self._is_last_round
            training = self._trainings[power]
            # Of fresh mini-batches the first steps may jump where the training recovers.
            self.setting.go_on(training, self._steps, patient=self._is_fresh, goes_on=goes_on)
            self.trials[power] = training.trial()
        return self.trials[power]

    def _score(self, power: int) -> float:
        trial = self._trial(power)
        return trial.score if trial.survived else math.inf

    def _falls(self, power: int) -> bool:
        return self._score(power) < self._trial(power).losses[0]

    def _is_better(self, power: int, lower: int) -> bool:
        """Whether this rate is better than a lower one, to which a tie is no reason to go."""
        score = self._score(lower)
        tie = 0.0
        if self._is_fresh and math.isfinite(score):
            tie = SEARCH.tie * max(self.trials[lower].losses[0] - score, 0.0)
        return self._score(power) < score + tie
