"""Advice on the learning rate: plain data with a reason for every number."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hessinit.estimate import Estimate
from hessinit.report.json_form import Plain, to_plain
from hessinit.report.warmup import LookAhead, Warmup

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

KIND = "hessinit learning-rate advice"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class LearningRateAdvice:
    """The rate of the largest guaranteed decrease, the edge of stability, and whether to warm up.

    `norm` is what the rates follow from: ‖H‖ for gradient descent, the norm of the preconditioned curvature
    for Adam and its like. `first_step` is, for these, the rate at which the very first step lowers the loss's
    quadratic model most. `weights` names the parameters the numbers are about, `frozen` counts the entries
    among them that no gradient moves. `lr` is the rate the advice was asked about, if any.

    >>> from hessinit.present.example import example_report
    >>> advice = example_report().advice("momentum", momentum=0.9)
    >>> round(advice.learning_rate * advice.norm.value, 9), advice.warmup.advised
    (0.1, False)
    """

    optimizer: str
    lr: float | None = None
    learning_rate: float
    learning_rate_reason: str
    stable_learning_rate: float
    stable_reason: str
    warmup: Warmup
    norm: Estimate
    first_step: float | None = None
    curvature: str
    loss: float
    examples: int
    weights: tuple[str, ...]
    parameters: int
    frozen: int = 0
    ahead: LookAhead | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def converged(self) -> bool:
        """Whether the norm behind the rates reached the tolerance."""
        return self.norm.converged

    def to_dict(self) -> dict[str, Plain]:
        """The advice as what strict JSON can hold."""
        return {"kind": KIND, "schema": SCHEMA, **to_plain(self)}

    def to_json(self) -> str:
        """The advice as strict JSON, inf and nan as strings."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def __repr__(self) -> str:
        rates = (
            f"learning_rate={self.learning_rate:.3g}, stable_learning_rate={self.stable_learning_rate:.3g}"
        )
        return f"<LearningRateAdvice for {self.optimizer}: {rates}, warmup={self.warmup.advised}>"

    def __str__(self) -> str:
        from hessinit.present.advice_table import render_advice

        return render_advice(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.advice_table import advice_renderables

        yield from advice_renderables(self)
