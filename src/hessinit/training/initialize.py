"""The verb `initialize_`: weights whose curvature fits the learning rate, tried by a trial or a race."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.curvature.cost import gradient_seconds, in_gradients
from hessinit.curvature.preconditioner import AdamRule
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError, check_callable
from hessinit.init import apply_scheme, fit, scales, weights
from hessinit.init.options import NOT_SCALED, Fit, FitRequest
from hessinit.measurement.facts import note_unchecked
from hessinit.present.advice import WAYS_TO_LEARN
from hessinit.problem import validate
from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.ranks import Ranks, on_all_ranks, share_weights
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import LEARNED, Initialization, Trial
from hessinit.results.result import replacing
from hessinit.training import loop
from hessinit.training.optimizer_rules import read_optimizer
from hessinit.training.race import Candidate, OnStep, RaceData, race_, read_race_data, survives
from hessinit.training.trial import LONGER as LONGER_TRIAL
from hessinit.training.workers import race_bar

# κ is divided by these in turn until the weights survive their trial; a candidate of the race has
# κ/4.
FLATTER = (2.0, 4.0, 8.0, 16.0, 32.0)
RACED_FLATTER = 4.0
# The trial is at so many times the rate: weights that only just survive on one batch do not on
# fresh ones.
SURVIVAL_STEPS = 24
SURVIVAL_MARGIN = 1.25
# How much farther below the loss of a zero output others must fall to pass the fitted weights:
# variants of these and the user's own weights; and other schemes, which are often ahead at first
# and blow up later.
HANDICAP = 0.1
HANDICAP_SCHEME = 0.3
# The old weights are tried at the rate divided by powers of 4, up to this one.
_QUARTERS = 12
# Where the rate that suits the curvature teaches nothing, lr="auto" takes one so many times lower.
SLOWER = (1, 4, 16, 64)
# lr="auto" tries rates up to so many half decades from the one that the curvature suggests, and
# races so many times as long.
_HALF_DECADES = 2
LONGER = 4


def _on_first_rank(
    ranks: Ranks, model: nn.Module, work: Callable[[], Initialization]
) -> Initialization:
    """Initialize on rank 0, and give every rank its weights and a way back of its own."""
    inside = validate.unwrap(model)
    old = weights.snapshot([], (*inside.parameters(), *inside.buffers()))  # type: ignore[arg-type]
    result, applied = ranks.first(lambda: (found := work(), found.applied), last=True)
    share_weights(inside)
    save = partial(_save_weights, inside)
    return replace(result, _go_back=old, _save_weights=save) if applied else result


@uninterrupted
@on_all_ranks(_on_first_rank)
@torch.inference_mode(False)
def initialize_(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | str | None = None,
    target: float | None = None,
    optimizer: str | loop.MakeOptimizer = "sgd",
    momentum: float = 0.9,
    data: Any = None,
    trial_steps: int = 48,
    rule: str = "network",
    scheme: str = "auto",
    scaling: str = "auto",
    layers: str | Iterable[str] | None = None,
    curvature: str = "gauss-newton",
    forward: Forward | None = None,
    dropout: str = "freeze",
    reduction: str = "auto",
    check: bool = True,
    biases: str = "auto",
    residual: str = "auto",
    tolerance: float = 0.05,
    max_measurements: int | None = None,
    max_sharpening: float = Fit.max_sharpening,
    report: bool | None = None,
    seed: int = 0,
    dry_run: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    progress: bool | OnStep = True,
    distributed: str | None = None,
) -> Initialization:
    """Draw new weights and scale them until the curvature fits the step; in place, on the same Parameters.

    `lr` means a target of κ/lr for ‖H‖, κ = 4 (1 for a quadratic loss). Weights that a
    normalization follows, and other symmetries, are scaled first: that changes the curvature and
    nothing that the network computes. Their own ‖H‖ becomes κ/lr, and no other block of weights is
    sharper. For "adam" and "adamw" it is the norm that these see, with κ = 7; without such
    symmetries their scheme alone decides. A network without symmetries is scaled by gains until its
    ‖H‖ meets the target: weights that are too sharp are all multiplied by one gain; weights that
    are too flat are sharpened with a small output where the network is homogeneous, as with ReLU,
    else by the last weight. `target` gives the norm itself; neither means 1.

    `optimizer` is that of the training: a name, or a function `(parameters, lr)` that builds one.
    "momentum" and "nesterov" make steps 1/(1 − `momentum`) times as long. The weights are tried by
    24 steps on the batch at 1.25 times the rate; where the loss blows up, κ is lowered;
    `result.survival` tells.

    `data`, a DataLoader, a list of batches or `(inputs, targets)` of all examples, asks for a race:
    the fitted weights, flatter ones, other schemes and your own weights are trained for
    `trial_steps` steps each, the worse half dropped after each third, and the best *initial*
    weights are written. With lr="auto", rates are raced, too. `result.trials` tells all. Without
    data, lr="auto" takes a rate that suits the weights.

    `scheme` draws the weights: a closed form or "lsuv" as in `apply_scheme_`, "keep" for the
    present weights, or "auto": "lsuv", with smaller or larger pre-activations in deep chains.
    `residual="scaled"` shrinks residual branches; "auto" does so in normalized networks, not for
    Adam. `scaling`: "all", "last" and "small-output" choose the weights to scale by a gain.
    `rule="layers"` brings every layer's norm to the target. Biases become 0 with the weights that
    are drawn; biases="keep" leaves them. Frozen weights are never touched; with `layers`, no others
    are.

    A model with frozen weights or with adapters (LoRA) was trained before: it is refused unless
    `layers` names what is to be drawn, or `overwrite=True` asks for all that is trainable. What is
    zero there stays zero unless it is named, as the B of LoRA. Frozen tables of positions do not
    count.

    The search stops where the initial loss would exceed `max_sharpening` times the loss of a zero
    output. A target that is not met to `tolerance` warns, or raises with `strict=True`; the result
    says why. Whatever is raised, the model is then as it was found. `undo()` restores the old
    weights; `dry_run=True` does so at once. `report` asks for the curvature of every layer before
    and after, by default only where it is cheap.

    In a job of several processes, each makes the call: rank 0 works on the examples of all ranks
    (distributed="batch"), or on the batch that all pass ("layers"), and on its `data`; all get its
    weights. distributed="each" says that this process works for itself. One of several that says
    nothing is refused, and so is "each" for a model in DistributedDataParallel, whose replicas
    would get different weights.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> result = initialize_(model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 3), lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    validate.check_arguments(model, loss, forward, None, dropout, reduction, check)
    shown = callable(progress) or progress
    reported = report is not None and report
    if callable(progress):
        check_callable("progress", progress, "progress(done, planned, name)")
    validate.check_switches(
        dry_run=dry_run, strict=strict, overwrite=overwrite, progress=shown, report=reported
    )
    seed = validate.check_whole("seed", seed, at_least=0)
    trial_steps = validate.check_whole("trial_steps", trial_steps, at_least=3)
    inside = validate.unwrap(model)
    validate.check_present(inside)
    if data is not None and lr is None:
        raise ProblemError(
            "data= asks for a race, which trains at a learning rate; pass lr=, such as 0.1, or lr='auto'."
        )
    name, momentum = _read_rule(optimizer, inside, momentum)
    chosen = Fit(
        rule=rule,
        scheme=scheme,
        scaling=scaling,
        curvature=curvature,
        biases=biases,
        residual=residual,
        tolerance=tolerance,
        max_measurements=max_measurements,
        max_sharpening=max_sharpening,
        report=report,
        momentum=momentum,
    )
    config = FitRequest(lr, target, name, chosen)
    validate.check_dropout(inside, dropout)
    named = validate.list_patterns(layers)
    found = read_batches(batch)
    pairs = [(one.inputs, one.targets) for _, one in found]  # an iterator can be read only once
    is_one = len(found) == 1 and not found[0][0]
    problem = Problem(
        inside,
        loss,
        pairs[0] if is_one else pairs,
        forward=forward,
        layers=named,
        dropout=dropout,
        reduction=reduction,
        seed=seed,
        check=check,
    )
    factory = scales.ProblemFactory(problem, curvature)
    for place, one in found:  # before a scheme meets them in some layer
        validate.check_finite_inputs(one.inputs, place)
    steps = trial_steps * (LONGER if config.lr == "auto" else 1)
    raced = None if data is None else read_race_data(data, factory.problem.batch, steps, seed)
    targets = weights.find_targets(inside, named)
    writable = [one for one in targets if not one.reason_unchanged]
    if not writable:
        reasons = (
            ", ".join(f"{one.name}: {one.reason_unchanged}" for one in targets[:3])
            or "there is none"
        )
        raise ProblemError(
            f"no weight of two or more dimensions can be set ({reasons}); unfreeze one, or name others with "
            "layers=."
        )
    if layers is None and not overwrite and (why := weights.reason_to_keep(inside)):
        raise ProblemError(
            f"{why}, so it was trained before, and new weights would replace what it learned; name those to "
            "draw with layers=, or pass overwrite=True for all that are not frozen."
        )
    others = [one for one in inside.parameters() if one.ndim < 2 and one.requires_grad]
    restore = weights.snapshot(writable, others if named is None else ())
    work = _Work(factory, writable, config, restore, optimizer, progress)
    try:
        result = work.fit_(config)
        if result.lr is not None and (raced is None or config.lr != "auto"):
            result = work.survive_(result)
        if raced is not None:
            result = work.race_(result, raced, steps)
        result = replace(result, chose_lr=config.lr == "auto" and result.lr is not None)
        missed = not result.converged and not result.flat_enough
        if strict and missed:
            raise ConvergenceError(result.reason)
        notes = (*result.notes, *note_unchecked(check))
        result = _priced(
            replace(result, notes=notes, seconds=time.perf_counter() - started), factory
        )
        if missed:
            warnings.warn(result.reason, ConvergenceWarning, stacklevel=5)  # past the decorators
    except BaseException:
        restore()
        raise
    if dry_run or not result.learned:
        restore()
    else:
        result = replace(result, _go_back=restore, _save_weights=partial(_save_weights, inside))
    return result


def _priced(result: Initialization, factory: scales.ProblemFactory) -> Initialization:
    """The result and its reports with their cost in gradients; without, for weights that are not finite."""
    gradient = None
    with contextlib.suppress(ProblemError):
        problem = factory.functional()
        with problem.settings():
            gradient = gradient_seconds(problem)

    def priced(report: CurvatureReport | None) -> CurvatureReport | None:
        return report and replace(report, gradients=in_gradients(report.seconds, gradient))

    cost = in_gradients(result.seconds, gradient)
    return replace(result, gradients=cost, before=priced(result.before), after=priced(result.after))


def _read_rule(
    optimizer: str | loop.MakeOptimizer, model: nn.Module, momentum: float
) -> tuple[str, float]:
    """The name of the rule and its momentum; a user's function builds an optimizer that tells them."""
    if isinstance(optimizer, str):
        return optimizer, momentum
    loop.check_optimizer(optimizer)
    made = loop.make_optimizer(optimizer, model, 0.1)
    rule = read_optimizer(made, model, validate.find_layers(model), in_training=True).rule
    if isinstance(rule, AdamRule):
        return "adamw" if rule.decoupled else "adam", momentum
    if rule is None or not rule.momentum:
        return "sgd", momentum  # a rule that is not known counts as gradient descent
    return "nesterov" if rule.nesterov else "momentum", rule.momentum


@dataclass
class _Work:
    """Fits, trials and races of one call; the old weights are a `restore()` away."""

    factory: scales.ProblemFactory
    targets: list[weights.Target]
    config: FitRequest
    restore: Callable[[], None]
    optimizer: str | loop.MakeOptimizer
    progress: bool | OnStep

    def fit_(self, config: FitRequest) -> Initialization:
        self.restore()
        return fit.fit_weights_(self.factory, self.targets, config, self.restore)

    def _trial(
        self, lr: float, margin: float = SURVIVAL_MARGIN, steps: int = SURVIVAL_STEPS
    ) -> Trial:
        """Some steps from the present weights on the batch, a little above the rate; all is put back."""
        model = self.factory.model
        loss = self.factory.problem.loss
        batch = self.factory.problem.batch
        return survives(model, loss, batch, lr=margin * lr, steps=steps, **self._training())

    def _training(self) -> dict[str, Any]:
        """What trials and races share."""
        problem = self.factory.problem
        return {
            "optimizer": self.optimizer,
            "momentum": self.config.momentum,
            "loss_range": self.factory.loss_range,
            "forward": problem.forward,
            "seed": problem.seed,
        }

    def survive_(self, result: Initialization) -> Initialization:
        """Make the weights flatter until they survive a trial; else the old ones at a lower rate."""
        lr = result.lr
        first = result
        assert lr is not None
        trial = self._trial(lr)
        config = replace(self.config, lr=lr)
        flatter = (
            [replace(config, flatter=by) for by in FLATTER] if result.kappa is not None else []
        )
        if result.scaling == "small-output":
            flatter = [config.with_options(scaling="last"), *flatter]
        if _has_branches(result) and config.fit.residual == "auto":
            flatter = [
                *flatter[:1],
                *(one.with_options(residual="small") for one in (config, *flatter)),
            ]
        survivors: list[FitRequest] = []  # at the rate itself, without the margin
        for other in flatter:
            if trial.survived:
                break
            survivors += [config] if not survivors and self._trial(lr, 1.0).survived else []
            config = other
            result = self.fit_(other)
            trial = self._trial(lr)
        if not trial.survived and survivors:
            config = survivors[0]
            result = self.fit_(config)
            trial = self._trial(lr, 1.0)
        if not trial.survived:
            self.config = replace(config, flatter=1.0)
            return self._old_weights_(first, f"at lr = {lr:g} the loss blew up in every trial")
        asked = self.config
        branches = "small residual branches" if config.fit.residual != asked.fit.residual else ""
        last = "the last weight scaled" if config.fit.scaling != asked.fit.scaling else ""
        kappa = f"κ = {result.kappa:.3g}" if config.flatter > 1 and result.kappa else ""
        told = " and ".join(filter(None, (branches, last, kappa)))
        why = f"; with {told}, since without the loss blew up in a trial" if told else ""
        self.config = config if told else asked
        if asked.lr == "auto" and trial.outcome != LEARNED:
            longer: list[Trial] = []
            for slower in SLOWER:
                rate = lr / slower
                longer.append(self._trial(rate, 1.0, LONGER_TRIAL * SURVIVAL_STEPS))
                if longer[-1].outcome == LEARNED:
                    weaker = result.kappa and result.kappa / slower
                    reason = f"{result.reason}{why}"
                    return replace(
                        result, lr=rate, kappa=weaker, survival=longer[-1], reason=reason
                    )
            return self._nothing_learned_(result, longer)
        return replace(result, survival=trial, reason=f"{result.reason}{why}")

    def _old_weights_(self, result: Initialization, why: str) -> Initialization:
        """The old weights, with the largest rate at which they survive; the flattest ones if at none."""
        lr = result.lr
        assert lr is not None
        self.restore()
        rate, trial = self._largest_rate(lr)
        told = "so the old weights were put back; they"
        found = self._describe(result, "keep")
        if trial is None and result.kappa is not None:
            flattest = self.fit_(replace(self.config, lr=lr, flatter=FLATTER[-1]))
            rate, trial = self._largest_rate(lr)
            if trial is None:
                self.restore()
            else:
                told = "and the old weights survive at no rate; these"
                found = flattest
        slower = "at none that was tried" if trial is None else f"at lr = {rate:.3g}"
        return replace(
            found,
            converged=False,
            survival=trial,
            reason=f"{why}, {told} survive {slower}",
            lr=rate,
        )

    def _largest_rate(self, lr: float) -> tuple[float, Trial | None]:
        """The largest of lr, lr/4, lr/16 … that the present weights survive, and its trial; None without."""
        tried = (
            (rate, self._trial(rate)) for rate in (lr / 4**power for power in range(_QUARTERS))
        )
        return next(((rate, trial) for rate, trial in tried if trial.survived), (lr, None))

    def _describe(self, result: Initialization, scheme: str) -> Initialization:
        """A result for the present weights, which no curvature was fitted to: drawn ones, or the old ones."""
        after = result.before
        if scheme != "keep" and self.config.reports:
            after = scales.ScaledModel(self.factory, [], 0.1).report(False)
        scale = dict.fromkeys(result.scales, 1.0)
        return replace(
            result,
            after=after,
            scales=scale,
            scheme=scheme,
            scaling=NOT_SCALED,
            symmetries=(),
            plan=None,
            measurements=(),
            kappa=None,
            target=None,
        )

    def race_(self, result: Initialization, data: RaceData, steps: int) -> Initialization:
        """Train every candidate; the result is that of the winner, whose initial weights are written."""
        results: dict[tuple[str, float], Initialization] = {}
        rates = _half_decades(result.lr or 0.1) if self.config.lr == "auto" else [self.config.lr]
        if (
            data.different == 1
        ):  # the first that survives wins: what the curvature suggests, else a lower one
            rates = rates[len(rates) // 2 :: -1]
        candidates = [one for rate in rates for one in self._candidates(rate, results, result)]
        self.restore()
        with race_bar(self.progress is True) as bar:
            trials = race_(
                self.factory.model,
                self.factory.problem.loss,
                data,
                candidates,
                **self._training(),
                steps=steps,
                on_step=self.progress if callable(self.progress) else bar,
            )
        winner = trials[0]
        if winner.survived and winner.outcome != LEARNED:
            return self._nothing_learned_(result, trials)
        if not winner.survived:
            return replace(
                self._old_weights_(result, f"none of {len(trials)} candidates survived the race"),
                trials=tuple(trials),
            )
        if self.config.lr == "auto":
            trials = self._survivor_first_(trials, {(one.name, one.lr): one for one in candidates})
            winner = trials[0]
        found = results.get((winner.name, winner.lr))
        if found is None:
            keep = winner.name == YOURS
            found = self._describe(result, "keep" if keep else winner.name)
            found = replace(found, lr=winner.lr, survival=None)
        elif found is not result and self.config.reports:
            after = scales.ScaledModel(self.factory, [], 0.1).report(self.config.fit.report is True)
            found = replace(found, before=result.before, after=after)
        notes = [*found.notes]
        if data.different == 1:
            notes.append(
                "The race had one batch: it tells which candidates learn, not which learns best."
            )
        goal = f" The fit: {found.reason}." if found.kappa is not None else ""
        return replace(
            found,
            converged=True,
            trials=tuple(trials),
            notes=tuple(notes),
            reason=f"{_tell_race(trials, steps)}.{goal}".rstrip("."),
        )

    def _nothing_learned_(self, result: Initialization, trials: Sequence[Trial]) -> Initialization:
        """The old weights, as no trial lowered the loss below that of a constant output."""
        self.restore()
        steps = max(trial.steps for trial in trials)
        return replace(
            self._describe(result, "keep"),
            converged=False,
            trials=tuple(trials),
            survival=None,
            lr=None if self.config.lr == "auto" else result.lr,
            reason=f"Nothing learned in trials of up to {steps} steps, and nothing was written. What may "
            f"help: {WAYS_TO_LEARN}",
        )

    def _survivor_first_(
        self, trials: list[Trial], candidates: dict[tuple[str, float], Candidate]
    ) -> list[Trial]:
        """The best finalist that survives a trial above its rate, whose weights are written, then others."""
        finalists = [trial for trial in trials if trial.survived and trial.steps == trials[0].steps]
        for place, winner in enumerate(finalists):
            if place:
                self.restore()
                candidates[winner.name, winner.lr].write_()
            if self._trial(winner.lr).survived:
                why = f"blew up in a trial at {SURVIVAL_MARGIN:g} times the rate"
                passed = [replace(trial, reason=why) for trial in finalists[:place]]
                return [
                    winner,
                    *passed,
                    *(trial for trial in trials if trial not in finalists[: place + 1]),
                ]
        self.restore()
        candidates[finalists[0].name, finalists[0].lr].write_()
        return trials  # none does: the best one stays

    def _candidates(
        self, lr: float, results: dict[tuple[str, float], Initialization], first: Initialization
    ) -> list[Candidate]:

        def fitted(name: str, config: FitRequest) -> Candidate:
            def write_() -> None:
                results[name, lr] = fit.fit_weights_(
                    self.factory, self.targets, config, self.restore
                )

            return Candidate(name, lr, write_, 0.0 if name == OURS else handicap)

        config = replace(self.config, lr=lr).with_options(report=False)
        auto = self.config.lr == "auto"
        handicap = 0.0 if auto else HANDICAP
        found = [fitted(OURS, config)]
        put_back = (
            first.plan is None and config.fit.scheme != "keep"
        )  # the old weights, after the trials
        if not auto and not put_back:  # it is in the model
            results[OURS, lr] = first
            found = [
                Candidate(OURS, lr, weights.snapshot(self.targets, self.factory.model.parameters()))
            ]
        if first.kappa is not None and not auto:
            flatter = replace(config, flatter=RACED_FLATTER * config.flatter)
            found.append(fitted(f"{OURS}, κ = {first.kappa / RACED_FLATTER:.3g}", flatter))
        if _has_branches(first) and config.fit.residual == "auto":
            size = "plain" if first.symmetries and not config.is_adaptive else "scaled"
            found.append(fitted(f"{OURS}, {size} branches", config.with_options(residual=size)))
        if self.config.fit.scheme != "keep" and not auto:
            # Where nothing is scaled, the fitted weights are LSUV's.
            schemes = ["orthogonal"] if first.kappa is None else ["lsuv", "orthogonal"]
            found += [
                Candidate(scheme, lr, partial(self._draw_, scheme), HANDICAP_SCHEME)
                for scheme in schemes
            ]
        return [*found, Candidate(YOURS, lr, lambda: None, handicap)]

    def _draw_(self, scheme: str) -> None:
        apply_scheme.draw_scheme_(
            self.factory.model,
            apply_scheme.Scheme(scheme),
            self.factory.sample,
            self.factory.problem.forward,
            self.factory.problem.layers,
            torch.Generator().manual_seed(self.factory.problem.seed),
        )


OURS = "hessinit"
YOURS = "your weights"


def _half_decades(rate: float) -> list[float]:
    """Rates such as 0.03, 0.1, 0.3 around this one.

    >>> _half_decades(0.07)
    [0.01, 0.03, 0.1, 0.3, 1.0]
    """
    middle = round(2 * math.log10(rate))
    found = range(middle - _HALF_DECADES, middle + _HALF_DECADES + 1)
    return [float(f"{10.0 ** (half / 2):.0e}") for half in found]


def _has_branches(result: Initialization) -> bool:
    return any(row.closes_residual for row in result.plan or ())


def _tell_race(trials: Sequence[Trial], steps: int) -> str:
    winner, *others = trials
    many = len({trial.lr for trial in trials}) > 1

    def told(trial: Trial) -> str:
        return f"{trial.name} at lr = {trial.lr:g}" if many else trial.name

    rivals = [trial for trial in others if trial.survived and trial.steps == winner.steps]
    rivals.sort(key=lambda trial: trial.score)
    best = f"{told(winner)} won the race of {len(trials)}: score {winner.score:.3g} after {steps} steps"
    if not rivals:
        return f"{best}; no other finished"
    ahead = ""
    if rivals[0].score < winner.score:
        ahead = f", but {rivals[0].reason}" if rivals[0].reason else ", not far enough ahead"
    return f"{best}, {told(rivals[0])} {rivals[0].score:.3g}{ahead}"


def _save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write every parameter and buffer as safetensors, whole or not at all; shared ones once."""
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        save_model(model, str(temporary))
