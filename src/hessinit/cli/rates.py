"""What a learning rate means for a network that was measured."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from hessinit.cli.calling import called_as

if TYPE_CHECKING:
    from hessinit.results.curvature_report import CurvatureReport


def judge_rate(report: CurvatureReport, lr: float, problem: str) -> str:
    """lr·‖H‖, whether gradient descent is stable there, and what to do where it is not.

    >>> from hessinit.present.example import example_report
    >>> print(judge_rate(example_report(), 0.01, "net.py:problem"))
    lr·‖H‖ = 0.01·64.5 = 0.645, below 2: gradient descent in these weights is stable at the start.
    """
    from hessinit.present.sentences import bound_rates
    from hessinit.present.words import format_number

    if not report.network_measured:
        return bound_rates(report)
    network, rate = report.network, format_number(lr)
    advice = report.advice("sgd", lr=lr)
    if not 0 < network.norm < math.inf:
        return f"lr = {rate}: {advice.stable_reason[0].lower()}{advice.stable_reason[1:]}"
    product = f"lr·‖H‖ = {rate}·{format_number(network.norm)} = {format_number(lr * network.norm)}"
    curves_down = -network.bottom_eigenvalue > network.top_eigenvalue  # where no step is too long
    if lr <= advice.stable_learning_rate:
        holds = (
            "a step in these weights is sure to lower the loss"
            if curves_down
            else "gradient descent in these weights is stable"
        )
        return f"{product}, {'below' if lr < advice.stable_learning_rate else 'at'} 2: {holds} at the start."
    if curves_down:
        return f"{product}, above 2: a step as long as this is not sure to lower the loss."
    return (
        f"{product}, above 2: gradient descent is unstable at the start. {advice.warmup.reason}\n"
        f"Next: {called_as()} initialize {shlex.quote(problem)} --lr {lr:g}"
    )
