"""A plainer record: functions of one signal as one step, norms written by hand as norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hessinit.schemes.leaves import leaves_of
from hessinit.schemes.operations import CASTS, REDUCTIONS, SCALINGS, SUMS, TO_INTEGERS
from hessinit.schemes.record import Call, Record, Signal, Step, Unknown, passed_on

_AS_IT_IS = CASTS - TO_INTEGERS - {"view_as_real"} | {"bias", "dropout"}  # a dropout of 0
_IN_ORDER = ("view", "reshape", "view_as", "reshape_as", "unsafe_view", "expand", "expand_as", "broadcast_to")


def simplify(record: Record) -> None:
    """Rewrite, in place, every elementwise step of several signals.

    x·sigmoid(x) becomes one function of x; x / √mean(x²) a norm; what is left is a sum or a product of
    different signals, or unknown. Marks the steps that reach an output as live.
    """
    for step in list(record.steps):
        if step.kind == "elementwise" and len(step.sources) > 1:
            record.steps[step.index] = _rewritten(record, step)
    record.live = _live(record)


def _rewritten(record: Record, step: Step) -> Step:
    root, between = _common_root(record, step)
    if root is not None and not any(_reduces(inner) for inner in between):
        steps = [*between, step]
        call = Call(_composite(steps, root), (Signal(root),))
        words = ", ".join(inner.name for inner in steps if inner.kind != "rearrange")
        return replace(step, name=words, sources=(root,), call=call)
    resizes = any(inner.resizes for inner in between)
    if root is not None and step.name in SCALINGS:
        if resizes:  # x / ‖x‖ is of size 1 as a whole, and of 1/√n in each unit
            return replace(step, name="normalize by hand", kind="normalizing", sources=(root,))
        return replace(step, name="norm by hand", kind="norm", sources=(root,))
    if root is not None and step.name in SUMS and not resizes:
        return replace(step, name="centre", kind="centre", sources=(root,))
    if root is None and step.name == "masked_fill":
        source = step.sources[:1]
        return replace(step, kind="rearrange", sources=source, call=passed_on(*source))
    if step.name == "mul":
        return replace(step, kind="product")
    return replace(step, kind="sum" if step.name in SUMS else "unknown")


def _reduces(step: Step) -> bool:
    return (step.kind == "pool" and step.name in REDUCTIONS) or step.kind in ("centre", "norm")


def _common_root(record: Record, step: Step) -> tuple[int | None, list[Step]]:
    """The nearest step that `step` is a function of, by elementwise steps and reductions alone.

    And what lies between, in order; what only passes on its elements is made to do so in any shape.
    """
    frontier, between = set(step.sources), []
    while len(frontier) > 1:
        latest = record[max(frontier)]
        learnable = latest.name == "scale" and step.name in SCALINGS  # the slope of a Swish, at 1
        passes = learnable or keeps_elements(record, latest)
        reduces = latest.kind == "pool" and latest.name in REDUCTIONS
        inside = passes or reduces or latest.kind in ("elementwise", "centre")
        if not inside or not latest.sources:
            return None, []
        between.append(replace(latest, call=passed_on(latest.sources[0])) if passes else latest)
        frontier = frontier - {latest.index} | set(latest.sources)
    return frontier.pop(), between[::-1]


def keeps_elements(record: Record, step: Step) -> bool:
    """Whether a step gives what it got, each element in its place: a cast, a view in the same shape."""
    if step.kind != "rearrange" or step.name in _AS_IT_IS:
        return step.kind == "rearrange"
    if step.call is None or step.name not in _IN_ORDER:
        return False
    source = step.sources[0]
    if step.shape is not None and record[source].shape is not None:
        return step.shape == record[source].shape
    # Not known, in a trace; but what takes over the shape of its own source has it.
    shapes = list(leaves_of([step.call.args[1:], dict(step.call.kwargs)]))
    asked = [
        leaf.call.args[0] for leaf in shapes if isinstance(leaf, Unknown) and leaf.name in ("shape", "size")
    ]
    owners = [*asked, *(leaf for leaf in shapes if isinstance(leaf, Signal))]
    own = _first_of_shape(record, source)
    same = [isinstance(leaf, Signal) and _first_of_shape(record, leaf.index) == own for leaf in owners]
    return len(owners) == len(shapes) > 0 and all(same)


def _first_of_shape(record: Record, index: int) -> int:
    """The first step of those back from `index` that certainly have the same shape."""
    step = record[index]
    alone = step.kind == "elementwise" and len(step.sources) == 1
    return _first_of_shape(record, step.sources[0]) if alone or keeps_elements(record, step) else index


def _composite(steps: list[Step], root: int) -> Callable[[Any], Any]:
    def evaluate(value: Any) -> Any:
        values = {root: value}
        for step in steps:
            assert step.call is not None
            values[step.index] = step.call.run(lambda signal: values[signal.index])
        return values[steps[-1].index]

    return evaluate


def _live(record: Record) -> set[int]:
    """The steps behind the outputs; all of them where no output is a signal."""
    if not record.outputs:
        return set(range(len(record.steps)))
    return record.behind(record.outputs)
