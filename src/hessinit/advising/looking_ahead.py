"""A few trial steps on copies of the weights, to see where the curvature goes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hessinit.advising.reading import Rule, build_optimizer
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.errors import ProblemError
from hessinit.problem.problem import Problem
from hessinit.results.advice import LookAhead


def look_ahead(
    problem: Problem, rule: Rule, lr: float, steps: int, stable: Callable[[list[Evaluation]], float]
) -> LookAhead:
    """Step on the problem's own copies with a new optimizer, one batch a step, and measure once more.

    The copies stay where the steps lead: nothing that was evaluated before holds afterwards.
    """
    leaves = list(problem.leaves.values())
    optimizer = build_optimizer(rule, leaves, lr)
    gone = LookAhead(steps=steps, learning_rate=lr, loss=math.inf, stable_learning_rate=0.0)
    for number in range(steps):
        batch = problem.batches[number % len(problem.batches)]
        try:
            loss = problem.loss_of(problem.output(batch), batch)
        except ProblemError:
            return gone
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient.detach()
        optimizer.step()
    for leaf in leaves:
        leaf.grad = None
    try:
        evaluations = evaluate(problem)
        loss_there = sum(one.loss_value * one.weight for one in evaluations)
        rate = stable(evaluations)
    except ProblemError:  # not finite any more, or saturated until nothing bends
        return gone
    return LookAhead(steps=steps, learning_rate=lr, loss=loss_there, stable_learning_rate=rate)
