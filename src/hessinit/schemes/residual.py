"""Which weight closes a residual branch: its output is added to something that skipped it."""

from __future__ import annotations

from hessinit.schemes.composites import GATES
from hessinit.schemes.record import Record, Step
from hessinit.schemes.surroundings import Surroundings


def closes_residual(surroundings: Surroundings, step: Step) -> bool:
    """Whether what the weight gives is added to an ancestor of its input, or to a shorter branch from one.

    Elementwise functions, dropout, norms and rearranging may lie between. Where both summands use the same
    weights, it is a recurrence and no residual branch. Against a shorter branch, as a projection is, the
    longer must be without sums: a stream to which one signal is added again and again is no branch of it.
    """
    path = surroundings.path(step, ("elementwise", "dropout", "norm"))
    recurrent = step.use is not None and step.use.inside in GATES
    if path.last is None or path.last.kind != "sum" or recurrent:
        return False
    own = path.steps[-1].index if path.steps else step.index
    record = surroundings.record
    branch = record.behind([own])
    for other in path.last.sources:
        if other == own:
            continue
        skip = record.behind([other])
        mine, others = _weights(record, branch - skip), _weights(record, skip - branch)
        repeated = len(set(mine)) < len(mine) or bool(set(mine) & set(others))
        added = any(record[i].kind == "sum" and len(record[i].sources) > 1 for i in branch - skip)
        plain = not (others and added)
        if branch & skip and len(mine) > len(others) and plain and not repeated:
            return True
    return False


def _weights(record: Record, indices: set[int]) -> list[str]:
    """One entry for each use of a weight; a use that is not understood counts, under a name of its own."""
    return [
        step.use.parameter if step.use is not None else f"step {step.index}"
        for index in indices
        if (step := record[index]).kind == "weight"
    ]
