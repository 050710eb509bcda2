"""The stable rate of an optimizer whose groups have rates or decays of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.groups import groups_by_weight, read_common_rule, slowness_of
from hessinit.advising.rates import adaptive_rates, build_engine
from hessinit.advising.scaled_edge import scaled_edge
from hessinit.curvature.engines import Effort
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.operators import join
from hessinit.problem.layers import find_layers
from hessinit.problem.problem import Loss, Problem, explained_memory
from hessinit.problem.validate import unwrap
from hessinit.results.estimates import Estimate


@dataclass(frozen=True)
class GroupedRate:
    """The largest rate of the groups, and the largest stable one while they keep their proportions."""

    optimizer: str
    lr: float
    stable: float
    norm: Estimate
    is_adaptive: bool


def groups_differ(optimizer: torch.optim.Optimizer, model: nn.Module, layers: Any) -> bool:
    """Whether the weights measured have several rates or decays, so that `advise` refuses them."""
    groups = groups_by_weight(optimizer, unwrap(model))
    held = [groups[one.parameter] for one in find_layers(unwrap(model), layers) if one.parameter in groups]
    return len({(_rate(group), float(group.get("weight_decay", 0.0))) for group in held}) > 1


def grouped_rate(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    curvature: str,
    effort: Effort,
    layers: Any = None,
    **options: Any,
) -> GroupedRate:
    """Measured in coordinates where all weights go as fast as the fastest; `options` are of `Problem`."""
    inner = unwrap(model)
    groups = groups_by_weight(optimizer, inner)
    wanted = find_layers(inner, layers)
    rule = read_common_rule(optimizer, inner, wanted).rule
    held = [layer.parameter for layer in wanted if layer.parameter in groups]
    problem = Problem(model, loss, batch, layers=held, **options)
    rates = {name: _rate(groups[name]) for name in held}
    with problem.settings(), explained_memory(problem):
        evaluations = evaluate(problem)
        slowness = slowness_of(rates, problem.leaves)
        if isinstance(rule, Adaptive):
            found = adaptive_rates(rule, None, evaluations, curvature, "mini-batches", effort, slowness)
            stable, norm = found.stable_rate(rule), found.norm
        else:
            decay = join(
                [
                    torch.full_like(leaf, float(groups[name]["weight_decay"])).detach()
                    for name, leaf in problem.leaves.items()
                ]
            )
            matrix = build_engine(evaluations, curvature, effort).operator(list(problem.leaves))
            stable, norm = scaled_edge(rule, matrix, None, slowness, decay, effort)
    return GroupedRate(str(rule), max(rates.values()), stable, norm, isinstance(rule, Adaptive))


def _rate(group: dict[str, Any]) -> float:
    # A scheduler that warms up has put the rate down to its first value, and the one meant beside it.
    return float(group.get("initial_lr", group["lr"]))
