"""The verb `initialize_`: weights whose curvature fits the learning rate."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.init import defaults, fit, scales, weights
from hessinit.init.defaults import NOT_SCALED, Config
from hessinit.problem import validate
from hessinit.problem.batches import read_batches
from hessinit.problem.problem import Forward, Loss, ProblemOptions
from hessinit.results.initialization import Initialization
from hessinit.results.result import replacing


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
    max_sharpening: float = defaults.MAX_SHARPENING,
    report: bool | None = None,
    seed: int = 0,
    dry_run: bool = False,
    strict: bool = False,
) -> Initialization:
    """Draw new weights and scale them until the curvature fits the step; in place, on the same Parameters.

    `lr` means a target of κ/lr for the network's ‖H‖, κ = 4 (1/2 for a network with normalizations, 1 for a
    quadratic loss); "auto" takes a rate that suits the weights, returned as `result.lr`. `target` gives the
    norm itself; neither means 1, the paper's principle. `optimizer` is that of the training: "momentum" and
    "nesterov" make steps 1/(1 − `momentum`) times as long; the steps of "adam" and "adamw" do not grow with
    the gradient, so that the scheme alone decides.

    `rule="network"` searches one number. With scaling="auto", weights that are too sharp are all multiplied
    by one gain; weights that are too flat are sharpened with a small output where the network is homogeneous,
    as with ReLU (the largest weight small, the others larger), else by the last weight. By a rate, normalized
    networks, those that read tokens and those with a quadratic loss are not sharpened. "all", "last" and
    "small-output" choose the weights to scale. `rule="layers"` brings every layer's norm to the target.

    `scheme` draws the weights: a closed form or "lsuv" as in `apply_scheme_`, "keep" for the present weights,
    or "auto": "lsuv", with smaller pre-activations where the gradient would explode. `residual="scaled"`
    shrinks residual branches; "auto" does so in normalized networks. Biases become 0 with the weights that
    are drawn; biases="keep" leaves them. Frozen weights are never touched.

    The search stops where the initial loss would exceed `max_sharpening` times the loss of a zero output. A
    target that is not met to `tolerance` warns, or raises with `strict=True`; the result says why. Whatever
    is raised, the model is then as it was found. `undo()` restores the old weights; `dry_run=True` does so at
    once. Costs 70 to 230 gradients for a classifier with ten outputs.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> result = initialize_(model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 3), lr=0.5)
    >>> result.converged, abs(result.after.network.norm / result.target - 1) < 0.05
    (True, True)
    """
    started = time.perf_counter()
    validate.check_arguments(model, loss, forward, None, dropout, reduction, check)
    validate.check_switches(dry_run=dry_run, strict=strict)
    seed = validate.check_whole("seed", seed, at_least=0)
    config = Config(
        lr, target, optimizer, momentum, rule, scheme, scaling, curvature, biases, residual, tolerance,
        max_measurements, max_sharpening, report,
    )  # fmt: skip
    inside = validate.unwrap(model)
    validate.check_present(inside)
    validate.check_dropout(inside, dropout)
    named = layers if layers is None or isinstance(layers, str) else list(layers)
    options: ProblemOptions = {"layers": named, "forward": forward, "dropout": dropout}
    options |= {"reduction": reduction, "seed": seed}
    factory = scales.ProblemFactory(inside, loss, scales.read_once(batch), options, curvature, check)
    for place, one in read_batches(factory.batch):  # before a scheme meets them in some layer
        validate.check_finite_inputs(one.inputs, place)
    targets = weights.find_targets(inside, named)
    writable = [one for one in targets if not one.reason_unchanged]
    if not writable:
        reasons = ", ".join(f"{one.name}: {one.reason_unchanged}" for one in targets[:3]) or "there is none"
        raise ProblemError(
            f"no weight of two or more dimensions can be set ({reasons}); unfreeze one, or name others with "
            "layers=."
        )
    others = (
        [one for one in inside.parameters() if one.ndim < 2 and one.requires_grad] if named is None else []
    )
    restore = weights.snapshot(writable, others)
    try:
        result = fit.fit_(factory, writable, config, restore)
        missed = not result.converged and result.scaling != NOT_SCALED
        if strict and missed:
            raise ConvergenceError(result.reason)
    except BaseException:
        restore()
        raise
    result = replace(result, seconds=time.perf_counter() - started)
    if dry_run:
        restore()
    else:
        result = replace(result, _go_back=restore, _save_weights=partial(_save_weights, inside))
    if missed:
        warnings.warn(result.reason, ConvergenceWarning, stacklevel=3)  # past the decorator
    return result


def _save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write every parameter and buffer as safetensors, whole or not at all; shared ones once."""
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        save_model(model, str(temporary))
