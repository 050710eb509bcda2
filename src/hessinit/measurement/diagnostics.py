"""Signal-propagation diagnostics of every layer: activations, gradients, dead and saturated units.

The autograd graph knows where the weights are used, but not the numbers that flow there. Below autograd,
in a dispatch mode, every operation hands over its arguments as the very tensors that carry the nodes of the
graph: so the numbers are found, for modules, functional calls and in-place operations alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.curvature.layer_uses import Node
from hessinit.measurement.jacobians import REARRANGING, Consumers, activation_kind
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import Diagnostics

Spot = tuple[Node, int]  # a node and which of its outputs

NORMALIZING = {
    "CudnnBatchNormBackward0", "MiopenBatchNormBackward0", "NativeBatchNormBackward0",
    "NativeGroupNormBackward0", "NativeLayerNormBackward0",
}  # fmt: skip

# An entry is saturated when the activation's slope there is below this share of its largest slope.
SATURATED_BELOW = 0.05

# The slope over its largest value, of the activation's input and output (in any order of entries).
_RELATIVE_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda value, after: 1 - after.square(),
    "sigmoid": lambda value, after: 4 * after * (1 - after),
    "hardsigmoid": lambda value, after: (after > 0) & (after < 1),
    "erf": lambda value, after: (-value.square()).exp(),
}


def diagnose(problem: Problem, evaluations: list[Evaluation]) -> dict[str, Diagnostics]:
    """The diagnostics of each measured parameter's layer, by the parameter's name.

    Gradients are those of the loss over all batches, so two halves give the same as the whole. Uses of one
    weight (time steps, tied layers) are pooled. Costs a forward and a backward pass for each batch, and the
    memory of one graph. Runs inside `problem.settings()`.
    """
    gathered = {name: _Gathered() for name in problem.leaves}
    for evaluation in evaluations:
        output, layers = record_layer_values(problem, evaluation.batch)
        loss = problem.loss_of(output, evaluation.batch) * evaluation.weight
        uses = [(name, one) for name, found in layers.items() for one in found]
        tensors = [*problem.leaves.values(), *(one.after.value for _, one in uses)]
        inputs: Any = [*problem.leaves.values(), *(one.after.gradient_edge for _, one in uses)]
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = iter(
            torch.zeros_like(tensor) if gradient is None else gradient.detach()
            for tensor, gradient in zip(tensors, found, strict=True)
        )
        for name in problem.leaves:
            gathered[name].add_weight_gradient(next(gradients))
        for name, values in uses:
            gathered[name].add(values, next(gradients))
    unused = unused_leaves(evaluations)
    return {name: one.conclude(name in unused) for name, one in gathered.items()}


class _Gathered:
    """One layer's numbers so far."""

    def __init__(self) -> None:
        self._own, self._after, self._gradient = Moments(), Moments(), Moments()
        self._names: dict[str, None] = {}
        self._alive: dict[int, Tensor] = {}
        self._saturated, self._saturable = 0, 0
        self._weight_gradient: Tensor | None = None

    def add(self, values: LayerValues, gradient: Tensor) -> None:
        self._own.add(values.own.value)
        self._after.add(values.after.value)
        self._gradient.add(gradient)
        self._names[_activation_name(values.activation)] = None
        alive = _living_units(values)
        if alive is not None:
            # As many units as in another use are the same units: those of a cell at its next step, say.
            known = self._alive.get(len(alive))
            self._alive[len(alive)] = alive if known is None else alive | known
        saturated = _count_saturated(values)
        if saturated is not None:
            self._saturated += saturated[0]
            self._saturable += saturated[1]

    def add_weight_gradient(self, gradient: Tensor) -> None:
        known = self._weight_gradient
        self._weight_gradient = gradient if known is None else known + gradient

    def conclude(self, unused: bool) -> Diagnostics:
        if unused or self._weight_gradient is None:
            return Diagnostics(reason="the forward does not use it")
        norm = float(torch.linalg.vector_norm(self._weight_gradient, dtype=torch.float64))
        if not self._after.count:
            return Diagnostics(weight_gradient_norm=norm, reason="it never meets the batch")
        units = sum(len(alive) for alive in self._alive.values())
        dead = units - sum(int(alive.sum()) for alive in self._alive.values())
        return Diagnostics(
            activation=", ".join(name or "none" for name in self._names) if any(self._names) else "",
            activation_mean=self._after.mean,
            activation_std=self._after.std,
            preactivation_std=self._own.std,
            gradient_mean=self._gradient.mean,
            gradient_std=self._gradient.std,
            weight_gradient_norm=norm,
            dead=dead / units if units else None,
            saturated=self._saturated / self._saturable if self._saturable else None,
        )


class Moments:
    """The mean and the standard deviation of all numbers added so far.

    >>> moments = Moments()
    >>> moments.add(torch.tensor([1.0, 2.0]))
    >>> moments.add(torch.tensor([6.0]))
    >>> moments.mean, round(moments.std, 6)  # of 1, 2, 6: the square root of 14/3
    (3.0, 2.160247)
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, values: Tensor) -> None:
        if values.numel() == 0:
            return
        values = values.double()
        count, mean = values.numel(), float(values.mean())
        step = mean - self._mean
        total = self.count + count
        self._squares += float((values - mean).square().sum()) + step * step * self.count * count / total
        self._mean += step * count / total
        self.count = total

    @property
    def mean(self) -> float | None:
        """None without numbers."""
        return self._mean if self.count else None

    @property
    def std(self) -> float | None:
        """Of the numbers themselves (divided by their count); None without numbers."""
        return math.sqrt(self._squares / self.count) if self.count else None


def _activation_name(node: Node | None) -> str:
    if node is None:
        return ""
    name = activation_kind(node) or ""
    if name == "hardtanh" and (node._saved_min_val, node._saved_max_val) == (0, 6):
        return "relu6"
    if name == "elu" and math.isclose(node._saved_scale, 1.0507009873554805, rel_tol=1e-6):
        return "selu"
    return name


def _count_saturated(values: LayerValues) -> tuple[int, int] | None:
    """How many entries are saturated, of how many; None for an activation without bounds.

    At the low end of one that starts at 0 (as relu6 does) an entry is 0, not saturated.
    """
    node: Any = values.activation
    name = _activation_name(node)
    after = values.after.value
    if name in ("hardtanh", "relu6"):
        # The bounds as the activation itself rounds them.
        low, high = (
            torch.tensor(bound, dtype=after.dtype) for bound in (node._saved_min_val, node._saved_max_val)
        )
        saturated = after >= high if low == 0 else (after <= low) | (after >= high)
    elif name in _RELATIVE_SLOPES:
        saturated = _RELATIVE_SLOPES[name](values.entry.value, after) < SATURATED_BELOW
    else:
        return None
    return int(saturated.sum()), saturated.numel()


def _living_units(values: LayerValues) -> Tensor | None:
    """For each unit, whether it is not 0 for some example and position; None where units cannot die.

    A unit is a channel of a convolution, a feature of anything else.
    """
    node = values.activation
    entry = values.entry.value
    if node is None or entry.ndim == 0:
        return None
    name = _activation_name(node)
    if name == "relu" or (name in ("hardtanh", "relu6") and node._saved_min_val == 0):
        alive = entry > 0
    elif name == "threshold" and not bool(values.after.value[entry <= node._saved_threshold].any()):
        alive = entry > node._saved_threshold
    else:
        return None
    # Judged before the activation, where the weight's own output still has its own order of dimensions.
    is_convolution = type(values.node).__name__ == "ConvolutionBackward0"
    units = 1 if is_convolution and entry.ndim > 1 else entry.ndim - 1
    return alive.movedim(units, -1).reshape(-1, entry.shape[units]).any(dim=0)


# --- The values at every layer in one forward -------------------------------------------------------------


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the forward: where it is in the graph, and its value."""

    node: Node
    number: int
    value: Tensor

    @property
    def gradient_edge(self) -> GradientEdge:
        """What `torch.autograd.grad` takes in place of the tensor."""
        return GradientEdge(self.node, self.number)


@dataclass(frozen=True)
class LayerValues:
    """One use of a weight: its output with its bias, and the same after the activation, if one follows.

    A normalization between the two is looked through. `entry` is the activation's input: `own`, or the result
    of the normalization. Without an activation `after` is `own`. `node` is where the weight meets the data.
    """

    node: Node
    own: GraphTensor
    entry: GraphTensor
    after: GraphTensor
    activation: Node | None


def record_layer_values(problem: Problem, batch: Batch) -> tuple[Tensor, dict[str, list[LayerValues]]]:
    """The output of one more forward, with its graph, and the values of each leaf's uses in execution order.

    A weight that is transformed first (normalized, split, rearranged) is followed to where it meets the data.
    """
    recorder = _Recorder(problem.leaves, batch)
    with recorder:
        output = problem.output(batch)
    recorder.inspect(output)
    consumers = Consumers(output)
    reached = {output.grad_fn, *consumers.of}
    layers: dict[str, list[LayerValues]] = {}
    for name in problem.leaves:
        # Data that came as no tensor (a graph object, say) leave no trace: then the first use has to do.
        found = [spot for spot in recorder.uses[name] if spot[0] in reached]
        found = found or [spot for spot in recorder.first_uses[name] if spot[0] in reached]
        found.sort(key=lambda spot: spot[0]._sequence_nr())
        layers[name] = [recorder.values_of(spot, consumers) for spot in found]
    return output, layers


class _Recorder(TorchDispatchMode):
    """Sees every operation of a forward; knows which tensors depend on the data and which on weights alone.

    A tensor is looked at when it becomes the argument of a later operation: by then it carries its node.
    """

    def __init__(self, leaves: dict[str, Tensor], batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._depends_on_data = WeakTensorKeyDictionary()
        self._biased = WeakTensorKeyDictionary()
        self._examples = batch.size
        for tensor in tensors_in(batch.inputs):
            self._depends_on_data[tensor] = True
        self._seen: set[Spot] = set()
        # Weights on their way to the data: the leaves they come from, and whether only rearranged so far.
        self._carriers: dict[Spot, tuple[set[str], bool]] = {}
        # Outputs of weights, rearranged or biased at most, and what follows them: an activation at the end.
        self._open: set[Spot] = set()
        self._followers: set[Spot] = set()
        self._values: dict[Spot, Tensor] = {}
        self.uses: dict[str, list[Spot]] = {name: [] for name in leaves}
        self.first_uses: dict[str, list[Spot]] = {name: [] for name in leaves}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(tensors_in([args, kwargs]))
        for tensor in arguments:
            self.inspect(tensor)
        data = [tensor for tensor in arguments if self._depends_on_data.get(tensor, False)]
        written = list(_written(func, args, kwargs))
        self._save_from_overwriting(written)
        result = func(*args, **kwargs)
        for tensor in () if arguments else tensors_in(result):
            # Made for the batch: the positions of its words, its first hidden state.
            if not tensor.is_floating_point() or self._examples in tensor.shape:
                self._mark(tensor)
        if data:
            others = [tensor for tensor in arguments if not self._depends_on_data.get(tensor, False)]
            # Two summands that depend on the data make a residual connection; a matrix is a layer of its own.
            biased = len(data) == 1 and all(_is_vector(tensor) for tensor in others)
            for tensor in tensors_in(result):
                self._mark(tensor)
                self._biased[tensor] = biased
            for tensor in written:
                self._mark(tensor)
                if tensor._base is not None:
                    self._mark(tensor._base)
        return result

    def _mark(self, tensor: Tensor) -> None:
        if id(tensor) not in self._names:  # an embedding with max_norm rescales the rows that the data name
            self._depends_on_data[tensor] = True

    def inspect(self, tensor: Tensor) -> None:
        """Keep this tensor's value if it lies between a weight and the end of its activation."""
        node = _node(tensor)
        if node is None or (node, tensor.output_nr) in self._seen:
            return
        spot = (node, tensor.output_nr)
        self._seen.add(spot)
        kind = type(node).__name__
        self._find_weights(spot, kind, tensor)
        if not any(source in self._open for source in node.next_functions):
            return
        biased = kind == "AddBackward0" and self._biased.get(tensor, False)
        passed = biased or kind in REARRANGING or kind in NORMALIZING
        if passed:
            self._open.add(spot)
        if passed or activation_kind(node) is not None:
            self._followers.add(spot)
            self._values[spot] = tensor.detach()

    def _find_weights(self, spot: Spot, kind: str, tensor: Tensor) -> None:
        carried: set[str] = set()
        untouched: set[str] = set()
        for source, number in spot[0].next_functions:
            name = self._names.get(id(getattr(source, "variable", None)))
            names, plain = ({name}, True) if name else self._carriers.get((source, number), (set(), False))
            carried |= names
            untouched |= names if plain else set()
        if not carried or tensor.layout is not torch.strided:
            return
        used, uses = carried, self.uses
        if not self._depends_on_data.get(tensor, False):
            rearranged = kind in REARRANGING and untouched == carried
            self._carriers[spot] = (carried, rearranged)
            used, uses = set() if rearranged else untouched, self.first_uses
        for name in used:
            uses[name].append(spot)
        if used:
            self._open.add(spot)
            self._values[spot] = tensor.detach()

    def _save_from_overwriting(self, written: list[Tensor]) -> None:
        stores = {_store(tensor) for tensor in written} - {0}
        for spot, value in self._values.items() if stores else ():
            if _store(value) in stores:
                self._values[spot] = value.clone()

    def values_of(self, spot: Spot, consumers: Consumers) -> LayerValues:
        """From a use through its bias, or a normalization, to its activation, if it is the only way on."""
        own, at, activation, normalized = spot, spot, None, None
        while True:
            found = consumers.of.get(at[0], [])
            if len(found) != 1 or (found[0], 0) not in self._followers:
                break
            came, at = at, (found[0], 0)
            kind = type(at[0]).__name__
            if activation_kind(at[0]) is not None:
                # PReLU's slope, say, is not what it acts on.
                activation = at[0] if at[0].next_functions[0][0] is came[0] else None
                break
            if kind in NORMALIZING:
                normalized = at
            if kind == "AddBackward0" and normalized is None:
                own = at
        after = own if activation is None else (activation, 0)
        entry = normalized or own
        return LayerValues(spot[0], self._tensor(own), self._tensor(entry), self._tensor(after), activation)

    def _tensor(self, spot: Spot) -> GraphTensor:
        return GraphTensor(*spot, self._values[spot])


def _node(tensor: Tensor) -> Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was overwritten through another one: torch forbids its use
        return None


def _is_vector(tensor: Tensor) -> bool:
    """At most one dimension is longer than 1, as a bias's is."""
    return sum(length > 1 for length in tensor.shape) <= 1


def _store(tensor: Tensor) -> int:
    """Where the numbers lie; 0 for what has no such place (sparse tensors)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)
