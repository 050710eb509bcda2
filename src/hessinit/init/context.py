"""Upstream and downstream of a weight: activations, dropout, normalizations and residual branches.

A dropout is a part of the function after it if it has to be: f(z/q) is not f(z)/q unless f is
positively homogeneous, as ReLU. A tanh after a dropout gives f(z/q) with probability q and f(0)
else, and has the second moment q·E f(z/q)² + (1 − q)·f(0)².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.init.gain import moment
from hessinit.init.layer_functions import GATES
from hessinit.init.trace import SCALINGS, VIEWS, Context, Step, Trace, keeps_elements

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
    alike = len(outcomes) == 1 and 0 < keep < 1 and is_homogeneous(outcomes[0][1], 1 / keep)
    if not outcomes or not 0 < keep < 1 or alike:
        return outcomes, keep
    kept = _compose(lambda value: value / keep, outcomes)
    lost = _compose(torch.zeros_like, outcomes)
    weighed = [(keep, kept), (1 - keep, lost)]
    return tuple((own * chance, one) for own, ways in weighed for chance, one in ways), 1.0


def is_homogeneous(function: Function, factor: float = 2.0) -> bool:
    """Whether `f(c·z) = c·f(z)` for c > 0, as for ReLU: such a function has one gain for all sizes."""
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
    return lambda value: (
        torch.stack([chance * one(value) ** 2 for chance, one in outcomes]).sum(0).sqrt()
    )


def moment_of(outcomes: Outcomes, scale: float = 1.0, *, slope: bool = False) -> float:
    """E f(z)², or E f'(z)², of the function at `scale`·z; nan if it has none."""
    if not outcomes:
        return scale**2
    try:
        scaled = _compose(lambda value: scale * value, outcomes)
        return sum(chance * moment(one, slope=slope) for chance, one in scaled)
    except ProblemError:  # not elementwise after all, or not finite: whoever needs the gain says so
        return math.nan


def upstream_of(trace: Trace, step: Step) -> Context:
    """The context that ends at the weight of `step`, in a simplified trace."""
    if step.use is not None and step.use.kind == "embedding":
        return Context(end="tokens")
    if not step.sources:
        return Context(end="constant")
    if step.use is not None and step.use.kind == "bilinear":
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
            outcomes, kept = _prepend(step, outcomes)
            keep = keep * kept
            active = active or step.active
            words = f"{step.name}, {words}" if words else step.name
        elif step.kind not in _PASSED or not step.sources or step.resizes:
            break
        index = step.sources[0]
    found = _source(trace, step, outcomes)
    words = ", ".join(filter(None, (found.words, words)))
    trouble = found.trouble or (words if math.isnan(found.moment) else "")
    active = active or found.dropout_active
    return replace(
        found, words=words, keep=found.keep * keep, dropout_active=active, trouble=trouble
    )


def _source(trace: Trace, step: Step, outcomes: Outcomes) -> Context:
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
    if (
        step.kind == "pool"
    ):  # that changes the size; but a sum of what a softmax has weighed is a mean
        mixes = _back(trace, step.sources[0]).end == "mix"
        return Context(step.name, size, end="mix" if mixes else "unknown")
    if step.kind in ("state", "gates"):
        return Context("hidden state", size, end="state")
    feeder = step.index if step.use is not None else -1
    return Context(moment=size, end=step.kind, feeder=feeder, function=_function_of(outcomes))


def _roots(trace: Trace, index: int) -> list[int]:
    """The steps that a factor of a product is a function of."""
    step = trace[index]
    if step.kind == "product":
        return [root for source in step.sources for root in _roots(trace, source)]
    passed = step.kind in _FUNCTIONS or step.name in VIEWS or keeps_elements(trace, step)
    return _roots(trace, step.sources[0]) if passed else [index]


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
        end="unknown" if any(factor.end == "unknown" for factor in factors) else "product",
    )


def _joined(trace: Trace, step: Step, branches: list[Context]) -> Context:
    """Concatenated: mean squares average, weighted by the branches' sizes where these are known."""
    shapes = [trace[source].shape for source in step.sources]
    sizes = [1.0 if None in shapes else float(math.prod(shape or ())) for shape in shapes]
    pairs = [(size, branch) for size, branch in zip(sizes, branches, strict=True) if branch.keep]
    passing = sum(size * branch.moment for size, branch in pairs)
    words = dict.fromkeys(branch.words or branch.end for branch in branches)
    return Context(
        words=f"{step.name} of {' and '.join(words)}",
        moment=passing / sum(sizes),
        # Where second moments are infinite, it is left open: their gain is refused.
        keep=passing / sum(size * branch.moment / branch.keep for size, branch in pairs)
        if 0 < passing < math.inf
        else float(bool(pairs)),
        dropout_active=any(branch.dropout_active for branch in branches),
        end="unknown" if any(branch.end == "unknown" for branch in branches) else "cat",
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
        """The steps after `step` while a single consumer of these kinds follows; rearranging always counts.

        And the step that ends them, None where the result goes to several or leaves; and the name
        of the end.
        """
        steps: list[Step] = []
        while True:
            found = self.consumers.get(step.index, [])
            leaves = step.index in self.trace.outputs
            if not found:
                return steps, None, "output" if leaves else "nowhere"
            if len(found) > 1 or leaves:
                return steps, None, "several"
            step = found[0]
            if step.kind not in (*kinds, "rearrange", "pool") or step.resizes:
                end = step.name if step.kind == "normalizing" else _ENDS.get(step.kind, step.kind)
                return steps, step, end
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
        while True:
            steps, last, ended = self.path(step, _FUNCTIONS)
            met = [passed for passed in steps if passed.kind in _FUNCTIONS]
            outcomes: Outcomes = ()
            for passed in reversed(met):
                outcomes, kept = _prepend(passed, outcomes)
                keep *= kept
            size *= moment_of(outcomes, slope=True)
            words = ", ".join(filter(None, (words, *(passed.name for passed in met))))
            active = active or any(passed.active for passed in met)
            end = ended if met or not end else end
            if ended != "sum" or last is None:
                break
            step = last
        return Context(words, size, keep, active, end, words if math.isnan(size) else "")

    def norm_follows(self, step: Step) -> bool:
        """Whether a normalization undoes the scale of the weight before anything else uses it."""
        steps, _, end = self.path(step, _FUNCTIONS)
        return end == "norm" and all(
            one.name in SCALINGS for one in steps if one.kind == "elementwise"
        )

    def closes_residual(self, step: Step) -> bool:
        """Whether the weight's output is added to an ancestor of its input, or to a shorter branch from one.

        Elementwise functions, dropout, norms and rearranging may lie between. Where both summands
        use the same weights, it is a recurrence and no residual branch. Against a shorter branch,
        as a projection is, the longer must be without sums: a stream to which one signal is added
        repeatedly is no branch of it.
        """
        steps, last, _ = self.path(step, (*_FUNCTIONS, "norm"))
        trace = self.trace
        recurrent = step.use is not None and step.use.inside in GATES
        if last is None or last.kind != "sum" or recurrent:
            return False

        def weights(indices: set[int]) -> list[str]:
            found = [trace[index] for index in indices if trace[index].kind == "weight"]
            return [f"step {one.index}" if one.use is None else one.use.parameter for one in found]

        own = steps[-1].index if steps else step.index
        branch = trace.ancestors([own])
        for skip in [trace.ancestors([other]) for other in last.sources if other != own]:
            mine = weights(branch - skip)
            others = weights(skip - branch)
            repeated = len(set(mine)) < len(mine) or bool(set(mine) & set(others))
            added = any(trace[i].kind == "sum" and len(trace[i].sources) > 1 for i in branch - skip)
            if (
                branch & skip
                and len(mine) > len(others)
                and not (others and added)
                and not repeated
            ):
                return True
        return False
