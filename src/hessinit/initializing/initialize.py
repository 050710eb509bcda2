"""The verb `initialize_`: weights whose curvature fits the learning rate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.initializing import arguments, defaults
from hessinit.initializing.carrying_out import UNSHARPENED, carry_out
from hessinit.initializing.saving import save_model_weights
from hessinit.initializing.wish import Wish
from hessinit.initializing.workbench import Once, Setting, keep_all, read_once
from hessinit.problem.batches import read_batches
from hessinit.problem.layers import check_present
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import (
    check_arguments,
    check_dropout,
    check_finite_inputs,
    check_switches,
    check_tolerance,
    check_whole,
    unwrap,
)
from hessinit.results.initialization import Initialization
from hessinit.schemes.targets import find_targets


@torch.inference_mode(False)
def initialize_(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    lr: float | str | None = None,
    target: float | None = None,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    rule: str = "network",
    scheme: str = "auto",
    freedom: str = "auto",
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
    most_sharpening: float = defaults.MOST_SHARPENING,
    seed: int = 0,
    dry_run: bool = False,
    strict: bool = False,
) -> Initialization:
    """Draw new weights and scale them until the curvature fits the step; in place, on the same Parameters.

    `lr` means a target of κ/lr for the network's ‖H‖, κ = 4 (1/2 for a network with normalizations, 1 for a
    quadratic loss); "auto" takes a rate that suits the start, and says so in `result.lr`. `target` gives the
    norm itself; neither means 1, the paper's principle. `optimizer` is that of the training: "momentum" and
    "nesterov" make steps 1/(1 − `momentum`) times as long; the steps of "adam" and "adamw" do not grow with
    the gradient, so that the scheme alone decides.

    `rule="network"` moves one number. With freedom="auto" a start that is too sharp gets one smaller gain for
    all weights; one that is too gentle is sharpened: quietly where the network is homogeneous, as with ReLU
    (the largest weight small, the others larger), else by its last weight. By a rate, normalized networks,
    those that read tokens and those with a quadratic loss are not sharpened. "gain", "last" and "quiet"
    insist. `rule="layers"` brings the norm of every layer to the target.

    `scheme` is the start: a closed form or "lsuv" as `apply_scheme_` knows them, "keep" for the weights as
    they are, or "auto": "lsuv", with smaller pre-activations where the gradient would explode.
    `residual="scaled"` tames branches that are added up; "auto" does so in normalized networks. Biases become
    0 with the weights that are drawn; biases="keep" leaves them. Frozen weights are never touched.

    The result says whether the target was met to `tolerance`, and why not: a target that only a saturated
    network could reach is capped where the loss would pass `most_sharpening` times that of a silent one. Not
    meeting it warns, or raises with `strict=True`. Whatever is raised, the model is then as it was found.
    `undo()` takes all back; `dry_run=True` does so at once.

    Costs 50 to 170 gradients for a classifier with ten outputs, most of it two reports and two to five
    measurements of the network's norm.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> result = initialize_(model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 3), lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    check_arguments(model, loss, forward, None, dropout, reduction, check)
    arguments.check_choices(rule, scheme, freedom, curvature, biases, residual, dropout)
    check_switches(dry_run=dry_run, strict=strict)
    seed = check_whole("seed", seed, at_least=0)
    rate, norm = arguments.read_aim(lr, target)
    arguments.check_rule(rule, optimizer, lr)
    wish = Wish(
        rate,
        norm,
        optimizer,
        arguments.read_momentum(optimizer, momentum),
        rule,
        scheme,
        freedom,
        biases,
        residual,
        check_tolerance(tolerance),
        arguments.read_measurements(max_measurements, rule),
        arguments.read_most_sharpening(most_sharpening),
    )
    inside = unwrap(model)
    check_present(inside)
    check_dropout(inside, dropout)
    named = layers if layers is None or isinstance(layers, str) else list(layers)
    setting = Setting(
        inside, loss, read_once(batch), named, forward, curvature, dropout, reduction, seed, Once(check)
    )
    for place, one in read_batches(setting.batch):  # before a scheme meets them in some layer
        check_finite_inputs(one.inputs, one, place)
    targets = find_targets(inside, named)
    movable = [one for one in targets if not one.reason_to_leave_alone]
    if not movable:
        reasons = ", ".join(f"{one.name}: {one.reason_to_leave_alone}" for one in targets[:3])
        shown = f" ({reasons}{' …' if len(targets) > 3 else ''})" if reasons else ""
        raise ProblemError(
            f"no weight of two or more dimensions can be set{shown}; unfreeze one, or name others with "
            "layers=."
        )
    go_back = keep_all(movable)
    try:
        result = replace(carry_out(setting, movable, wish), seconds=time.perf_counter() - started)
        if strict and not result.converged and result.scaling != UNSHARPENED:
            raise ConvergenceError(result.reason)
    except BaseException:
        go_back()
        raise
    if dry_run:
        go_back()
    else:
        save = partial(save_model_weights, inside)
        result = replace(result, _go_back=go_back, _save_weights=save)
    if not result.converged and result.scaling != UNSHARPENED:
        warnings.warn(result.reason, ConvergenceWarning, stacklevel=3)  # past the decorator
    return result
