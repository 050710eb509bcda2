"""PyHessian, curvlinops and hessian-eigenthings: one layer after the other."""

from __future__ import annotations

import numpy as np
from problems import Problem
from settings import LANCZOS_STEPS, POWER_STEPS, TOLERANCE, Norms, Run


def pyhessian(problem: Problem, curvature: str) -> Run:
    """Exact Hessian only; on ReLU networks that is each layer's Gauss-Newton block as well."""
    from pyhessian import hessian

    parameters = list(problem.model.parameters())
    training = problem.model.training
    data = (problem.inputs, problem.targets)

    def run() -> Norms:
        try:
            for layer, weight in problem.weights.items():
                for parameter in parameters:  # It measures whatever requires a gradient, all together.
                    parameter.requires_grad_(parameter is weight)
                    parameter.grad = None
                measured = hessian(problem.model, problem.loss, data=data, cuda=problem.inputs.is_cuda)
                (value, *_), _ = measured.eigenvalues(maxIter=POWER_STEPS, tol=TOLERANCE, top_n=1)
                yield layer, abs(value)
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
                parameter.grad = None
            problem.model.train(training)  # It switches to eval mode and leaves it so.

    return run


def curvlinops(problem: Problem, curvature: str) -> Run:
    from curvlinops import GGNLinearOperator, HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    kind = GGNLinearOperator if curvature == "gauss-newton" else HessianLinearOperator
    data = [(problem.inputs, problem.targets)]

    def run() -> Norms:
        for layer, weight in problem.weights.items():
            # Both options save it passes over the data that one fixed batch does not need.
            savings = {"check_deterministic": False, "num_data": len(problem.inputs)}
            operator = kind(problem.model, problem.loss, [weight], data, **savings)
            start = np.random.default_rng(0).standard_normal(weight.numel()).astype(np.float32)
            which = "LA" if curvature == "gauss-newton" else "LM"
            top = eigsh(
                operator.to_scipy(), k=1, which=which, tol=TOLERANCE, v0=start, return_eigenvectors=False
            )
            yield layer, abs(float(top[0]))

    return run


def eigenthings(problem: Problem, curvature: str) -> Run:
    import hessian_eigenthings as library

    data = [(problem.inputs, problem.targets)]

    def operator_for(layer: str) -> object:
        only = library.match_names(f"{layer}.weight")
        if curvature == "hessian":
            loss = library.supervised_loss(problem.loss)
            return library.HessianOperator(problem.model, data, loss, param_filter=only)
        loss = library.supervised_loss_of_output(problem.loss)
        return library.GGNOperator(problem.model, data, library.supervised_forward, loss, param_filter=only)

    def run() -> Norms:
        for layer, weight in problem.weights.items():
            steps = min(LANCZOS_STEPS, weight.numel())
            which = "LA" if curvature == "gauss-newton" else "LM"
            result = library.lanczos(
                operator_for(layer), k=1, max_iter=steps, tol=TOLERANCE, which=which, seed=0
            )
            yield layer, abs(result.eigenvalues[0].item())

    return run
