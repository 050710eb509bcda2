"""The trace of one forward: its steps in execution order, and what lies around each weight.

Elementwise steps of several signals are simplified to functions of one. Upstream and downstream of
a weight are activations, dropout, normalizations and residual branches.

A dropout is a part of the function after it if it has to be: f(z/q) is not f(z)/q unless f is
positively homogeneous, as ReLU. A tanh after a dropout gives f(z/q) with probability q and f(0)
else, and has the second moment q·E f(z/q)² + (1 − q)·f(0)².
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.init.gain import Function, moment
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
    return replace(simpler, live=simpler.ancestors(trace.outputs or range(len(trace.steps))))


def _rewritten(trace: Trace, step: Step) -> Step:
    operation = operation_named(step.name)
    root, between = _common_root(trace, step)
    reductions = [inner for inner in between if inner.kind == "pool"]
    if root is None:
        if step.name == "masked_fill":
            return replace(step, kind="rearrange", sources=step.sources[:1], call=None)
        if step.name == "mul":
            return replace(step, kind="product")
    elif not reductions:
        steps = [*between, step]
        words = ", ".join(inner.name for inner in steps if inner.kind != "rearrange")
        call = ReplayableCall(_composite(steps, root), (Signal(root),))
        return replace(step, name=words, sources=(root,), call=call)
    elif not any(inner.resizes for inner in reductions):
        if operation.adds:
            return replace(step, name="centre", kind="rearrange", sources=(root,), call=None)
        if operation.scales:
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


# --- Upstream and downstream of a weight

_PASSED = ("rearrange", "split", "pool")
# What to call the end of a context, where the step's kind does not say it.
_ENDS = {"gates": "state", "gate": "product", "split": "parts", "pool": "unknown"}
_FUNCTIONS = ("elementwise", "dropout")

# A function, once for each outcome of the dropouts inside, with its probability; () is the
# identity.
Outcomes = tuple[tuple[float, Function], ...]


def _compose(first: Function, outcomes: Outcomes) -> Outcomes:
    def after(then: Function) -> Function:
        return lambda value: then(first(value))

    return tuple((chance, after(then)) for chance, then in outcomes) or ((1.0, first),)


def _prepend(step: Step, outcomes: Outcomes) -> tuple[Outcomes, float]:
    """With an elementwise step or a dropout before them, and the kept fraction that is left out.

    A dropout is left out where it makes no difference on which side of the function it stands.
    """
    if step.kind == "elementwise":
        call = step.call
        assert call is not None
        return _compose(lambda value: call.run(lambda signal: value), outcomes), 1.0
    keep = step.keep
    if not outcomes or not 0 < keep < 1:
        return outcomes, keep
    if len(outcomes) == 1 and is_homogeneous(outcomes[0][1], 1 / keep):
        return outcomes, keep
    passed = _compose(lambda value: value / keep, outcomes)
    dropped = _compose(torch.zeros_like, outcomes)
    weighed = [(keep * chance, function) for chance, function in passed]
    weighed += [((1 - keep) * chance, function) for chance, function in dropped]
    return tuple(weighed), 1.0


def is_homogeneous(function: Function, factor: float = 2.0) -> bool:
    """Whether f(c·z) = c·f(z) for c > 0, as for ReLU: such a function has one gain at all sizes."""
    points = torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            value = function(points).double()
            grown = function(factor * points).double()
    except Exception:  # not elementwise: whoever needs the gain says so
        return True
    return torch.allclose(grown, factor * value, rtol=1e-5, atol=1e-6, equal_nan=True)


def _function_of(outcomes: Outcomes) -> Function | None:
    """One function, the root mean square of the outcomes; None for the identity."""
    if len(outcomes) < 2:
        return outcomes[0][1] if outcomes else None

    def root_mean_square(value: Tensor) -> Tensor:
        squares = [chance * function(value) ** 2 for chance, function in outcomes]
        return torch.stack(squares).sum(0).sqrt()

    return root_mean_square


def moment_of(outcomes: Outcomes, scale: float = 1.0, *, slope: bool = False) -> float:
    """E f(z)², or E f'(z)², of the function at `scale`·z; nan if it has none."""
    if not outcomes:
        return scale**2
    try:
        scaled = _compose(lambda value: scale * value, outcomes)
        return sum(chance * moment(function, slope=slope) for chance, function in scaled)
    except ProblemError:  # not elementwise after all, or not finite: whoever needs the gain says so
        return math.nan


def _words_of(words: Iterable[str]) -> str:
    return ", ".join(filter(None, words))


def upstream_of(trace: Trace, step: Step) -> Context:
    """The context that ends at the weight of `step`, in a simplified trace."""
    kind = "" if step.use is None else step.use.kind
    if kind == "embedding":
        return Context(end="tokens")
    if not step.sources:
        return Context(end="constant")
    if kind == "bilinear":
        return _product([_back(trace, source) for source in step.sources], ())
    return _back(trace, step.sources[0])


def _back(trace: Trace, index: int, outcomes: Outcomes = ()) -> Context:
    """From step `index` back to its source; the function of `outcomes` comes after the step."""
    keep = 1.0
    active = False
    words = ""
    while True:
        step = trace[index]
        if step.kind in _FUNCTIONS:
            outcomes, left_out = _prepend(step, outcomes)
            keep *= left_out
            active = active or step.active
            words = _words_of((step.name, words))
        elif step.kind not in _PASSED or not step.sources or step.resizes:
            break
        index = step.sources[0]
    source = _source(trace, step, outcomes)
    words = _words_of((source.words, words))
    return replace(
        source,
        words=words,
        keep=source.keep * keep,
        dropout_active=active or source.dropout_active,
        trouble=source.trouble or (words if math.isnan(source.moment) else ""),
    )


def _source(trace: Trace, step: Step, outcomes: Outcomes) -> Context:
    """The context that begins at the result of `step`, which is neither passed nor a function."""
    size = moment_of(outcomes)
    if step.kind == "product":
        roots = [root for source in step.sources for root in _roots(trace, source)]
        if len(set(roots)) < len(roots):  # not independent, and not one function of one signal
            return Context(step.name, size, end="unknown")
        return _product([_back(trace, source) for source in step.sources], outcomes)
    if step.kind == "gate":
        sigmoid: Outcomes = ((1.0, torch.sigmoid),)
        halves = [_back(trace, step.sources[0]), _back(trace, step.sources[0], sigmoid)]
        return replace(_product(halves, outcomes), words="glu")
    if step.kind == "cat" and step.sources:
        return _joined(trace, step, [_back(trace, source, outcomes) for source in step.sources])
    if step.kind == "normalizing":
        return Context(step.name, end=step.name, trouble=step.name)
    if step.kind == "pool":
        # It changes the magnitude; but a sum of what a softmax has weighed is a mean.
        mixes = _back(trace, step.sources[0]).end == "mix"
        return Context(step.name, size, end="mix" if mixes else "unknown")
    if step.kind in ("state", "gates"):
        return Context("hidden state", size, end="state")
    feeder = -1 if step.use is None else step.index
    return Context(moment=size, end=step.kind, feeder=feeder, function=_function_of(outcomes))


def _roots(trace: Trace, index: int) -> list[int]:
    """The steps that a factor of a product is a function of."""
    step = trace[index]
    if step.kind == "product":
        return [root for source in step.sources for root in _roots(trace, source)]
    views = operation_named(step.name).views
    if step.kind in _FUNCTIONS or views or keeps_elements(trace, step):
        return _roots(trace, step.sources[0])
    return [index]


def _product(factors: list[Context], outcomes: Outcomes) -> Context:
    """Different signals are taken as independent: second moments multiply."""
    if any(factor.trouble for factor in factors):  # weights from a softmax, as in attention
        return Context(end="mix", moment=moment_of(outcomes))
    size = math.prod(factor.moment for factor in factors)
    return Context(
        words=" × ".join(factor.words or factor.end for factor in factors),
        moment=moment_of(outcomes, math.sqrt(size)),
        keep=math.prod(factor.keep for factor in factors),
        dropout_active=any(factor.dropout_active for factor in factors),
        end=_known_end(factors, "product"),
    )


def _known_end(contexts: Sequence[Context], end: str) -> str:
    return "unknown" if any(context.end == "unknown" for context in contexts) else end


def _joined(trace: Trace, step: Step, branches: list[Context]) -> Context:
    """Concatenated: mean squares average, weighted by the branches' sizes where these are known."""
    shapes = [trace[source].shape for source in step.sources]
    sizes = [1.0] * len(shapes)
    if None not in shapes:
        sizes = [float(math.prod(shape or ())) for shape in shapes]
    pairs = [(size, branch) for size, branch in zip(sizes, branches, strict=True) if branch.keep]
    passing = sum(size * branch.moment for size, branch in pairs)
    # Where second moments are infinite, it is left open: their gain is refused.
    keep = float(bool(pairs))
    if 0 < passing < math.inf:
        keep = passing / sum(size * branch.moment / branch.keep for size, branch in pairs)
    words = dict.fromkeys(branch.words or branch.end for branch in branches)
    return Context(
        words=f"{step.name} of {' and '.join(words)}",
        moment=passing / sum(sizes),
        keep=keep,
        dropout_active=any(branch.dropout_active for branch in branches),
        end=_known_end(branches, "cat"),
        trouble=next((branch.trouble for branch in branches if branch.trouble), ""),
    )


class Downstream:
    """A simplified trace, read forwards."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.consumers: dict[int, list[Step]] = {}
        for step in trace.steps:
            for source in step.sources if step.index in trace.live else ():
                self.consumers.setdefault(source, []).append(step)

    def path(self, step: Step, kinds: tuple[str, ...]) -> tuple[list[Step], Step | None, str]:
        """The steps after `step` while one consumer of these kinds, or a rearrangement, follows.

        And the step that ends them, None where the result goes to several or leaves; and the name
        of the end.
        """
        steps: list[Step] = []
        while True:
            consumers = self.consumers.get(step.index, [])
            leaves = step.index in self.trace.outputs
            if not consumers:
                return steps, None, "output" if leaves else "nowhere"
            if len(consumers) > 1 or leaves:
                return steps, None, "several"
            step = consumers[0]
            if step.kind not in (*kinds, "rearrange", "pool") or step.resizes:
                is_named = step.kind == "normalizing"
                return steps, step, step.name if is_named else _ENDS.get(step.kind, step.kind)
            steps.append(step)

    def context(self, step: Step) -> Context:
        """The context that begins at the weight of `step`; it goes on behind a sum.

        What is added there is taken to leave the size as it is, so that slopes before and after it
        multiply.
        """
        words = ""
        size = 1.0
        keep = 1.0
        active = False
        end = ""
        following: Step | None = step
        while following is not None:
            steps, following, end_of_path = self.path(following, _FUNCTIONS)
            functions = [passed for passed in steps if passed.kind in _FUNCTIONS]
            outcomes: Outcomes = ()
            for function in reversed(functions):
                outcomes, left_out = _prepend(function, outcomes)
                keep *= left_out
            size *= moment_of(outcomes, slope=True)
            words = _words_of((words, *(function.name for function in functions)))
            active = active or any(function.active for function in functions)
            if functions or not end:
                end = end_of_path
            if end_of_path != "sum":
                break
        return Context(words, size, keep, active, end, words if math.isnan(size) else "")

    def norm_follows(self, step: Step) -> bool:
        """Whether a normalization undoes the scale of the weight before anything else uses it."""
        steps, _, end = self.path(step, _FUNCTIONS)
        functions = [passed for passed in steps if passed.kind == "elementwise"]
        return end == "norm" and all(operation_named(passed.name).scales for passed in functions)

    def closes_residual(self, step: Step) -> bool:
        """Whether the weight's output is added to an ancestor of its input, or to a shorter branch.

        Elementwise functions, dropout, norms and rearranging may lie between.
        """
        steps, last, _ = self.path(step, (*_FUNCTIONS, "norm"))
        is_recurrent = step.use is not None and operation_named(step.use.inside).gates > 0
        if last is None or last.kind != "sum" or is_recurrent:
            return False
        end = steps[-1].index if steps else step.index
        branch = self.trace.ancestors([end])
        skips = [self.trace.ancestors([source]) for source in last.sources if source != end]
        return any(self._is_branch_of(branch, skip) for skip in skips)

    def _is_branch_of(self, branch: frozenset[int], skip: frozenset[int]) -> bool:
        """Whether the steps of `branch` are a residual branch beside those of `skip`.

        Where both use the same weights, it is a recurrence and no residual branch. Against a
        shorter branch, as a projection is, the longer must be without sums: a stream to which one
        signal is added repeatedly is no branch of it.
        """
        weights = self._weights_among(branch - skip)
        skip_weights = self._weights_among(skip - branch)
        repeats = len(set(weights)) < len(weights) or bool(set(weights) & set(skip_weights))
        if not branch & skip or len(weights) <= len(skip_weights) or repeats:
            return False
        steps = (self.trace[index] for index in branch - skip)
        adds = any(step.kind == "sum" and len(step.sources) > 1 for step in steps)
        return not (skip_weights and adds)

    def _weights_among(self, indices: Iterable[int]) -> list[str]:
        steps = [self.trace[index] for index in indices if self.trace[index].kind == "weight"]
        return [f"step {step.index}" if step.use is None else step.use.parameter for step in steps]

    def output_blocks(self, step: Step, use: WeightUse) -> tuple[int, ...]:
        """The sizes of the output blocks, in the order of their first channels.

        Empty where the output is one block. Channel numbers are sent through the rearranging
        steps that follow, in place of the output: where they arrive in disjoint sets that together
        are all channels, these sets are the blocks.
        """
        kinds = {consumer.kind for consumer in self.consumers.get(step.index, [])}
        weights = ("dense", "convolution", "transposed convolution")
        if use.blocks or use.kind not in weights or not kinds & {"rearrange", "split", "gate"}:
            return use.blocks
        if step.shape is None:
            return ()
        channels = use.shape[1] if use.outputs_last else use.shape[0]
        if use.kind == "transposed convolution":
            channels = use.shape[1] * use.groups
        kernel = (1,) * (len(use.shape) - 2)
        try:
            numbers = torch.arange(channels, dtype=torch.float64).reshape(-1, *kernel)
            arrived = set(self._arrivals(step, numbers.expand(step.shape), step.shape))
        except Exception:  # a call that does not take numbers in place of the signal
            return ()
        covered = len(frozenset().union(*arrived))
        if len(arrived) > 1 and sum(map(len, arrived)) == channels == covered:
            return tuple(len(block) for block in sorted(arrived, key=min))
        return ()

    def _arrivals(
        self, step: Step, value: Any, around: tuple[int, ...]
    ) -> Iterator[frozenset[float]]:
        """The channel numbers that reach each step that does more than rearrange.

        Signals of unknown shape are taken to have the shape `around`.
        """

        def value_of(signal: Signal) -> Any:
            if signal.index == step.index:
                return value
            return torch.empty(self.trace[signal.index].shape or around, device="meta")

        consumers = self.consumers.get(step.index, [])
        for consumer in consumers:
            call = consumer.call
            if consumer.kind == "gate" and call is not None:
                dimension = call.kwargs.get("dim", (*call.args, -1)[1])
                yield from map(_channel_numbers, value.chunk(2, dimension))
            elif consumer.kind in ("rearrange", "split"):
                moved = value if call is None else call.run(value_of)
                yield from self._arrivals(consumer, moved, around)
            else:
                yield _channel_numbers(value)
        if not consumers:
            yield _channel_numbers(value)


def _channel_numbers(value: Any) -> frozenset[float]:
    if not isinstance(value, Tensor) or not value.numel():
        raise ValueError("a tuple was not taken apart")
    return frozenset(value.unique().tolist())
