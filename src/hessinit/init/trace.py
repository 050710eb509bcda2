"""The trace of one forward: its steps in execution order, simplified to functions of one signal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hessinit.problem.graph import operation_named

Kind = Literal["dense", "convolution", "transposed convolution", "embedding", "bilinear"]
Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class Signal:
    """The result of a step; stands for the tensor in the arguments of later calls."""

    index: int


@dataclass(frozen=True)
class Derived:
    """A parameter, or a tensor computed from parameters alone.

    `how` is "" for the parameter or its transpose, "slice" for a piece of it, "computed" for
    anything else.
    """

    parameters: frozenset[str]
    value: Tensor
    transposed: bool = False
    how: str = ""

    @property
    def name(self) -> str:
        """The parameter's name as its module shows it; "" where several are mixed."""
        owners = {parametrized_name(parameter) for parameter in self.parameters}
        return owners.pop() if len(owners) == 1 else ""


@dataclass(frozen=True)
class ReplayableCall:
    """A call that can be run again with other values of the signals in its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def leaves(self) -> list[Any]:
        return leaves_of([self.args, dict(self.kwargs)])

    @property
    def parameters(self) -> list[Derived]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Derived)]

    @property
    def constants(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def sources(self) -> tuple[int, ...]:
        """The steps whose results the call consumes, in the order of its arguments."""
        return sources_of(self.leaves)

    def run(self, values: Callable[[Signal], Any]) -> Any:
        def put(leaf: Any) -> Any:
            if isinstance(leaf, Signal):
                value = values(leaf)
                # A copy, because the call may write in place.
                return value.clone() if isinstance(value, Tensor) else value
            return leaf.value if isinstance(leaf, Derived) else leaf

        return self.function(*map_leaves(put, self.args), **map_leaves(put, dict(self.kwargs)))


def parametrized_name(parameter: str) -> str:
    """`fc.weight` for what `torch.nn.utils.parametrize` stores for it.

    >>> parametrized_name("fc.parametrizations.weight.original0"), parametrized_name("fc.weight")
    ('fc.weight', 'fc.weight')
    """
    owner, separator, stored = f".{parameter}".partition(".parametrizations.")
    if not separator:
        return parameter
    return f"{owner}.{stored.partition('.')[0]}".lstrip(".")


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """`function` applied to everything in nested tuples, lists, dicts and slices."""
    if isinstance(structure, list):
        return [map_leaves(function, entry) for entry in structure]
    if isinstance(structure, tuple):
        return tuple(map_leaves(function, entry) for entry in structure)
    if isinstance(structure, dict):
        return {key: map_leaves(function, entry) for key, entry in structure.items()}
    if isinstance(structure, slice):
        return slice(*map_leaves(function, [structure.start, structure.stop, structure.step]))
    return function(structure)


def leaves_of(structure: Any) -> list[Any]:
    """Everything that `map_leaves` visits, in order."""
    leaves: list[Any] = []
    map_leaves(leaves.append, structure)
    return leaves


def sources_of(structure: Any) -> tuple[int, ...]:
    """The indices of the signals in a structure, each once."""
    signals = (leaf.index for leaf in leaves_of(structure) if isinstance(leaf, Signal))
    return tuple(dict.fromkeys(signals))


@dataclass(frozen=True)
class Context:
    """What lies between a weight and its neighbour: elementwise functions and dropout.

    `moment` is E f(z)² upstream of a weight and E f'(z)² downstream, for z ~ N(0, 1), dropout left
    out: 1 without an activation. `keep` is the product of 1 − p over the dropouts; `dropout_active`
    says whether one of them is in train mode. A dropout whose 1/√(1 − p) does not pass through the
    function after it, as tanh, counts in `moment` and not in `keep`. `words` names what was met, as
    "relu, dropout 0.4"; `end` what ends the context: "input", "tokens", "weight", "norm", "sum",
    "product", "mix", "cat", "state", "output" …. `trouble` names a function that is not
    elementwise, as softmax: no moment follows from it. Where another weight feeds this one,
    `feeder` is the `step` of that use and `function` the elementwise function between the two (its
    root mean square over the masks of a dropout inside).
    """

    words: str = ""
    moment: float = 1.0
    keep: float = 1.0
    dropout_active: bool = False
    end: str = ""
    trouble: str = ""
    feeder: int = field(default=-1, compare=False)
    function: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class WeightUse:
    """One use of the weight `parameter` in the forward pass.

    `blocks` are the sizes of the output blocks with separate roles: three for a fused qkv, four for
    the gates of an LSTM, () for most. `outputs_last` says that the weight is stored as (in, out).
    `stride` has one number for each dimension of a convolution. `inside` names the composite
    function that holds the use, as "lstm". `computed` says that the forward does not use the
    parameter as it is stored: it is parametrized, or standardized first. `order` counts the uses,
    `step` is the index in the trace.
    """

    parameter: str = ""
    kind: Kind = "dense"
    shape: tuple[int, ...] = ()
    order: int = 0
    blocks: tuple[int, ...] = ()
    outputs_last: bool = False
    groups: int = 1
    stride: tuple[int, ...] = ()
    upstream: Context = Context()
    downstream: Context = Context()
    norm_follows: bool = False
    closes_residual: bool = False
    inside: str = ""
    computed: bool = False
    step: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Step:
    """One call. `sources` are the steps whose results it consumes, `shape` that of its tensor.

    `kind` is the role of its operation, or "input", "constant", "weight", "state", "gates", "sum",
    "product". `call` is None where the elements of the first source are passed on, or where nobody
    runs it again. `keep` is what a dropout keeps; `active` says that it is in train mode. The trace
    gives it its `index`.
    """

    name: str
    kind: str
    sources: tuple[int, ...] = ()
    call: ReplayableCall | None = None
    use: WeightUse | None = None
    keep: float = 1.0
    active: bool = False
    shape: Shape = None
    index: int = -1

    @property
    def resizes(self) -> bool:
        """Whether it changes the signal's magnitude, as a sum does."""
        return self.kind == "pool" and operation_named(self.name).resizes


@dataclass(frozen=True)
class Trace:
    """All steps of a forward.

    The model returns the results of `outputs`, which depend on the steps `live`. `other_uses` says
    how a parameter is used that is not the weight of a step; `draws` whether the forward calls a
    generator of random numbers itself.
    """

    steps: list[Step] = field(default_factory=list)
    outputs: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    other_uses: dict[str, str] = field(default_factory=dict)
    draws: bool = False

    def append(self, step: Step) -> Signal:
        index = len(self.steps)
        self.steps.append(replace(step, index=index))
        return Signal(index)

    def note_other_use(self, parameters: Iterable[str], words: str) -> None:
        for parameter in parameters:
            self.other_uses.setdefault(parameter, words)

    def ancestors(self, indices: Iterable[int]) -> frozenset[int]:
        """These steps and all whose results go into them."""
        ancestors: set[int] = set()
        waiting = list(indices)
        while waiting:
            index = waiting.pop()
            if index not in ancestors:
                ancestors.add(index)
                waiting.extend(self[index].sources)
        return frozenset(ancestors)

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]


# Steps that change no value; a dropout among them is one of 0.
_UNCHANGED = ("bias", "centre", "dropout")


def simplify(trace: Trace) -> Trace:
    """The trace with every elementwise step of several signals rewritten.

    x·sigmoid(x) becomes one function of x; x / √mean(x²) a norm; the rest is a sum or a product of
    different signals, or unknown. Marks the steps that reach an output as live.
    """
    simpler = replace(trace, steps=[*trace.steps])
    for step in trace.steps:
        if step.kind == "elementwise" and len(step.sources) > 1:
            simpler.steps[step.index] = _rewritten(simpler, step)
    outputs = trace.outputs or range(len(trace.steps))
    return replace(simpler, live=simpler.ancestors(outputs))


def _rewritten(trace: Trace, step: Step) -> Step:
    operation = operation_named(step.name)
    root, between = _common_root(trace, step)
    if root is None:
        if step.name == "masked_fill":
            return replace(step, kind="rearrange", sources=step.sources[:1], call=None)
        if step.name == "mul":
            return replace(step, kind="product")
        return replace(step, kind="sum" if operation.adds else "unknown")
    reductions = [inner for inner in between if inner.kind == "pool"]
    if not reductions:
        steps = [*between, step]
        words = ", ".join(inner.name for inner in steps if inner.kind != "rearrange")
        call = ReplayableCall(_composite(steps, root), (Signal(root),))
        return replace(step, name=words, sources=(root,), call=call)
    resizes = any(inner.resizes for inner in reductions)
    if operation.adds and not resizes:
        return replace(step, name="centre", kind="rearrange", sources=(root,), call=None)
    if operation.scales and not resizes:
        return replace(step, name="norm by hand", kind="norm", sources=(root,), call=None)
    return replace(step, kind="sum" if operation.adds else "unknown")


def _common_root(trace: Trace, step: Step) -> tuple[int | None, list[Step]]:
    """The nearest step that `step` is a function of, by elementwise steps and reductions alone.

    And the steps between, in order; those that only pass on their elements do so in any shape.
    """
    scales = operation_named(step.name).scales
    frontier = set(step.sources)
    between = []
    while len(frontier) > 1:
        latest = trace[max(frontier)]
        is_slope = latest.name == "scale" and scales  # of a Swish, at 1
        passes = is_slope or keeps_elements(trace, latest)
        reduces = latest.kind == "pool" and operation_named(latest.name).reduces
        if not (passes or reduces or latest.kind == "elementwise") or not latest.sources:
            return None, []
        between.append(replace(latest, call=None) if passes else latest)
        frontier = frontier - {latest.index} | set(latest.sources)
    return frontier.pop(), between[::-1]


def keeps_elements(trace: Trace, step: Step) -> bool:
    """Whether each element of the input stays in its place: a cast, a view in the same shape."""
    if step.kind != "rearrange":
        return False
    operation = operation_named(step.name)
    if step.name in _UNCHANGED or operation.casts:
        return True
    same_shape = step.shape is not None and step.shape == trace[step.sources[0]].shape
    return operation.views and same_shape


def _composite(steps: list[Step], root: int) -> Callable[[Any], Any]:
    def evaluate(value: Any) -> Any:
        values = {root: value}
        for step in steps:
            if step.call is not None:
                values[step.index] = step.call.run(lambda signal: values[signal.index])
                continue
            passed = values[step.sources[0]]
            # A condition becomes numbers.
            values[step.index] = passed.double() if passed.dtype is torch.bool else passed
        return values[steps[-1].index]

    return evaluate
