"""Upstream and downstream of a weight: activations, dropout, normalizations and residual branches.

A dropout is a link of a chain of functions if it has to be: f(z/q) is not f(z)/q unless f is positively
homogeneous, as ReLU. A tanh after a dropout gives f(z/q) with probability q and f(0) else, and has the second
moment q·E f(z/q)² + (1 − q)·f(0)².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.init.gain import second_moment, slope_moment
from hessinit.init.layer_functions import GATES
from hessinit.init.trace import BY_SHAPE, SCALINGS, Context, Step, Trace, keeps_elements

_PASSED = ("rearrange", "split", "pool", "centre")
# What to call the end of a context, where the step's kind does not say it.
_ENDS = {"gates": "state", "gate": "product", "split": "parts", "pool": "unknown"}
_FUNCTIONS = ("elementwise", "dropout")


# --- Chains of elementwise functions, taken from the trace and run on other points ------------------------


@dataclass(frozen=True)
class Link:
    """One elementwise function and its name; with probability 1 − `keep` it gives 0 instead."""

    name: str
    run: Callable[[Tensor], Tensor]
    keep: float = 1.0


Chain = tuple[Link, ...]  # in execution order
_SIGMOID = Link("sigmoid", torch.sigmoid)


def _link_of(step: Step) -> Link:
    call = step.call
    assert call is not None
    return Link(step.name, lambda value: call.run(lambda signal: value))


def _prepend(step: Step, chain: Chain) -> tuple[Chain, float]:
    """The chain with an elementwise step or a dropout before it, and the kept fraction left out of it.

    A dropout is left out where it makes no difference on which side of the chain it stands.
    """
    if step.kind == "elementwise":
        return (_link_of(step), *chain), 1.0
    keep = step.keep
    inside = any(link.keep < 1 for link in chain)
    if not chain or not 0 < keep < 1 or (not inside and is_homogeneous(partial(_run, chain), 1 / keep)):
        return chain, keep
    return (Link(step.name, lambda value: value / keep, keep), *chain), 1.0


def is_homogeneous(function: Callable[[Tensor], Tensor], factor: float = 2.0) -> bool:
    """Whether `f(c·z) = c·f(z)` for c > 0, as for ReLU: such a function has one gain for all sizes."""
    points = torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            value, grown = function(points).double(), function(factor * points).double()
    except Exception:  # not elementwise: whoever needs the gain says so
        return True
    return torch.allclose(grown, factor * value, rtol=1e-5, atol=1e-6, equal_nan=True)


def _outcomes(chain: Chain) -> list[tuple[float, Chain]]:
    """One chain without dropout for each outcome of the masks inside, with its probability."""
    for place, link in enumerate(chain):
        if link.keep < 1:
            dropped = Link(link.name, torch.zeros_like)
            return [
                (chance * other, one)
                for chance, now in ((link.keep, replace(link, keep=1.0)), (1 - link.keep, dropped))
                for other, one in _outcomes((*chain[:place], now, *chain[place + 1 :]))
            ]
    return [(1.0, chain)]


def _function_of(chain: Chain) -> Callable[[Tensor], Tensor] | None:
    """The chain as one function, its root mean square over the masks inside; None for an empty one."""
    ways = _outcomes(chain)
    if len(ways) == 1:
        return (lambda value: _run(chain, value)) if chain else None
    return lambda value: torch.stack([chance * _run(one, value) ** 2 for chance, one in ways]).sum(0).sqrt()


def _product_of(chains: list[Chain]) -> Chain:
    """One function for several of the same value whose results are multiplied."""
    if len(chains) == 1:
        return chains[0]

    def multiply(value: Tensor) -> Tensor:
        result = _run(chains[0], value)
        for chain in chains[1:]:
            result = result * _run(chain, value)
        return result

    return (Link(", ".join([*(link.name for chain in chains for link in chain), "mul"]), multiply),)


def _run(chain: Chain, value: Tensor) -> Tensor:
    for link in chain:
        value = link.run(value)
    return value


def _moment(
    chain: Chain, measure: Callable[[Callable[[Tensor], Tensor]], float], scale: float = 1.0
) -> float:
    """E f(z)² or E f'(z)², as `measure` says, for the chain at `scale`·z; nan if it has none."""
    if not chain:
        return scale**2

    def at_scale(chain: Chain) -> Callable[[Tensor], Tensor]:
        return lambda value: _run(chain, scale * value)

    try:
        return sum(chance * measure(at_scale(one)) for chance, one in _outcomes(chain))
    except ProblemError:  # not elementwise after all, or not finite: whoever needs the gain says so
        return math.nan


# --- Upstream ---------------------------------------------------------------------------------------------


def upstream_of(trace: Trace, step: Step) -> Context:
    """The context that ends at the weight of `step`, in a simplified trace."""
    if step.use is not None and step.use.kind == "embedding":
        return Context(end="tokens")
    if not step.sources:
        return Context(end="constant")
    if step.use is not None and step.use.kind == "bilinear":
        return _product([_back(trace, source) for source in step.sources], ())
    return _back(trace, step.sources[0])


def _back(trace: Trace, index: int, chain: Chain = (), words: tuple[str, ...] = ()) -> Context:
    """From step `index` back to its source; `chain` comes after the step, `words` name it."""
    keep, active, trouble = 1.0, False, ""
    while True:
        step = trace[index]
        if step.kind in _FUNCTIONS:
            chain, kept = _prepend(step, chain)
            keep, active, words = keep * kept, active or step.active, (step.name, *words)
        elif step.kind not in _PASSED or not step.sources or step.resizes:
            break
        trouble = trouble or (BY_SHAPE if step.name == BY_SHAPE else "")
        index = step.sources[0]
    found = _source(trace, step, chain)
    shown = ", ".join(filter(None, (found.words, *words)))
    trouble = found.trouble or trouble or (shown if math.isnan(found.moment) else "")
    active = active or found.dropout_active
    return replace(found, words=shown, keep=found.keep * keep, dropout_active=active, trouble=trouble)


def _source(trace: Trace, step: Step, chain: Chain) -> Context:
    if step.kind == "product":
        chains = {root: _product_of(found) for root, found in _factors(trace, step).items()}
        factors = [_back(trace, root, one, tuple(link.name for link in one)) for root, one in chains.items()]
        return _product(factors, chain)
    if step.kind == "gate":
        halves = [_back(trace, step.sources[0]), _back(trace, step.sources[0], (_SIGMOID,))]
        return replace(_product(halves, chain), words="glu")
    if step.kind == "cat" and step.sources:
        return _joined(trace, step, [_back(trace, source, chain) for source in step.sources])
    if step.kind == "normalizing":
        return Context(step.name, end=step.name, trouble=step.name)
    size = _moment(chain, second_moment)
    if step.kind == "pool":  # that changes the size; but a sum of what a softmax has weighed is a mean
        mixes = _back(trace, step.sources[0]).end == "mix"
        return Context(step.name, size, end="mix" if mixes else "unknown")
    if step.kind in ("state", "gates"):
        return Context("hidden state", size, end="state")
    feeder = step.index if step.use is not None else -1
    return Context(moment=size, end=step.kind, feeder=feeder, function=_function_of(chain))


def _factors(trace: Trace, step: Step) -> dict[int, list[Chain]]:
    """The steps that the factors of a product are functions of, each with its functions."""
    found: dict[int, list[Chain]] = {}
    for index in step.sources:
        chain: Chain = ()
        while trace[index].kind == "elementwise" or keeps_elements(trace, trace[index]):
            if trace[index].kind == "elementwise":
                chain = (_link_of(trace[index]), *chain)
            index = trace[index].sources[0]
        inner = {index: [chain]}
        if trace[index].kind == "product" and not chain:
            inner = _factors(trace, trace[index])
        for root, chains in inner.items():
            found.setdefault(root, []).extend(chains)
    return found


def _product(factors: list[Context], chain: Chain) -> Context:
    """Different signals are taken as independent: second moments multiply."""
    troubles = {factor.trouble for factor in factors if factor.trouble}
    if troubles - {BY_SHAPE}:  # weights from a softmax, as in attention
        return Context(end="mix", moment=_moment(chain, second_moment))
    size = math.prod(factor.moment for factor in factors)
    return Context(
        words=" × ".join(factor.words or factor.end for factor in factors),
        moment=_moment(chain, second_moment, math.sqrt(size)),
        keep=math.prod(factor.keep for factor in factors),
        dropout_active=any(factor.dropout_active for factor in factors),
        end="product",
        trouble=next(iter(troubles), ""),
    )


def _joined(trace: Trace, step: Step, branches: list[Context]) -> Context:
    """Concatenated: mean squares average, weighted by the branches' sizes where these are known."""
    shapes = [trace[source].shape for source in step.sources]
    sizes = [1.0 if None in shapes else float(math.prod(shape or ())) for shape in shapes]
    squares = [size * branch.moment for size, branch in zip(sizes, branches, strict=True)]
    dropped = [
        one / branch.keep if branch.keep else math.inf for one, branch in zip(squares, branches, strict=True)
    ]
    words = dict.fromkeys(branch.words or branch.end for branch in branches)
    return Context(
        words=f"{step.name} of {' and '.join(words)}",
        moment=sum(squares) / sum(sizes),
        keep=sum(squares) / sum(dropped) if sum(squares) else 1.0,
        dropout_active=any(branch.dropout_active for branch in branches),
        end="unknown" if any(branch.end == "unknown" for branch in branches) else "cat",
        trouble=next((branch.trouble for branch in branches if branch.trouble), ""),
    )


# --- Downstream -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The steps passed; the one that ends them (None where the result goes to several, or leaves)."""

    steps: list[Step]
    last: Step | None
    end: str


class Downstream:
    """A simplified trace, read forwards."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.consumers: dict[int, list[Step]] = {}
        for step in trace.steps:
            for source in step.sources if step.index in trace.live else ():
                self.consumers.setdefault(source, []).append(step)

    def path(self, step: Step, kinds: tuple[str, ...]) -> Path:
        """The steps after `step` while a single consumer of these kinds follows.

        Rearranging, pooling and the addition of a bias are of every kind.
        """
        steps: list[Step] = []
        while True:
            found, leaves = self.consumers.get(step.index, []), step.index in self.trace.outputs
            if not found:
                return Path(steps, None, "output" if leaves else "nowhere")
            if len(found) > 1 or leaves:
                return Path(steps, None, "several")
            step = found[0]
            if step.kind not in (*kinds, "rearrange", "pool", "centre") or step.resizes:
                end = step.name if step.kind == "normalizing" else _ENDS.get(step.kind, step.kind)
                return Path(steps, step, end)
            steps.append(step)

    def context(self, step: Step) -> Context:
        """The context that begins at the weight of `step`; it goes on behind a sum.

        What is added there is taken to leave the size as it is, so that slopes before and after it multiply.
        """
        paths = [self.path(step, _FUNCTIONS)]
        while paths[-1].end == "sum":
            assert paths[-1].last is not None
            paths.append(self.path(paths[-1].last, _FUNCTIONS))
        while len(paths) > 1 and not any(passed.kind in _FUNCTIONS for passed in paths[-1].steps):
            paths.pop()
        met = [passed for path in paths for passed in path.steps]
        words = ", ".join(passed.name for passed in met if passed.kind in _FUNCTIONS)
        size, keep = 1.0, 1.0
        for path in paths:
            chain: Chain = ()
            for passed in reversed(path.steps):
                if passed.kind in _FUNCTIONS:
                    chain, kept = _prepend(passed, chain)
                    keep *= kept
            size *= _moment(chain, slope_moment)
        trouble = BY_SHAPE if any(passed.name == BY_SHAPE for passed in met) else ""
        trouble = trouble or (words if math.isnan(size) else "")
        return Context(words, size, keep, any(passed.active for passed in met), paths[-1].end, trouble)

    def norm_follows(self, step: Step) -> bool:
        """Whether a normalization undoes the scale of the weight before anything else uses it."""
        path = self.path(step, _FUNCTIONS)
        between = [passed for passed in path.steps if passed.kind == "elementwise"]
        return path.end == "norm" and all(passed.name in SCALINGS for passed in between)

    def closes_residual(self, step: Step) -> bool:
        """Whether the weight's output is added to an ancestor of its input, or to a shorter branch from one.

        Elementwise functions, dropout, norms and rearranging may lie between. Where both summands use the
        same weights, it is a recurrence and no residual branch. Against a shorter branch, as a projection is,
        the longer must be without sums: a stream to which one signal is added repeatedly is no branch of it.
        """
        path = self.path(step, ("elementwise", "dropout", "norm"))
        recurrent = step.use is not None and step.use.inside in GATES
        if path.last is None or path.last.kind != "sum" or recurrent:
            return False
        own, trace = path.steps[-1].index if path.steps else step.index, self.trace
        branch = trace.ancestors([own])
        for other in path.last.sources:
            if other == own:
                continue
            skip = trace.ancestors([other])
            mine, others = self._weights(branch - skip), self._weights(skip - branch)
            repeated = len(set(mine)) < len(mine) or bool(set(mine) & set(others))
            added = any(trace[i].kind == "sum" and len(trace[i].sources) > 1 for i in branch - skip)
            plain = not (others and added)
            if branch & skip and len(mine) > len(others) and plain and not repeated:
                return True
        return False

    def _weights(self, indices: set[int]) -> list[str]:
        """One entry for each use of a weight; an unknown use counts, under a name of its own."""
        steps = [self.trace[index] for index in indices if self.trace[index].kind == "weight"]
        return [f"step {one.index}" if one.use is None else one.use.parameter for one in steps]
