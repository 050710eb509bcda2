"""From one evaluated batch to the Gram operators of its layers, by a few shared backward passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.engines.collect import Collector, collector_for
from hessinit.engines.gram import LayerGram, by_example
from hessinit.engines.output_root import OutputRoot
from hessinit.engines.plan import Planned, backward, known_calls, plan_calls
from hessinit.operators.evaluation import Evaluation
from hessinit.problem.first_look import agree
from hessinit.problem.graph import find_uses

# Signals are gathered from so many examples at a time that they take about this many bytes, or more where the
# layers' own outputs do.
_BYTES_AT_ONCE = 2**25


def trace_grams(evaluation: Evaluation, root: OutputRoot, *, split: bool = True) -> dict[str, LayerGram]:
    """The Gram operators of all leaves whose every use is a known linear call.

    Costs a backward pass per column of the root. The passes stop at the layers' outputs: no weight gradient
    is formed. With `split`, large batches go through in pieces.
    """
    problem, size = evaluation.problem, evaluation.output.shape[0]
    plan = plan_calls(evaluation.output, evaluation.uses, problem.leaves, problem.seed)
    if not plan:
        return {}
    names = [one.name for one in plan]
    collectors = [
        collector_for(one.call, one.time_first, size, root.columns, names.count(one.name)) for one in plan
    ]
    step = _examples_at_once(plan, root, size)
    if split and step < size and _may_split(evaluation, plan):
        outlines = [_Outline.of(one, size) for one in plan]
        # The graph of the whole batch must not stand beside those of the pieces: nothing may hold on to it.
        del plan
        if not _gather_pieces(evaluation, root, step, outlines, collectors):
            return trace_grams(evaluation, root, split=False)
    else:
        _gather(evaluation.output, plan, root.columns, slice(0, size), collectors)
    grams: dict[str, list[Collector]] = {}
    for name, collector in zip(names, collectors, strict=True):
        grams.setdefault(name, []).append(collector)
    scale, leaves = root.scale * evaluation.weight, problem.leaves
    return {name: found[0].gram(found, tuple(leaves[name].shape), scale) for name, found in grams.items()}


def _may_split(evaluation: Evaluation, plan: Sequence[Planned]) -> bool:
    """Rows must be by example, and a frozen random draw belongs to an example's place in the batch."""
    in_order = not any(one.time_first for one in plan)
    counted = evaluation.output.shape[0] == evaluation.batch.size
    return in_order and counted and evaluation.problem.dropout != "freeze"


def _examples_at_once(plan: Sequence[Planned], root: OutputRoot, size: int) -> int:
    """As many examples as keep the signals on their way within twice what the layers' outputs take."""
    outputs = root.columns.element_size() * sum(
        int(torch.Size(one.call.output_shape).numel()) for one in plan
    )
    room = max(_BYTES_AT_ONCE, outputs)
    device = root.columns.device
    if device.type == "cuda":  # small pieces starve a GPU, and it has the room
        room = max(room, torch.cuda.get_device_properties(device).total_memory // 16)
    needed = outputs * root.columns.shape[0]
    return size if needed <= 2 * room else max(1, size * room // needed)


@dataclass(frozen=True)
class _Outline:
    """What a call on some of the examples has in common with the call on all of them; holds no graph."""

    name: str
    kind: type
    shape: tuple[int, ...]
    lengths: Tensor

    @classmethod
    def of(cls, one: Planned, size: int) -> _Outline:
        rows, *others = one.call.output_shape
        # The length of each example's input. Outputs alone do not tell: a head of zeros gives the same ones
        # whatever BatchNorm made of its input.
        inputs = one.call.inputs if one.call.inputs.is_floating_point() else one.call.inputs.double()
        lengths = torch.linalg.vector_norm(inputs.reshape(size, -1), dim=1)
        return cls(one.name, type(one.call), (rows // size, *others), lengths)

    def fits(self, whole: _Outline, part: slice, rounding: float) -> bool:
        same = (self.name, self.kind, self.shape) == (whole.name, whole.kind, whole.shape)
        expected = whole.lengths[part]
        return same and bool((self.lengths - expected).abs().max() <= rounding * expected.max())


def _gather_pieces(
    evaluation: Evaluation,
    root: OutputRoot,
    step: int,
    outlines: Sequence[_Outline],
    collectors: Sequence[Collector],
) -> bool:
    """A few examples at a time; False when the model does not do with them what it did with all."""
    whole = evaluation.output.detach()
    evaluation.forget()
    # A function for each piece: its graph goes before the next one comes.
    return all(
        _gather_piece(
            evaluation, whole, root, slice(first, min(first + step, len(whole))), outlines, collectors
        )
        for first in range(0, len(whole), step)
    )


def _gather_piece(
    evaluation: Evaluation,
    whole: Tensor,
    root: OutputRoot,
    part: slice,
    outlines: Sequence[_Outline],
    collectors: Sequence[Collector],
) -> bool:
    problem, size, names = evaluation.problem, part.stop - part.start, {one.name for one in outlines}
    try:
        output = problem.output(evaluation.batch.take(torch.arange(part.start, part.stop)))
    except Exception:
        return False  # the model needs the whole batch
    if output.shape != whole[part].shape or not agree(output, whole[part]):
        return False
    calls = known_calls(find_uses(output, problem.leaves), problem.leaves, size)
    plan = [Planned(one.name, one.call, one.edge) for one in calls if one.name in names]
    rounding = float(torch.finfo(whole.dtype).eps) ** 0.6  # as in `agree`
    if len(plan) != len(outlines) or not all(
        _Outline.of(one, size).fits(outline, part, rounding)
        for one, outline in zip(plan, outlines, strict=True)
    ):
        return False
    _gather(output, plan, root.columns[:, part], part, collectors)
    return True


def _gather(
    output: Tensor, plan: Sequence[Planned], columns: Tensor, part: slice, collectors: Sequence[Collector]
) -> None:
    """Send every column back to the calls of the plan."""
    size = output.shape[0]
    for one, collector in zip(plan, collectors, strict=True):
        collector.start(one.call, part)
    batched = _backward_all(output, plan, columns)
    for index, column in enumerate(columns):
        found = [arrived[index] for arrived in batched] if batched else backward(output, plan, column)
        for one, collector, gradient in zip(plan, collectors, found, strict=True):
            collector.add(index, gradient, by_example(gradient, size, one.time_first))
    for collector in collectors:
        collector.finish()


def _backward_all(output: Tensor, plan: Sequence[Planned], columns: Tensor) -> tuple[Tensor, ...] | None:
    """All columns in one batched pass: faster for dense networks, slower for others.

    None where it is not, or where torch cannot batch it.
    """
    edges = [one.edge for one in plan]
    if not all(type(edge.node).__name__ in ("AddmmBackward0", "MmBackward0") for edge in edges):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a missing batching rule is only a warning, and slow
            return torch.autograd.grad(output, edges, columns, retain_graph=True, is_grads_batched=True)
    except (RuntimeError, UserWarning):
        return None
