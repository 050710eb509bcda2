"""What lies after a weight: who consumes what it gives, and where that ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.schemes.chains import Chain, moment, put_before
from hessinit.schemes.gains import slope_moment
from hessinit.schemes.operations import SCALINGS
from hessinit.schemes.record import Record, Step
from hessinit.schemes.site import BY_SHAPE, Passage

# What to call the end of a passage, where the step's kind does not say it.
_ENDS = {"gates": "state", "gate": "product", "split": "parts", "pool": "unknown"}
_FUNCTIONS = ("elementwise", "dropout")


@dataclass(frozen=True)
class Path:
    """The steps passed; the one that ends them (None where the result goes to several, or leaves); a word."""

    steps: list[Step]
    last: Step | None
    end: str


class Surroundings:
    """A simplified record, read forwards."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.consumers: dict[int, list[Step]] = {}
        for step in record.steps:
            for source in step.sources if step.index in record.live else ():
                self.consumers.setdefault(source, []).append(step)

    def path(self, step: Step, kinds: tuple[str, ...]) -> Path:
        """The steps after `step`, as long as one alone consumes what the last gave and is of these kinds.

        Rearranging, pooling and the addition of a bias are of every kind.
        """
        steps: list[Step] = []
        while True:
            found, leaves = self.consumers.get(step.index, []), step.index in self.record.outputs
            if not found:
                return Path(steps, None, "output" if leaves else "nowhere")
            if len(found) > 1 or leaves:
                return Path(steps, None, "several")
            step = found[0]
            if step.kind not in (*kinds, "rearrange", "pool", "centre") or step.resizes:
                end = step.name if step.kind == "normalizing" else _ENDS.get(step.kind, step.kind)
                return Path(steps, step, end)
            steps.append(step)

    def after(self, step: Step) -> Passage:
        """The passage that begins at the weight of `step`; it goes on behind a sum.

        What is added there is taken to leave the size as it is, so that slopes before and behind multiply.
        """
        stretches = [self.path(step, _FUNCTIONS)]
        while stretches[-1].end == "sum":
            assert stretches[-1].last is not None
            stretches.append(self.path(stretches[-1].last, _FUNCTIONS))
        while len(stretches) > 1 and not any(passed.kind in _FUNCTIONS for passed in stretches[-1].steps):
            stretches.pop()
        met = [passed for path in stretches for passed in path.steps]
        words = ", ".join(passed.name for passed in met if passed.kind in _FUNCTIONS)
        size, keep = 1.0, 1.0
        for path in stretches:
            chain: Chain = ()
            for passed in reversed(path.steps):
                if passed.kind in _FUNCTIONS:
                    chain, kept = put_before(passed, chain)
                    keep *= kept
            size *= moment(chain, slope_moment)
        trouble = BY_SHAPE if any(passed.name == BY_SHAPE for passed in met) else ""
        return Passage(
            words=words,
            moment=size,
            keep=keep,
            dropout_runs=any(passed.runs for passed in met),
            end=stretches[-1].end,
            trouble=trouble or (words if math.isnan(size) else ""),
        )

    def norm_follows(self, step: Step) -> bool:
        """Whether a normalization undoes the scale of the weight before anything else uses it."""
        path = self.path(step, _FUNCTIONS)
        between = [passed for passed in path.steps if passed.kind == "elementwise"]
        return path.end == "norm" and all(passed.name in SCALINGS for passed in between)
