"""Upstream and downstream of a weight: activations, dropout, normalizations and residual branches.

A dropout is a part of the function after it if it has to be: f(z/q) is not f(z)/q unless f is
positively homogeneous, as ReLU. A tanh after a dropout gives f(z/q) with probability q and f(0)
else, and has the second moment q·E f(z/q)² + (1 − q)·f(0)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.init.gain import moment
from hessinit.init.trace import Context, Signal, Step, Trace, WeightUse, keeps_elements
from hessinit.problem.graph import operation_named

_PASSED = ("rearrange", "split", "pool")
# What to call the end of a context, where the step's kind does not say it.
_ENDS = {"gates": "state", "gate": "product", "split": "parts", "pool": "unknown"}
_FUNCTIONS = ("elementwise", "dropout")

Function = Callable[[Tensor], Tensor]
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
    passes = step.kind in _FUNCTIONS or views or keeps_elements(trace, step)
    return _roots(trace, step.sources[0]) if passes else [index]


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
