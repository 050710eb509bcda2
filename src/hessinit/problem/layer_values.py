"""What each layer gives on in one forward, before and after its activation.

The autograd graph knows where the weights are used, but not the numbers that flow there. Below autograd,
in a dispatch mode, every operation hands over its arguments as the very tensors that carry the nodes of the
graph: so the numbers are found, for modules, functional calls and in-place operations alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hessinit.curvature.layer_uses import Node
from hessinit.problem.activations import NORMALIZING, REARRANGING, Consumers, activation_kind
from hessinit.problem.batches import Batch, tensors_in
from hessinit.problem.problem import Problem

Spot = tuple[Node, int]  # a node and which of its outputs


@dataclass(frozen=True)
class Place:
    """A tensor of the forward: where it is in the graph, and its value."""

    node: Node
    number: int
    value: Tensor

    @property
    def edge(self) -> GradientEdge:
        """What `torch.autograd.grad` takes in place of the tensor."""
        return GradientEdge(self.node, self.number)


@dataclass(frozen=True)
class Passage:
    """One use of a weight: its output with its bias, and the same after the activation, if one follows.

    A normalization between the two is looked through.

    `entry` is what the activation gets: `own`, or what the normalization gives. Without an activation `after`
    is `own`. `node` is where the weight meets the data.
    """

    node: Node
    own: Place
    entry: Place
    after: Place
    activation: Node | None


@dataclass(frozen=True)
class Recorded:
    """The output of a forward, with its graph, and the passages of each leaf in the order they ran."""

    output: Tensor
    passages: dict[str, list[Passage]]


def record(problem: Problem, batch: Batch) -> Recorded:
    """Run the forward once more and keep what the layers give on; everything else is let go at once.

    A weight that is transformed first (normalized, split, rearranged) is followed to where it meets the data.
    """
    recorder = _Recorder(problem.leaves, batch)
    with recorder:
        output = problem.output(batch)
    recorder.look_at(output)
    consumers = Consumers(output)
    reached = {output.grad_fn, *consumers.of}
    passages: dict[str, list[Passage]] = {}
    for name in problem.leaves:
        # Data that came as no tensor (a graph object, say) leave no trace: then the first use has to do.
        found = [spot for spot in recorder.uses[name] if spot[0] in reached]
        found = found or [spot for spot in recorder.first_uses[name] if spot[0] in reached]
        found.sort(key=lambda spot: spot[0]._sequence_nr())
        passages[name] = [recorder.passage(spot, consumers) for spot in found]
    return Recorded(output, passages)


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
            self.look_at(tensor)
        data = [tensor for tensor in arguments if self._depends_on_data.get(tensor, False)]
        written = list(_written(func, args, kwargs))
        self._save_from_overwriting(written)
        result = func(*args, **kwargs)
        if not arguments:
            for tensor in tensors_in(result):
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

    def look_at(self, tensor: Tensor) -> None:
        """Keep this tensor's value if it lies between a weight and the end of its activation."""
        node = _node(tensor)
        if node is None or (node, tensor.output_nr) in self._seen:
            return
        spot = (node, tensor.output_nr)
        self._seen.add(spot)
        kind = type(node).__name__
        self._look_for_weights(spot, kind, tensor)
        if not any(source in self._open for source in node.next_functions):
            return
        if (
            kind in REARRANGING
            or (kind == "AddBackward0" and self._biased.get(tensor, False))
            or kind in NORMALIZING
        ):
            self._open.add(spot)
            self._followers.add(spot)
            self._values[spot] = tensor.detach()
        elif activation_kind(node) is not None:
            self._followers.add(spot)
            self._values[spot] = tensor.detach()

    def _look_for_weights(self, spot: Spot, kind: str, tensor: Tensor) -> None:
        carried: set[str] = set()
        untouched: set[str] = set()
        for source, number in spot[0].next_functions:
            name = self._names.get(id(getattr(source, "variable", None)))
            names, plain = ({name}, True) if name else self._carriers.get((source, number), (set(), False))
            carried |= names
            untouched |= names if plain else set()
        if not carried or tensor.layout is not torch.strided:
            return
        if self._depends_on_data.get(tensor, False):
            for name in carried:
                self.uses[name].append(spot)
            self._open.add(spot)
            self._values[spot] = tensor.detach()
            return
        rearranged = kind in REARRANGING and untouched == carried
        self._carriers[spot] = (carried, rearranged)
        if untouched and not rearranged:
            for name in untouched:
                self.first_uses[name].append(spot)
            self._open.add(spot)
            self._values[spot] = tensor.detach()

    def _save_from_overwriting(self, written: list[Tensor]) -> None:
        stores = {_store(tensor) for tensor in written} - {0}
        for spot, value in self._values.items() if stores else ():
            if _store(value) in stores:
                self._values[spot] = value.clone()

    def passage(self, spot: Spot, consumers: Consumers) -> Passage:
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
        return Passage(spot[0], self._place(own), self._place(entry), self._place(after), activation)

    def _place(self, spot: Spot) -> Place:
        return Place(*spot, self._values[spot])


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
