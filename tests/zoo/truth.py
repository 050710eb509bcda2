"""The dense truth of each problem of the zoo, worked out once per session."""

from __future__ import annotations

import functools

from dense import DenseCurvature, Extremes, dense_curvature, ends
from zoo.problem import Problem


@functools.cache
def true_matrices(problem: Problem, curvature: str) -> DenseCurvature:
    model, loss, batch = problem.build()
    if problem.stand_in is not None:
        model = problem.stand_in(model)
    options = {"layers": problem.options.get("layers"), "forward": problem.forward}
    return dense_curvature(model, loss, batch, curvature, hessian_by=problem.hessian_by, **options)


@functools.cache
def true_layers(problem: Problem, curvature: str) -> dict[str, Extremes]:
    return {name: ends(matrix) for name, matrix in true_matrices(problem, curvature).layers.items()}


@functools.cache
def true_network(problem: Problem, curvature: str) -> Extremes:
    return ends(true_matrices(problem, curvature).network)
