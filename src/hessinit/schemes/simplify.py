"""A plainer record: functions of one signal as one step, norms written by hand as norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hessinit.schemes.operations import REDUCTIONS, SCALINGS, SUMS
from hessinit.schemes.record import Call, Record, Signal, Step


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
        return replace(step, name=", ".join(inner.name for inner in steps), sources=(root,), call=call)
    if root is not None and step.name in SCALINGS:
        return replace(step, name="norm by hand", kind="norm", sources=(root,))
    if root is not None and step.name in SUMS:
        return replace(step, name="centre", kind="centre", sources=(root,))
    if step.name == "mul":
        return replace(step, kind="product")
    return replace(step, kind="sum" if step.name in SUMS else "unknown")


def _reduces(step: Step) -> bool:
    return (step.kind == "pool" and step.name in REDUCTIONS) or step.kind in ("centre", "norm")


def _common_root(record: Record, step: Step) -> tuple[int | None, list[Step]]:
    """The nearest step that `step` is a function of, by elementwise steps and reductions alone."""
    frontier, between = set(step.sources), []
    while len(frontier) > 1:
        latest = record[max(frontier)]
        inside = latest.kind in ("elementwise", "centre") or (
            latest.kind == "pool" and latest.name in REDUCTIONS
        )
        if not inside or not latest.sources:
            return None, []
        between.append(latest)
        frontier = frontier - {latest.index} | set(latest.sources)
    return frontier.pop(), between[::-1]


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
    live: set[int] = set()
    waiting = list(record.outputs)
    while waiting:
        index = waiting.pop()
        if index not in live:
            live.add(index)
            waiting.extend(record[index].sources)
    return live
