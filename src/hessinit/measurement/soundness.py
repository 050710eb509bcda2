"""What keeps a network from training, judged from its initial weights, as `assert_sound` does.

The thresholds were chosen on 57 problems, each trained from up to 17 starts
(benchmarks/soundness.py). For 19 others benchmarks/results/soundness.txt states how many failures
are found, and how many alarms are false.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from hessinit.curvature.evaluation import Evaluation, LossGradient, weights_in
from hessinit.measurement.diagnostics import diagnose
from hessinit.measurement.loss_range import LossOf, deviations_above_constant
from hessinit.present import words
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.checks import find_bad_buffer
from hessinit.problem.functional import FunctionalProblem
from hessinit.results.curvature_report import Diagnostics, Finding, LayerCurvature


@dataclass(frozen=True)
class SoundnessLimits:
    """What an initialization may show (benchmarks/soundness.py)."""

    # How far the initial loss may be above that of the best constant output, in that output's
    # standard deviation over the examples.
    most_deviations: float = 8.0
    # The best constant output is far from zero outputs if these want to move alike for all
    # examples, by this many times as much as they differ in it.
    far_from_zero: float = 2.0
    # The part of a layer's activations, in root mean square, that differs between examples.
    least_signal: float = 0.02
    # The largest root mean square of activations over the smallest.
    most_uneven: float = 110.0
    # Inputs beyond this root mean square are named as a cause.
    large_inputs: float = 30.0
    # The steps after which layers without a gradient are looked at again, relative to the weights.
    step: float = 1e-2


SOUNDNESS = SoundnessLimits()

REDRAW = 'Draw the weights anew: hessinit.apply_scheme_(model, "lsuv", sample=inputs)'
DEEPER = f"{REDRAW}; if they come from a scheme already, add normalization or residual connections."


def judge_signals(
    problem: FunctionalProblem,
    evaluations: Sequence[Evaluation],
    rows: Sequence[LayerCurvature],
    gradient: LossGradient,
    diagnostics: Mapping[str, Diagnostics] | None = None,
) -> dict[str, Any]:
    """The report's findings that depend on no learning rate, and its norm of the gradient.

    Costs a forward, and two gradients where a layer gets none: weights that are zero on purpose, as
    in LoRA, keep it from the layers before them for a step or two. `diagnostics` are those of
    `diagnose`, if known.
    """
    first = evaluations[0]
    gradients = gradient.by_leaf
    if diagnostics is None:
        diagnostics = diagnose(problem, [first], gradients=False)
    parameters = {layer.name: layer.parameter for layer in problem.layers}
    names = {parameters[row.name]: row.name for row in rows}
    signals = {name: diagnostics[name] for name in names}  # in the order in which the layers run
    inputs = _size_of_inputs(problem)
    findings = [*_judge_finite(problem, rows), *_judge_gradients(first, gradients, signals, names)]
    if not any(finding.kind == "no gradient" for finding in findings):
        findings += _judge_depth(signals, names, inputs)
    output = gradient.output.detach()
    findings += _judge_softmax(problem.loss_of, output, first.batch)
    findings += _judge_shapes(problem.loss_of, output, first.batch)
    findings += _judge_start(problem.loss_of, output, first.batch, first.loss_value, inputs)
    norms = [float(vector_norm(part, dtype=torch.float64)) for part in gradients.values()]
    return {"findings": tuple(findings), "gradient_norm": math.hypot(*norms)}


def _size_of_inputs(problem: FunctionalProblem) -> float:
    """The largest root mean square of an input of the first batch."""
    inputs = tensors_in(problem.batches[0].inputs)
    sizes = [
        float(tensor.detach().double().square().mean().sqrt())
        for tensor in inputs
        if tensor.is_floating_point() and tensor.numel()
    ]
    return max(sizes, default=0.0)


def _way_out(inputs: float, otherwise: str) -> str:
    if inputs <= SOUNDNESS.large_inputs:
        return otherwise
    return f"Normalize the inputs, whose root mean square is {words.format_number(inputs)}."


def _judge_finite(problem: FunctionalProblem, rows: Sequence[LayerCurvature]) -> Iterator[Finding]:
    layers = [row.name for row in rows if not math.isfinite(row.norm)]
    if layers:
        yield Finding(
            kind="not finite",
            layers=tuple(layers),
            message=f"‖H‖ of {_name(layers)} is not finite.",
            way_out="Make the loss, the inputs or the weights smaller, or measure with "
            "dtype=torch.float64.",
        )
    # A measurement with the batch's statistics does not see the buffers.
    if buffer := find_bad_buffer(problem.model):
        yield Finding(
            kind="not finite",
            message=f"The buffer {buffer} holds NaN or inf.",
            way_out="Reset it, as reset_running_stats() does.",
        )


def _judge_gradients(
    evaluation: Evaluation,
    gradients: Mapping[str, Tensor],
    signals: Mapping[str, Diagnostics],
    names: Mapping[str, str],
) -> Iterator[Finding]:
    unused = [names[name] for name in gradients if evaluation.moments[name] is None]
    if unused:
        yield Finding(
            kind="no gradient",
            layers=tuple(unused),
            message=f"{_name(unused)} {words.inflect(unused, 'gets', 'get')} no gradient: the "
            f"forward does not use {words.inflect(unused, 'it', 'them')}, or detaches the result.",
            way_out="Use it, freeze it with requires_grad_(False), or leave it out of the layers.",
        )
    used = {name: part for name, part in gradients.items() if evaluation.moments[name] is not None}
    blocked = [names[name] for name in _without_gradient(evaluation, used)]
    if blocked:
        dead = [names[name] for name, layer in signals.items() if layer.dead == 1]
        reason = "weights that are 0, or activations that are constant or saturated, block it"
        if dead:
            reason = f"all units of {_name(dead)} are dead on this batch"
        yield Finding(
            kind="no gradient",
            layers=tuple(blocked),
            message=f"{_name(blocked)} {words.inflect(blocked, 'gets', 'get')} no gradient, and "
            f"none after two steps: {reason}.",
            way_out=f"{REDRAW} also sets the biases to 0.",
        )
    leaves = evaluation.leaves
    kind = "units"
    alike = [name for name, part in gradients.items() if _rows_alike(leaves[name], part)]
    if not alike:
        # Those of an embedding and of gates show in the columns of the layer that reads them.
        kind = "columns"
        matrices = [name for name in list(signals)[1:] if leaves[name].ndim == 2]
        alike = [name for name in matrices if _rows_alike(leaves[name].T, gradients[name].T)]
    if alike:
        layers = [names[name] for name in alike]
        yield Finding(
            kind="identical units",
            layers=tuple(layers),
            message=f"The {kind} of {_name(layers)} have the same weights and gradients: they stay "
            "identical.",
            way_out=f"{REDRAW}.",
        )


def _without_gradient(evaluation: Evaluation, gradients: Mapping[str, Tensor]) -> list[str]:
    """The leaves whose gradient is 0, now and after two small steps of the others."""
    zero = [name for name, gradient in gradients.items() if not bool(gradient.any())]
    weights = weights_in(evaluation.problem, evaluation.problem.dtype)
    for _ in range(2):
        if not zero or len(zero) == len(gradients):
            return zero
        for name, gradient in gradients.items():
            if bool(gradient.any()):
                weight = weights[name].detach()
                direction = _scaled(gradient)
                length = SOUNDNESS.step * (float(weight.norm()) or 1.0)
                weights[name] = weight - length * direction / direction.norm()
        moved = evaluation.at_weights(weights)
        leaves = list(moved.leaves.values())
        new_gradients = torch.autograd.grad(moved.loss, leaves, materialize_grads=True)
        gradients = dict(zip(moved.leaves, new_gradients, strict=True))
        zero = [name for name in zero if not bool(gradients[name].any())]
    return zero


def _rows_alike(weight: Tensor, gradient: Tensor) -> bool:
    """Whether all rows have the same weights and the same gradient, which is not 0."""
    if weight.ndim == 0 or len(weight) < 2:
        return False
    if bool((weight[0] - weight[1]).norm() > 1e-3 * weight[:2].norm()):
        return False  # as nearly always: two rows tell
    if not bool(gradient.any()):
        return False
    pair = [_scaled(weight.detach()), _scaled(gradient)]
    return all(float((rows - rows[:1]).norm()) <= 1e-6 * float(rows.norm()) for rows in pair)


def _scaled(tensor: Tensor) -> Tensor:
    """With a largest entry of 1: the square of 1e-30 is 0 in float32."""
    return tensor / (tensor.abs().max() if bool(tensor.any()) else 1.0)


def _judge_depth(
    signals: Mapping[str, Diagnostics], names: Mapping[str, str], inputs: float
) -> Iterator[Finding]:
    # Layers without an activation may be the same for all examples (positions, types of tokens), or
    # give scores or branches of a residual network; the last one's outputs may be small on purpose.
    hidden = {names[name]: layer for name, layer in list(signals.items())[:-1] if layer.activation}
    shares = {name: layer.signal for name, layer in hidden.items() if layer.signal is not None}
    lost = [name for name, share in shares.items() if share < SOUNDNESS.least_signal]
    if lost:
        least = min(shares.values())
        yield Finding(
            kind="signal lost",
            layers=tuple(lost),
            message=f"After {_name(lost)} all examples look the same: their activations differ by "
            f"{words.format_percent(least, 2)} of their size.",
            way_out=_way_out(inputs, DEEPER),
            excess=SOUNDNESS.least_signal / max(least, 1e-300),
        )
        return
    # Not the standard deviation alone: a sigmoid's outputs are near ½ where a gate is open.
    sizes = {
        name: math.hypot(layer.activation_mean or 0, layer.activation_std or 0)
        for name, layer in hidden.items()
    }
    sizes = {name: size for name, size in sizes.items() if 0 < size < math.inf}
    if not sizes:
        return
    order = list(sizes)
    smallest = min(order, key=sizes.__getitem__)
    largest = max(order, key=sizes.__getitem__)
    ratio = sizes[largest] / sizes[smallest]
    if sizes[largest] > SOUNDNESS.most_uneven * sizes[smallest]:
        verb = "grow" if order.index(smallest) < order.index(largest) else "shrink"
        yield Finding(
            kind=f"activations {verb}",
            layers=(order[-1],),
            message=f"Activations {verb} with depth: those of {words.call_layer(largest)} are "
            f"{words.format_times(ratio)} times those of {words.call_layer(smallest)}.",
            way_out=_way_out(inputs, DEEPER),
            excess=ratio / SOUNDNESS.most_uneven,
        )


def _judge_softmax(loss_of: LossOf, output: Tensor, batch: Batch) -> Iterator[Finding]:
    """Whether outputs are probabilities already, and the loss applies a softmax to them again."""
    if output.ndim == 0:
        return
    for dim in {min(1, output.ndim - 1), output.ndim - 1}:
        sums = output.sum(dim, keepdim=True)
        if output.shape[dim] < 2 or bool((output < 0).any()):
            continue
        if bool(((sums - 1).abs() > 1e-3).any()):
            continue
        # A softmax ignores what is added to all logits of an example.
        shifts = torch.arange(sums.numel()).to(sums).reshape(sums.shape) % 3
        loss = float(loss_of(output, batch).detach())
        shifted = float(loss_of(output + shifts, batch).detach())
        if math.isclose(loss, shifted, rel_tol=1e-4, abs_tol=1e-6):
            yield Finding(
                kind="softmax twice",
                message="The outputs are probabilities (they sum to 1), and the loss applies a "
                "softmax itself: two make gradients small, and the loss cannot come near 0.",
                way_out="Return the logits, without the softmax.",
            )
            return


def _judge_shapes(loss_of: LossOf, output: Tensor, batch: Batch) -> Iterator[Finding]:
    """Whether predictions (N, 1) meet targets (N,), so that the loss compares every pair."""
    if _compares_all_pairs(loss_of, output, batch):
        shapes = (
            f"outputs of shape {tuple(output.shape)} and targets of shape "
            f"{tuple(batch.targets.shape)}"
        )
        yield Finding(
            kind="shapes",
            message=f"The loss compares every output with every target: {shapes}.",
            way_out="Give the targets the outputs' shape: targets.reshape(outputs.shape).",
        )


def _compares_all_pairs(loss_of: LossOf, output: Tensor, batch: Batch) -> bool:
    targets = batch.targets
    if not isinstance(targets, Tensor) or not 1 < output.numel() == targets.numel():
        return False
    # Most losses refuse such shapes.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        pairs = torch.broadcast_shapes(output.shape, targets.shape)
        if pairs.numel() == output.numel():
            return False
        all_pairs = replace(batch, targets=targets.expand(pairs))
        own_target = replace(batch, targets=targets.reshape(output.shape))
        loss = float(loss_of(output, batch).detach())
        of_pairs = float(loss_of(output.expand(pairs), all_pairs).detach())
        intended = float(loss_of(output, own_target).detach())
        tolerance = 0.01 * abs(loss - intended)
        return abs(loss - of_pairs) < tolerance and tolerance > 1e-8 * abs(loss)  # no rounding
    return False


def _judge_start(
    loss_of: LossOf, output: Tensor, batch: Batch, loss: float, inputs: float
) -> Iterator[Finding]:
    with torch.enable_grad():
        start = torch.zeros_like(output, requires_grad=True)
        at_zero = loss_of(start, batch)
        (gradient,) = torch.autograd.grad(at_zero, start, materialize_grads=True)
    zero = float(at_zero.detach())
    if not _may_start_high(loss_of, batch, loss, zero, gradient):
        return
    deviations = deviations_above_constant(loss_of, output, batch, loss)
    if not SOUNDNESS.most_deviations < deviations < math.inf:
        return
    number = words.format_number(zero)
    smaller = f"Make the last weights smaller: with an output of 0 the loss is {number}."
    if deviations_above_constant(loss_of, output, batch, zero) > SOUNDNESS.most_deviations:
        smaller = "Normalize the targets: an output of 0 is as far from them."
    yield Finding(
        kind="loss too large",
        message=f"The initial loss of {words.format_number(loss)} is above that of the best "
        f"constant output by {words.format_times(deviations)} times the standard deviation of that "
        "output's losses.",
        way_out=_way_out(inputs, smaller),
        excess=deviations / SOUNDNESS.most_deviations,
    )


def _may_start_high(
    loss_of: LossOf, batch: Batch, loss: float, zero: float, gradient: Tensor
) -> bool:
    """A cheap look: above zero outputs by more than a step gains, or all want the same change.

    `zero` is the loss of zero outputs, and `gradient` that of the loss there.
    """
    if not bool(gradient.any()):
        return loss > zero
    mean = gradient.mean(0)
    spread = float((gradient - mean).square().mean(0).sum().sqrt())
    if float(mean.norm()) > SOUNDNESS.far_from_zero * spread:
        return True
    size = float(gradient.square().mean().sqrt())
    stepped = float(loss_of(-gradient / size, batch).detach())
    return loss > 2 * zero - stepped


def _name(layers: Sequence[str]) -> str:
    return words.join_names([words.call_layer(name) for name in layers])
