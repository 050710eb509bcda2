"""What keeps a network from training, judged from its initial weights: the findings of `assert_sound`.

The thresholds were chosen on 57 problems, each trained from up to 17 starts
(benchmarks/soundness.py). For 19 others benchmarks/results/soundness.txt states how many failures
are found, and how many alarms are false.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation, evaluate_at, weights_in
from hessinit.curvature.progress import TimedGradient
from hessinit.measurement.diagnostics import diagnose
from hessinit.measurement.loss_range import LossOf, deviations_above_constant
from hessinit.present import words
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.determinism import find_bad_buffer
from hessinit.problem.functional import FunctionalProblem
from hessinit.results.curvature_report import Diagnostics, Finding, LayerCurvature

# How far the initial loss may be above that of the best constant output, in that output's standard
# deviation over the examples.
MOST_DEVIATIONS = 8.0
# Where zero outputs want to move alike for all examples, by this many times as much as they differ
# in it, the best constant output is far from them.
_FAR_FROM_ZERO = 2.0
# The part of a layer's activations, in root mean square, that differs between examples.
LEAST_SIGNAL = 0.02
# The largest standard deviation of activations over the smallest.
MOST_UNEVEN = 110.0
# Inputs beyond this root mean square are named as a cause.
LARGE_INPUTS = 30.0
# Of a second look at layers without a gradient, relative to the weights.
_STEP = 1e-2

REDRAW = 'Draw the weights anew: hessinit.apply_scheme_(model, "lsuv", sample=inputs)'
DEEPER = f"{REDRAW}; if they come from a scheme already, add normalization or residual connections."


def judge_signals(
    problem: FunctionalProblem,
    evaluations: Sequence[Evaluation],
    rows: Sequence[LayerCurvature],
    gradient: TimedGradient,
    diagnostics: Mapping[str, Diagnostics] | None = None,
) -> dict[str, Any]:
    """The report's findings that depend on no learning rate, and its norm of the gradient.

    Costs a forward, and two gradients where a layer gets none: weights that are zero on purpose, as
    in LoRA, keep it from the layers before them for a step or two. `diagnostics` are those of
    `diagnose`, if known.
    """
    for one in evaluations:
        one.forget()  # on a GPU the graph may belong to another stream
    first = evaluations[:1]
    gradients = gradient.by_leaf
    found = diagnose(problem, first, gradients=False) if diagnostics is None else diagnostics
    parameters = {layer.name: layer.parameter for layer in problem.layers}
    names = {parameters[row.name]: row.name for row in rows}
    known = {name: found[name] for name in names}  # in the order in which the layers run
    inputs = _size_of_inputs(problem)
    findings = [*_judge_finite(problem, rows), *_judge_gradients(first[0], gradients, known, names)]
    if not any(finding.kind == "no gradient" for finding in findings):
        findings += _judge_depth(known, names, inputs)
    output = gradient.output.detach()
    batch = first[0].batch
    findings += _judge_softmax(problem.loss_of, output, batch)
    findings += _judge_shapes(problem.loss_of, output, batch)
    findings += _judge_start(problem.loss_of, output, batch, inputs)
    total = math.sqrt(math.fsum(float(one.double().square().sum()) for one in gradients.values()))
    return {"findings": tuple(findings), "gradient_norm": total}


def _size_of_inputs(problem: FunctionalProblem) -> float:
    found = [
        one
        for one in tensors_in(problem.batches[0].inputs)
        if one.is_floating_point() and one.numel()
    ]
    return max((float(one.detach().double().square().mean().sqrt()) for one in found), default=0.0)


def _way_out(inputs: float, otherwise: str) -> str:
    if inputs <= LARGE_INPUTS:
        return otherwise
    return f"Normalize the inputs, whose root mean square is {words.format_number(inputs)}."


def _judge_finite(problem: FunctionalProblem, rows: Sequence[LayerCurvature]) -> list[Finding]:
    found = []
    if some := [row.name for row in rows if not math.isfinite(row.norm)]:
        found.append(
            Finding(
                kind="not finite",
                layers=tuple(some),
                message=f"‖H‖ of {_name(some)} is not finite.",
                way_out="Make the loss, the inputs or the weights smaller, or measure with dtype=torch.float64.",
            )
        )
    if buffer := find_bad_buffer(
        problem.model
    ):  # a measurement with the batch's statistics does not see it
        way = "Reset it, as reset_running_stats() does."
        found.append(
            Finding(
                kind="not finite", message=f"The buffer {buffer} holds NaN or inf.", way_out=way
            )
        )
    return found


def _judge_gradients(
    evaluation: Evaluation,
    gradients: Mapping[str, Tensor],
    known: Mapping[str, Diagnostics],
    names: Mapping[str, str],
) -> list[Finding]:
    found = []
    unused = [name for name in gradients if evaluation.moments[name] is None]
    if unused:
        some = [names[name] for name in unused]
        found.append(
            Finding(
                kind="no gradient",
                layers=tuple(some),
                message=f"{_name(some)} {words.agree(some, 'gets', 'get')} no gradient: the forward does not use "
                f"{words.agree(some, 'it', 'them')}, or detaches the result.",
                way_out="Use it, freeze it with requires_grad_(False), or leave it out by layers=.",
            )
        )
    still = _without_gradient(
        evaluation, {n: one for n, one in gradients.items() if n not in unused}
    )
    if still:
        some = [names[name] for name in still]
        dead = [names[n] for n, one in known.items() if one.dead == 1]
        why = (
            f"all units of {_name(dead)} are dead on this batch"
            if dead
            else ("weights that are 0, or activations that are constant or saturated, block it")
        )
        found.append(
            Finding(
                kind="no gradient",
                layers=tuple(some),
                message=f"{_name(some)} {words.agree(some, 'gets', 'get')} no gradient, and none after two "
                f"steps: {why}.",
                way_out=f"{REDRAW} also sets the biases to 0.",
            )
        )
    leaves = evaluation.leaves
    kind = "units"
    alike = [name for name, one in gradients.items() if _rows_alike(leaves[name], one)]
    if (
        not alike
    ):  # those of an embedding and of gates show in the columns of the layer that reads them
        flat = [name for name in list(known)[1:] if leaves[name].ndim == 2]
        kind = "columns"
        alike = [name for name in flat if _rows_alike(leaves[name].T, gradients[name].T)]
    if some := [names[name] for name in alike]:
        found.append(
            Finding(
                kind="identical units",
                layers=tuple(some),
                message=f"The {kind} of {_name(some)} have the same weights and gradients: they stay identical.",
                way_out=f"{REDRAW}.",
            )
        )
    return found


def _without_gradient(evaluation: Evaluation, gradients: Mapping[str, Tensor]) -> list[str]:
    """The leaves whose gradient is 0, now and after two small steps of the others."""
    nil = [name for name, one in gradients.items() if not bool(one.any())]
    weights = weights_in(evaluation.problem, evaluation.problem.dtype)
    for _ in range(2):
        if not nil or len(nil) == len(gradients):
            return nil
        for name, gradient in gradients.items():
            if bool(gradient.any()):
                own = weights[name].detach()
                way = _scaled(gradient)
                weights[name] = own - _STEP * (float(own.norm()) or 1.0) * way / way.norm()
        moved = evaluate_at(evaluation, weights)
        found = torch.autograd.grad(moved.loss, list(moved.leaves.values()), materialize_grads=True)
        gradients = dict(zip(moved.leaves, found, strict=True))
        nil = [name for name in nil if not bool(gradients[name].any())]
    return nil


def _rows_alike(weight: Tensor, gradient: Tensor) -> bool:
    if (
        weight.ndim == 0
        or len(weight) < 2
        or bool((weight[0] - weight[1]).norm() > 1e-3 * weight[:2].norm())
    ):
        return False  # as nearly always: two rows tell
    if not bool(gradient.any()):
        return False
    both = [_scaled(one) for one in (weight.detach(), gradient)]
    return all(float((one - one[:1]).norm()) <= 1e-6 * float(one.norm()) for one in both)


def _scaled(tensor: Tensor) -> Tensor:
    """With a largest entry of 1: the square of 1e-30 is 0 in float32."""
    return tensor / (tensor.abs().max() if bool(tensor.any()) else 1.0)


def _judge_depth(
    known: Mapping[str, Diagnostics], names: Mapping[str, str], inputs: float
) -> list[Finding]:
    # Layers without an activation may be the same for all examples (positions, types of tokens), or
    # give scores or branches of a residual network; the last one's outputs may be small on purpose.
    hidden = {names[name]: one for name, one in list(known.items())[:-1] if one.activation}
    signals = {name: one.signal for name, one in hidden.items() if one.signal is not None}
    if lost := [name for name, signal in signals.items() if signal < LEAST_SIGNAL]:
        least = words.format_percent(min(signals[name] for name in lost), 2)
        return [
            Finding(
                kind="signal lost",
                layers=tuple(lost),
                message=f"After {_name(lost)} all examples look the same: their activations differ by {least} of "
                "their size.",
                way_out=_way_out(inputs, DEEPER),
                excess=LEAST_SIGNAL / max(min(signals.values()), 1e-300),
            )
        ]
    # Not the standard deviation alone: a sigmoid's outputs are near ½ where a gate is open.
    rms = {
        name: math.hypot(one.activation_mean or 0, one.activation_std or 0)
        for name, one in hidden.items()
    }
    sizes = {name: size for name, size in rms.items() if 0 < size < math.inf}
    if not sizes or max(sizes.values()) <= MOST_UNEVEN * min(sizes.values()):
        return []
    small = min(sizes, key=lambda n: sizes[n])
    large = max(sizes, key=lambda n: sizes[n])
    order = list(sizes)
    verb = "grow" if order.index(small) < order.index(large) else "shrink"
    times = words.format_times(sizes[large] / sizes[small])
    return [
        Finding(
            kind=f"activations {verb}",
            layers=(order[-1],),
            message=f"Activations {verb} with depth: those of {words.call_layer(large)} are {times} times those "
            f"of {words.call_layer(small)}.",
            way_out=_way_out(inputs, DEEPER),
            excess=sizes[large] / sizes[small] / MOST_UNEVEN,
        )
    ]


def _judge_softmax(loss_of: LossOf, output: Tensor, batch: Batch) -> list[Finding]:
    """Whether outputs are probabilities already, and the loss applies a softmax to them once more."""
    for dim in {min(1, output.ndim - 1), output.ndim - 1} if output.ndim else ():
        sums = output.sum(dim, keepdim=True)
        if (
            output.shape[dim] < 2
            or bool((output < 0).any())
            or bool(((sums - 1).abs() > 1e-3).any())
        ):
            continue
        # A softmax ignores what is added to all logits of an example.
        shifts = torch.arange(sums.numel()).to(sums).reshape(sums.shape) % 3
        loss, shifted = (
            float(loss_of(logits, batch).detach()) for logits in (output, output + shifts)
        )
        if math.isclose(loss, shifted, rel_tol=1e-4, abs_tol=1e-6):
            message = (
                "The outputs are probabilities (they sum to 1), and the loss applies a softmax itself: two "
                "make gradients small, and the loss cannot come near 0."
            )
            way_out = "Return the logits, without the softmax."
            return [Finding(kind="softmax twice", message=message, way_out=way_out)]
    return []


def _judge_shapes(loss_of: LossOf, output: Tensor, batch: Batch) -> list[Finding]:
    """Whether predictions (N, 1) meet targets (N,), so that a loss compares each with all others."""
    targets = batch.targets
    if not isinstance(targets, Tensor) or not 1 < output.numel() == targets.numel():
        return []
    with (
        warnings.catch_warnings(),
        contextlib.suppress(Exception),
    ):  # most losses refuse such shapes
        warnings.simplefilter("ignore")
        pairs = torch.broadcast_shapes(output.shape, targets.shape)
        if pairs.numel() == output.numel():
            return []
        all_pairs = replace(batch, targets=targets.expand(pairs))
        own_target = replace(batch, targets=targets.reshape(output.shape))
        loss = float(loss_of(output, batch).detach())
        of_pairs = float(loss_of(output.expand(pairs), all_pairs).detach())
        intended = float(loss_of(output, own_target).detach())
        if (
            abs(loss - of_pairs) < 0.01 * abs(loss - intended) > 1e-8 * abs(loss)
        ):  # above the rounding
            shapes = f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(targets.shape)}"
            return [
                Finding(
                    kind="shapes",
                    message=f"The loss compares every output with every target: {shapes}.",
                    way_out="Give the targets the outputs' shape: targets.reshape(outputs.shape).",
                )
            ]
    return []


def _judge_start(loss_of: LossOf, output: Tensor, batch: Batch, inputs: float) -> list[Finding]:
    loss, zero = (
        float(loss_of(given, batch).detach()) for given in (output, torch.zeros_like(output))
    )
    if not _may_start_high(loss_of, output, batch, loss, zero):
        return []
    deviations = deviations_above_constant(loss_of, output, batch, loss)
    if not MOST_DEVIATIONS < deviations < math.inf:
        return []
    smaller = f"Make the last weights smaller: with an output of 0 the loss is {words.format_number(zero)}."
    if deviations_above_constant(loss_of, output, batch, zero) > MOST_DEVIATIONS:
        smaller = "Normalize the targets: an output of 0 is as far from them."
    return [
        Finding(
            kind="loss too large",
            message=f"The initial loss of {words.format_number(loss)} is above that of the best constant output "
            f"by {words.format_times(deviations)} times the standard deviation of that output's losses.",
            way_out=_way_out(inputs, smaller),
            excess=deviations / MOST_DEVIATIONS,
        )
    ]


def _may_start_high(
    loss_of: LossOf, output: Tensor, batch: Batch, loss: float, zero: float
) -> bool:
    """A cheap look: above zero outputs by more than these gain in one step, or all want the same change."""
    with torch.enable_grad():
        start = torch.zeros_like(output, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss_of(start, batch), start, materialize_grads=True)
    if not bool(gradient.any()):
        return loss > zero
    mean = gradient.mean(0)
    if float(mean.norm()) > _FAR_FROM_ZERO * float((gradient - mean).square().mean(0).sum().sqrt()):
        return True
    size = float(gradient.square().mean().sqrt())
    stepped = float(loss_of(-gradient / size, batch).detach())
    return loss > 2 * zero - stepped


def _name(layers: Sequence[str]) -> str:
    return words.join_names([words.call_layer(name) for name in layers])
