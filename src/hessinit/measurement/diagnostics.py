"""The signals of every layer: activations, gradients, dead and saturated units.

The autograd graph knows where the weights are used, but not the numbers that flow there. Below
autograd, in a dispatch mode, every operation hands over its arguments as the very tensors that
carry the nodes of the graph: so the numbers are found, for modules, functional calls and in-place
operations alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.graph import (
    Consumers,
    Node,
    activation_kind,
    consumers_of,
    keeps_all_numbers,
    leaf_of,
    operation_of,
)
from hessinit.results.curvature_report import Diagnostics

Spot = tuple[Node, int]  # a node and which of its outputs

# An entry is saturated when the activation's slope there is below this share of its largest slope.
SATURATED_BELOW = 0.05

# The slope over its largest value, from the activation's input and output, elementwise.
_RELATIVE_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda before, after: 1 - after.square(),
    "sigmoid": lambda before, after: 4 * after * (1 - after),
    "hardsigmoid": lambda before, after: (after > 0) & (after < 1),
    "erf": lambda before, after: (-before.square()).exp(),
}


def diagnose(
    problem: FunctionalProblem, evaluations: Sequence[Evaluation], *, gradients: bool = True
) -> dict[str, Diagnostics]:
    """The diagnostics of each measured parameter's layer, by the parameter's name.

    Uses of one weight (time steps, tied layers) are pooled. Costs a forward and, for `gradients`, a
    backward pass for each batch, and the memory of one graph and of a copy of every layer's values.
    """
    statistics = {name: _LayerStatistics() for name in problem.leaves}
    for evaluation in evaluations:
        with _SignalRecorder(problem.leaves, evaluation.batch) as recorder:
            output = problem.output(evaluation.batch)
        recorder.inspect(output)
        uses = recorder.layer_values(output)
        for name, values in uses:
            statistics[name].add(values, brief=not gradients)
        if gradients:
            loss = problem.loss_of(output, evaluation.batch) * evaluation.weight
            _add_gradients(statistics, problem.leaves, uses, loss)
    unused = unused_leaves(evaluations)
    return {name: layer.conclude(name in unused) for name, layer in statistics.items()}


def _add_gradients(
    statistics: dict[str, _LayerStatistics],
    leaves: dict[str, Tensor],
    uses: Sequence[tuple[str, LayerValues]],
    loss: Tensor,
) -> None:
    tensors = [*leaves.values(), *(values.after for _, values in uses)]
    inputs: Any = [*leaves.values(), *(values.edge for _, values in uses)]
    gradients = [
        torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for tensor, gradient in zip(
            tensors, torch.autograd.grad(loss, inputs, allow_unused=True), strict=True
        )
    ]
    for name, gradient in zip(leaves, gradients[: len(leaves)], strict=True):
        statistics[name].add_gradient_of_weight(gradient)
    for (name, _), gradient in zip(uses, gradients[len(leaves) :], strict=True):
        statistics[name].gradient.add(gradient)


class _LayerStatistics:
    """One layer's numbers so far."""

    def __init__(self) -> None:
        self._before = Moments()
        self._after = Moments()
        self.gradient = Moments()
        self._names: dict[str, None] = {}
        self._alive: dict[int, Tensor] = {}
        self._saturated = 0
        self._saturable = 0
        # between examples, and in all
        self._differing = 0.0
        self._squares = 0.0
        self._weight_gradient: Tensor | None = None

    def add_gradient_of_weight(self, part: Tensor) -> None:
        if self._weight_gradient is not None:
            part = self._weight_gradient + part
        self._weight_gradient = part

    def add(self, values: LayerValues, *, brief: bool = False) -> None:
        """Take a use into account; briefly: without what saturates, and less exactly."""
        after = values.after
        brief = brief and after.dtype in (torch.float32, torch.float64) and after.numel() > 0
        if brief:
            square = self._after.add_roughly(after)
        else:
            square = self._after.add(after)
            self._before.add(values.output)
        self._names[_activation_name(values.activation)] = None
        if after.ndim and len(after) > 1:
            if brief:
                self._differing += _square(after - after.mean(0))
            else:
                by_example = torch.var(after, dim=0, correction=0)
                self._differing += len(after) * float(by_example.sum(dtype=torch.float64))
            self._squares += square
        alive = _living_units(values)
        if alive is not None:
            # As many units as in another use are the same units: of a cell at its next step, say.
            count = len(alive)
            self._alive[count] = alive | self._alive.get(count, alive)
        saturated = None if brief else _saturated_entries(values)
        if saturated is not None:
            self._saturated += int(saturated.sum())
            self._saturable += saturated.numel()

    def conclude(self, unused: bool) -> Diagnostics:
        if unused:
            return Diagnostics(reason="the forward does not use it")
        norm = None
        if self._weight_gradient is not None:
            norm = float(torch.linalg.vector_norm(self._weight_gradient, dtype=torch.float64))
        if not self._after.count:
            reason = "it never meets a tensor of the batch"
            return Diagnostics(weight_gradient_norm=norm, reason=reason)
        units = sum(len(alive) for alive in self._alive.values())
        dead = units - sum(int(alive.sum()) for alive in self._alive.values())
        activation = ""
        if any(self._names):
            activation = ", ".join(name or "none" for name in self._names)
        return Diagnostics(
            activation=activation,
            activation_mean=self._after.mean,
            activation_std=self._after.std,
            preactivation_std=self._before.std if self._before.count else None,
            signal=math.sqrt(self._differing / self._squares) if self._squares else None,
            gradient_mean=self.gradient.mean if self.gradient.count else None,
            gradient_std=self.gradient.std if self.gradient.count else None,
            weight_gradient_norm=norm,
            dead=dead / units if units else None,
            saturated=self._saturated / self._saturable if self._saturable else None,
        )


def _square(values: Tensor) -> float:
    """The sum of the squares; in float64 where needed, for that of 1e-25 is 0 in float32."""
    norm = float(torch.linalg.vector_norm(values))
    if not 1e-15 < norm < 1e15:
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm**2


class Moments:
    """The mean and the standard deviation of all numbers added so far."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, values: Tensor) -> float:
        """Takes the numbers into account, and returns the sum of their squares."""
        if values.numel() == 0:
            return 0.0
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        variance, mean = map(float, torch.var_mean(values, correction=0))
        self._join(values.numel(), mean, variance)
        return values.numel() * (variance + mean * mean)

    def add_roughly(self, values: Tensor) -> float:
        """As `add`, several times as fast; a standard deviation far below the mean is inexact."""
        count = values.numel()
        square = _square(values)
        mean = float(values.mean())
        self._join(count, mean, max(0.0, square / count - mean * mean))
        return square

    def _join(self, count: int, mean: float, variance: float) -> None:
        step = mean - self.mean
        total = self.count + count
        self._squares += count * variance + step * step * self.count * count / total
        self.mean += step * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Of the numbers themselves (divided by their count)."""
        return math.sqrt(self._squares / self.count)


def _activation_name(node: Node | None) -> str:
    if node is None:
        return ""
    name = activation_kind(node) or ""
    if name == "hardtanh" and (node._saved_min_val, node._saved_max_val) == (0, 6):
        return "relu6"
    if name == "elu" and math.isclose(node._saved_scale, 1.0507009873554805, rel_tol=1e-6):
        return "selu"
    return name


def _saturated_entries(values: LayerValues) -> Tensor | None:
    """Which entries are saturated; None for an activation without bounds.

    At the low end of one that starts at 0 (as relu6 does) an entry is 0, not saturated.
    """
    node = values.activation
    name = _activation_name(values.activation)
    after = values.after
    if name in _RELATIVE_SLOPES:
        return _RELATIVE_SLOPES[name](values.entry, after) < SATURATED_BELOW
    if node is None or name not in ("hardtanh", "relu6"):
        return None
    # The bounds as the activation itself rounds them.
    low = torch.tensor(node._saved_min_val, dtype=after.dtype)
    high = torch.tensor(node._saved_max_val, dtype=after.dtype)
    return after >= high if low == 0 else (after <= low) | (after >= high)


def _living_units(values: LayerValues) -> Tensor | None:
    """For each unit, whether it is not 0 for some example and position; None if none can die.

    A unit is a channel of a convolution, a feature of anything else.
    """
    node = values.activation
    entry = values.entry
    if node is None or entry.ndim == 0:
        return None
    name = _activation_name(node)
    if name == "relu" or (name in ("hardtanh", "relu6") and node._saved_min_val == 0):
        alive = entry > 0
    elif name == "threshold" and not bool(values.after[entry <= node._saved_threshold].any()):
        alive = entry > node._saved_threshold
    else:
        return None
    # Judged before the activation, where the weight's output still has its own order of dimensions.
    units = 1 if values.is_convolution and entry.ndim > 1 else entry.ndim - 1
    return alive.movedim(units, -1).reshape(-1, entry.shape[units]).any(dim=0)


@dataclass(frozen=True)
class LayerValues:
    """One use of a weight: its output with its bias, and after the activation, if one follows.

    A normalization between the two is looked through. `entry` is the activation's input: `output`,
    or the result of the normalization. Without an activation `after` is `output`; `edge` is its
    place in the graph.
    """

    output: Tensor
    entry: Tensor
    after: Tensor
    edge: GradientEdge
    activation: Node | None
    is_convolution: bool


class _SignalRecorder(TorchDispatchMode):
    """Sees every operation of a forward, and whether its tensors depend on data or weights alone.

    A tensor is looked at when it becomes the argument of a later operation: by then it carries its
    node. A weight that is transformed first (normalized, split, rearranged) is followed to where it
    meets the data.
    """

    def __init__(self, leaves: dict[str, Tensor], batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        # What depends on the data: whether as a sum with a bias.
        self._data = WeakTensorKeyDictionary()
        self._examples = batch.size
        for tensor in tensors_in(batch.inputs):
            self._data[tensor] = False
        self._seen: set[Spot] = set()
        self._carriers: dict[Spot, set[str]] = {}  # weights on their way to the data
        # Outputs of weights, rearranged or biased at most, and what follows them: an activation at
        # the end.
        self._open: set[Spot] = set()
        self._followers: set[Spot] = set()
        self._values: dict[Spot, Tensor] = {}
        self._uses: dict[str, list[Spot]] = {name: [] for name in leaves}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        arguments = list(tensors_in([args, named]))
        for tensor in arguments:
            self.inspect(tensor)
        fixed = [tensor for tensor in arguments if tensor not in self._data]
        result = func(*args, **named)
        if arguments and len(fixed) == len(arguments):
            return result
        results = list(tensors_in(result))
        if not arguments:
            results = [tensor for tensor in results if self._is_made_for_batch(tensor)]
        elif func._schema.is_mutable:  # it may have written into a view
            results += [tensor._base for tensor in results if tensor._base is not None]
        # Two summands that depend on the data make a residual connection; a matrix is a layer of
        # its own. At most one dimension of a bias is longer than 1.
        vectors = all(sum(length > 1 for length in tensor.shape) <= 1 for tensor in fixed)
        biased = len(fixed) == len(arguments) - 1 and vectors
        for tensor in results:
            if id(tensor) not in self._names:  # an embedding with max_norm writes into its weight
                self._data[tensor] = biased
        return result

    def _is_made_for_batch(self, tensor: Tensor) -> bool:
        """As the positions of its words are, or its first hidden state."""
        return not tensor.is_floating_point() or self._examples in tensor.shape

    def inspect(self, tensor: Tensor) -> None:
        """Keep this tensor's value if it lies between a weight and the end of its activation."""
        node = _node(tensor)
        if node is None or (node, tensor.output_nr) in self._seen:
            return
        spot = (node, tensor.output_nr)
        self._seen.add(spot)
        carried = self._carried_by(node)
        if carried and tensor.layout is torch.strided:
            if tensor not in self._data:
                self._carriers[spot] = carried
                return
            for name in carried:
                self._uses[name].append(spot)
            self._open.add(spot)
            self._values[spot] = tensor.detach().clone()  # it may be overwritten later
        if any(source in self._open for source in node.next_functions):
            passed = keeps_all_numbers(node) or operation_of(node).role == "norm"
            passed = passed or (_is_addition(node) and self._data.get(tensor, False))
            if passed:
                self._open.add(spot)
            if passed or activation_kind(node) is not None:
                self._followers.add(spot)
                self._values[spot] = tensor.detach().clone()

    def _carried_by(self, node: Node) -> set[str]:
        """The weights that reach this node without having met the data."""
        carried: set[str] = set()
        for source in node.next_functions:
            name = self._names.get(id(leaf_of(source[0])))
            carried |= {name} if name else self._carriers.get(source, set())
        return carried

    def layer_values(self, output: Tensor) -> list[tuple[str, LayerValues]]:
        """The values of all uses that the output depends on, by leaf, in execution order."""
        consumers = consumers_of(output)
        return [
            (name, self._values_of(spot, consumers))
            for name, spots in self._uses.items()
            for spot in sorted(spots, key=lambda spot: spot[0]._sequence_nr())
            if spot[0] in consumers
        ]

    def _values_of(self, spot: Spot, consumers: Consumers) -> LayerValues:
        """From a use, past its bias or a normalization, to its activation, if nothing branches."""
        output = spot
        latest = spot
        activation = None
        normalized = None
        while len(consumers[latest[0]]) == 1:
            previous = latest[0]
            latest = (consumers[previous][0], 0)
            if latest not in self._followers:
                break
            if activation_kind(latest[0]) is not None:
                # PReLU's slope, say, is not what it acts on.
                if latest[0].next_functions[0][0] is previous:
                    activation = latest[0]
                break
            if operation_of(latest[0]).role == "norm":
                normalized = latest
            if _is_addition(latest[0]) and normalized is None:
                output = latest
        after = output if activation is None else (activation, 0)
        return LayerValues(
            output=self._values[output],
            entry=self._values[normalized or output],
            after=self._values[after],
            edge=GradientEdge(*after),
            activation=activation,
            is_convolution=type(spot[0]).__name__ == "ConvolutionBackward0",
        )


def _is_addition(node: Node) -> bool:
    return type(node).__name__ == "AddBackward0"


def _node(tensor: Tensor) -> Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was overwritten through another one: torch forbids its use
        return None
