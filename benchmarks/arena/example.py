"""Made-up outcomes, to look at tables and pictures before any training. No number here was measured."""

from __future__ import annotations

import numpy as np

from arena.outcomes import Outcome

SCHEMES = ("default", "he", "glorot", "lsuv", "gradinit", "he+warmup", "fixup", "hessinit")
TASKS = ("relu-3", "relu-30", "tanh-10", "residual-20", "plain-cnn-9", "lstm", "post-ln")


def made_up_outcomes() -> tuple[list[Outcome], tuple[str, ...], dict[str, list[float]]]:
    """Outcomes, the names that are ours, and losses at our suggested rate."""
    generator = np.random.default_rng(7)
    outcomes = []
    for place, task in enumerate(TASKS):
        schemes = tuple(scheme for scheme in SCHEMES if scheme != "fixup" or task == "residual-20")
        rates = tuple(float(f"{0.003 * 10 ** (step / 2):.2g}") for step in range(5))
        middle = generator.uniform(1, 4, (len(schemes), 1, 1))
        losses = 0.4 + 0.15 * (np.arange(5)[None, :, None] - middle) ** 2
        losses = losses * np.exp(0.05 * generator.standard_normal((len(schemes), 5, 3)))
        losses[-1, :4] *= 0.85 - 0.02 * place
        losses[:2, 4] = np.nan
        if task == "lstm":
            losses[:, 0] = 2.3
        if task == "post-ln":
            losses[-1, 4, 1] = np.inf
        outcomes.append(Outcome(task=task, schemes=schemes, rates=rates, losses=losses, chance=2.3))
    own = {
        outcome.task: (outcome.means[:-1].min() * generator.uniform(0.9, 1.1, 3)).tolist()
        for outcome in outcomes
    }
    return outcomes, ("hessinit",), own
