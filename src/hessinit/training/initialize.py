"""The verb `initialize_`: weights that suit the learning rate, tried by a trial or a race."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from hessinit.curvature.evaluation import gradient_seconds, in_gradients
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError, argument
from hessinit.init import scales, weights
from hessinit.init.options import Fit, FitRequest
from hessinit.measurement.facts import note_unchecked
from hessinit.problem import checks
from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import Ranks, lockstep_ranks, on_all_ranks, share_weights
from hessinit.progress import OnProgress, check_progress, report_progress
from hessinit.results.advice import Descent, TriedRates
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import YOURS, Initialization
from hessinit.results.result import replacing
from hessinit.training.optimizer_rules import build_optimizer_rule
from hessinit.training.optimizers import AnyOptimizer, Training
from hessinit.training.trial import read_trials
from hessinit.training.trial_data import note_trial_data
from hessinit.training.weight_trials import FittedWeights, choose_start_, search_rate_, survive_


def _on_first_rank(
    ranks: Ranks, model: nn.Module, work: Callable[[], Initialization]
) -> Initialization:
    """Initialize on rank 0, and give every rank its weights and a way back of its own."""
    inside = checks.unwrap(model)
    old = weights.snapshot([], (*inside.parameters(), *inside.buffers()))  # type: ignore[arg-type]

    def work_and_tell() -> tuple[Initialization, bool]:
        result = work()
        return result, result.applied

    result, applied = ranks.first(work_and_tell, last=True)
    if not ranks.sharded:
        share_weights(inside)
    if not applied:
        return result
    save = None if ranks.sharded else partial(_save_weights, inside)
    return replace(result, _go_back=old, _save_weights=save)


@uninterrupted
@on_all_ranks(_on_first_rank)
@torch.inference_mode(False)
def initialize_(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    lr: float | str | None = None,
    target: float | None = None,
    optimizer: AnyOptimizer = "sgd",
    data: Any = None,
    steps: int | None = None,
    fit: Fit = Fit(),  # noqa: B008 - frozen
    dry_run: bool = False,
    progress: bool | OnProgress = True,
    distributed: str | None = None,
) -> Initialization:
    """Fit the curvature of the weights to the learning rate; in place, same Parameters.

    Takes a `Problem`, or model, loss and batch for one with the defaults. `lr` means a target of
    κ/lr for ‖H‖, κ = 4 (1 for a quadratic loss). Your own weights that a normalization follows, and
    other symmetries, are scaled: that changes the curvature and nothing that the network computes.
    Their ‖H‖ becomes κ/lr, and no other block of weights is sharper. For "adam" and "adamw" it is
    the norm that these see, with κ = 1.75. A network without symmetries gets new weights, scaled by
    gains until its ‖H‖ meets the target: weights that are too sharp are all multiplied by one gain;
    weights that are too flat are sharpened with a small output where the network is homogeneous, as
    with ReLU, else by the last weight. `target` gives the norm itself; neither means 1. `fit` holds
    rarer options: `Fit(scheme="he")`.

    `optimizer` is that of the training, any as in `advise`. "momentum" and "nesterov" make steps
    1/(1 − momentum) times as long. Those that divide by the size of recent gradients, such as NAdam
    and RMSprop, count as Adam; for others, such as Lion and Muon, and without symmetries for Adam,
    nothing is fitted: new weights are then written only if they lead your own clearly in trials on
    halves of the batch. The weights are tried by 24 steps on the batch at 1.25 times the rate;
    where the loss blows up, κ is lowered. `result.survival` and `result.orders` tell.

    `data`, a DataLoader, a list of batches or `(inputs, targets)` of all examples, gives trials
    fresh mini-batches: the new weights and your own are trained at the rate, and the initial
    weights of those that come lower are written. lr="auto" first searches the rate for your own
    weights, as `advise` does. `steps`, the length of your training, sets that of the trials;
    `result.trials` tells all. Without data, lr="auto" takes a rate that suits the weights.

    Frozen weights are never touched; where the problem names layers, no others are. A model with
    frozen weights or with adapters (LoRA) was trained before: it is refused unless the problem
    names the layers to draw, or `Fit(overwrite=True)` asks for all that is trainable. What is zero
    there stays zero unless it is named, as the B of LoRA. Frozen tables of positions do not count.

    A target that is not met to `fit.tolerance` warns, or raises with `fit.strict`; the result says
    why. Whatever is raised, the model is then as it was found. `undo()` restores the old weights;
    `dry_run=True` does so at once.

    In a job of several processes, each makes the call: rank 0 works on the examples of all ranks
    (distributed="batch"), or on the batch that all pass ("layers"), and on its `data`; all get its
    weights. A model that FSDP2 has sharded stays so: with "batch", every rank draws and scales its
    shards. distributed="each" says that this process works for itself. One of several that says
    nothing is refused, and so is "each" for a model in DistributedDataParallel, whose replicas
    would get different weights.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> batch = (torch.randn(64, 8), torch.arange(64) % 3)
    >>> result = initialize_(model, nn.CrossEntropyLoss(), batch, lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    problem = as_problem(problem, loss, batch)
    check_progress(progress)
    checks.check_switches(dry_run=dry_run)
    model = checks.unwrap(problem.model)
    checks.check_present(model, sharded=lockstep_ranks() is not None)
    _check_in_lockstep(model)
    if data is not None and lr is None:
        raise ProblemError(
            "data= asks for trials, which train at a learning rate; pass lr=, such as 0.1, or "
            "lr='auto'."
        )
    checks.check_kind("fit", fit, Fit, "scheme='he'")
    targets = _find_writable(model, problem.layers, fit.overwrite)
    training = _read_training(optimizer, fit)
    request = _read_request(lr, target, training, fit, model)
    checks.check_dropout(model, problem.dropout)
    factory = scales.ProblemFactory(_with_batch_read(problem), fit.curvature)
    length, fresh = read_trials(factory.problem, training, data, steps, fit.trial_steps)
    biases: list[nn.Parameter] = []
    if problem.layers is None:
        biases = [
            weight for weight in model.parameters() if weight.ndim < 2 and weight.requires_grad
        ]
    restore = weights.snapshot(targets, biases)
    try:
        with report_progress(progress, "Trying") as report:
            fitted = FittedWeights(factory, targets, restore, training, fresh, length, report)
            result = _find_weights_(fitted, request)
        missed = not result.converged and not result.flat_enough
        if fit.strict and missed:
            raise ConvergenceError(result.reason)
        about_trials = note_trial_data(fresh, steps)
        notes = (*result.notes, *about_trials, *note_unchecked(problem.check))
        result = replace(result, notes=notes, seconds=time.perf_counter() - started)
        result = _priced(result, factory)
        if missed:
            warnings.warn(result.reason, ConvergenceWarning, stacklevel=5)  # past the decorators
    except BaseException:
        restore()
        raise
    if dry_run or not result.learned:
        restore()
        return result
    return replace(result, _go_back=restore, _save_weights=partial(_save_weights, model))


def _check_in_lockstep(model: nn.Module) -> None:
    """Refuse what is not done with a sharded model."""
    if lockstep_ranks() is None:
        return
    names = [name for name, part in model.named_modules() if parametrize.is_parametrized(part)]
    if names:
        raise ProblemError(
            f"{names[0] or 'the model'} is parametrized, and a sharded weight is written as it is "
            "stored; initialize before fully_shard."
        )


def _with_batch_read(problem: Problem) -> Problem:
    """Return the problem with its batches in a list, as a loader may shuffle; refuse bad inputs."""
    batches = read_batches(problem.batch)
    for name, read in batches:  # before a scheme meets them in some layer
        checks.check_finite_inputs(read.inputs, name)
    pairs = [(read.inputs, read.targets) for _, read in batches]
    is_pair = len(batches) == 1 and not batches[0][0]
    return replace(problem, batch=pairs[0] if is_pair else pairs)


def _find_writable(
    model: nn.Module, patterns: Iterable[str] | None, overwrite: bool
) -> list[weights.Target]:
    """Return the weights to draw; raise ProblemError if there are none, or if they were trained."""
    targets = weights.find_targets(model, patterns)
    writable = [target for target in targets if not target.reason_unchanged]
    if not writable:
        reasons = [f"{target.name}: {target.reason_unchanged}" for target in targets[:3]]
        raise ProblemError(
            "no weight of two or more dimensions can be set "
            f"({', '.join(reasons) or 'there is none'}); unfreeze one, or name others with ",
            argument("layers"),
            ".",
        )
    reason = "" if overwrite or patterns is not None else weights.reason_to_keep(model)
    if reason:
        raise ProblemError(
            f"{reason}, so it was trained before, and new weights would replace what it learned; "
            "name those to draw with ",
            argument("layers"),
            ", or pass ",
            argument("overwrite", True),
            " (in Python fit=Fit(overwrite=True)) for all that are not frozen.",
        )
    return writable


def _find_weights_(fitted: FittedWeights, request: FitRequest) -> Initialization:
    """Fit weights, make them survive a trial, and compare them with the user's own."""
    rate = request.lr
    rates = TriedRates(trials=())
    if rate == "auto" and fitted.is_fresh and not fitted.rule.tunes_itself:
        rates = fitted.search_rate()
    if math.isnan(rates.rate):
        result, request = _fit_survivors_(fitted, request)
    else:
        request = replace(request, lr=rates.rate)
        result = fitted.fit_(request)
    is_new = result.lr is not None and (result.scheme != "keep" or result.kappa is not None)
    is_drawn_only = request.fit.scheme == "auto" and result.kappa is None
    own = rates.best_on_data
    if is_new and (fitted.is_fresh or is_drawn_only):
        result = choose_start_(fitted, result, request, own and replace(own, name=YOURS))
    searched = [replace(trial, name=YOURS) for trial in rates.trials if trial is not own]
    chose_lr = rate == "auto" and result.lr is not None
    return replace(result, trials=(*result.trials, *searched), chose_lr=chose_lr)


def _fit_survivors_(
    fitted: FittedWeights, request: FitRequest
) -> tuple[Initialization, FitRequest]:
    """Fit weights that survive a trial; returns the request that they were fitted to, too."""
    result = fitted.fit_(request)
    is_unknown = request.is_adaptive and result.lr is None
    if request.lr == "auto" and (fitted.is_fresh or is_unknown):
        result = search_rate_(fitted, result, request)
    return (result, request) if result.lr is None else survive_(fitted, result, request)


def _priced(result: Initialization, factory: scales.ProblemFactory) -> Initialization:
    """Return the result and its reports with their cost in gradients, if one can be timed."""
    if lockstep_ranks() is not None:  # their clocks differ
        return result
    gradient = None
    with contextlib.suppress(ProblemError):  # for weights that are not finite
        problem = factory.functional()
        with problem.settings():
            gradient = gradient_seconds(problem)

    def priced(report: CurvatureReport | None) -> CurvatureReport | None:
        return report and replace(report, gradients=in_gradients(report.seconds, gradient))

    return replace(
        result,
        gradients=in_gradients(result.seconds, gradient),
        before=priced(result.before),
        after=priced(result.after),
    )


def _read_training(optimizer: AnyOptimizer, fit: Fit) -> Training:
    """Return how the weights will be trained; `fit` has the momentum of names without settings."""
    training = Training.of(optimizer)
    if training.optimizer in ("momentum", "nesterov") and training.settings is None:
        return replace(training, settings={"momentum": fit.momentum})
    return training


def _read_request(
    lr: float | str | None, target: float | None, training: Training, fit: Fit, model: nn.Module
) -> FitRequest:
    """Return what to fit to."""
    read = build_optimizer_rule(training, model, layers="**")
    if isinstance(read.rule, Descent) and read.rule.momentum:
        fit = replace(fit, momentum=read.rule.momentum)
    return FitRequest(lr, target, read.kind, fit)


def _save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write every parameter and buffer as safetensors, whole or not at all; shared ones once."""
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        save_model(model, str(temporary))
