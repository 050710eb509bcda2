"""Each layer's norm in fp64, by routes that share nothing with the contestants.

- `dense`: the layer's matrix written out with torch.func, then `eigvalsh`; for small layers.
- `gram`: Gauss-Newton of any layer from one explicit Jacobian row per example and output: the nonzero
  spectrum of Jᵀ·H_z·J is that of Lᵀ·(J·Jᵀ)·L, where H_z = L·Lᵀ.
- `eigsh`: the exact Hessian by SciPy's implicitly restarted Lanczos on double-backward products.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from problems import Problem, build_problem
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.func import functional_call, hessian, jacrev, replace_all_batch_norm_modules_

DENSE_LIMIT = 2500
CHECKED_ON = "gelu"


def _output_of(problem: Problem, layer: str, weight: Tensor) -> Tensor:
    return functional_call(problem.model, {f"{layer}.weight": weight}, (problem.inputs,))


def dense_norm(problem: Problem, layer: str, curvature: str) -> float:
    """The largest |eigenvalue| of the layer's written-out matrix. Costs weights² numbers."""
    weight = problem.weights[layer].detach()

    def loss_of_weight(value: Tensor) -> Tensor:
        return problem.loss(_output_of(problem, layer, value), problem.targets)

    if curvature == "hessian":
        matrix = hessian(loss_of_weight)(weight).reshape(weight.numel(), weight.numel())
    else:
        output = _output_of(problem, layer, weight)
        jacobian = jacrev(lambda value: _output_of(problem, layer, value))(weight).reshape(-1, weight.numel())
        matrix = jacobian.T @ _output_hessian(problem, output) @ jacobian
    return torch.linalg.eigvalsh((matrix + matrix.T) / 2).abs().max().item()


def _output_hessian(problem: Problem, output: Tensor) -> Tensor:
    matrix = hessian(lambda value: problem.loss(value, problem.targets))(output.detach())
    return matrix.reshape(output.numel(), output.numel())


def gram_norms(problem: Problem) -> dict[str, float]:
    """Gauss-Newton norms of all layers, one layer's Jacobian in memory at a time."""
    eigenvalues, vectors = torch.linalg.eigh(_output_hessian(problem, problem.model(problem.inputs)))
    factor = vectors * eigenvalues.clamp(min=0).sqrt()
    norms = {}
    for layer, weight in problem.weights.items():
        jacobian = torch.cat([_jacobian_rows(problem, weight, start) for start in _starts(problem)])
        gram = factor.T @ (jacobian @ jacobian.T) @ factor
        norms[layer] = torch.linalg.eigvalsh((gram + gram.T) / 2)[-1].item()
    return norms


def _starts(problem: Problem) -> list[slice]:
    size = len(problem.inputs)
    return [slice(0, size)] if problem.examples_mix else [slice(index, index + 1) for index in range(size)]


def _jacobian_rows(problem: Problem, weight: Tensor, examples: slice) -> Tensor:
    outputs = problem.model(problem.inputs[examples]).flatten()
    rows = [torch.autograd.grad(output, weight, retain_graph=True)[0].flatten() for output in outputs]
    return torch.stack(rows)


def eigsh_norm(problem: Problem, layer: str, tolerance: float = 1e-8) -> float:
    """The largest |eigenvalue| of the exact Hessian; ARPACK's value is good to about tolerance²."""
    weight = problem.weights[layer]
    value = problem.loss(problem.model(problem.inputs), problem.targets)
    (gradient,) = torch.autograd.grad(value, weight, create_graph=True)
    # ARPACK's tolerance is relative, but its floor is absolute: bring the loss to ordinary size first.
    scale = 1 / gradient.detach().norm().item()

    def multiply(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(vector.reshape(weight.shape)) * scale
        return torch.autograd.grad(gradient, weight, direction, retain_graph=True)[0].flatten().numpy()

    start = np.random.default_rng(0).standard_normal(weight.numel())
    operator = LinearOperator((weight.numel(),) * 2, matvec=multiply, dtype=np.float64)
    top = eigsh(operator, 1, which="LM", tol=tolerance, v0=start, return_eigenvectors=False)
    return abs(float(top[0])) / scale


def true_norms(problem: Problem, curvature: str) -> tuple[dict[str, float], str]:
    """Every layer's norm in fp64, and the route taken."""
    problem = problem.in_double()
    # torch.func cannot write running statistics; in train mode they do not enter the output.
    replace_all_batch_norm_modules_(problem.model)
    if max(weight.numel() for weight in problem.weights.values()) <= DENSE_LIMIT:
        return {layer: dense_norm(problem, layer, curvature) for layer in problem.weights}, "dense"
    if curvature == "gauss-newton":
        return gram_norms(problem), "gram"
    return {layer: eigsh_norm(problem, layer) for layer in problem.weights}, "eigsh"


def check_references() -> dict[str, float]:
    """The worst relative difference of `gram` and `eigsh` from `dense`, where all three can be had."""
    problem = build_problem(CHECKED_ON).in_double()
    gram = gram_norms(problem)
    differences = {"gram": 0.0, "eigsh": 0.0}
    for layer in problem.weights:
        for route, value, curvature in [
            ("gram", gram[layer], "gauss-newton"),
            ("eigsh", eigsh_norm(problem, layer), "hessian"),
        ]:
            dense = dense_norm(problem, layer, curvature)
            differences[route] = max(differences[route], abs(value - dense) / dense)
    return differences


class TruthBook:
    """True norms kept in a JSON file: they cost minutes, and belong to a fingerprint of the problem."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages = json.loads(path.read_text()) if path.exists() else {}

    def look_up(self, problem: Problem, curvature: str) -> dict[str, float] | None:
        page = self.pages.get(f"{problem.name}/{curvature}")
        if page is None or not np.allclose(page["fingerprint"], problem.fingerprint(), rtol=1e-6, atol=0):
            return None
        return page["norms"]

    def find(self, problem: Problem, curvature: str) -> dict[str, float]:
        known = self.look_up(problem, curvature)
        if known is not None:
            return known
        norms, route = true_norms(problem, curvature)
        page = {"route": route, "norms": norms, "fingerprint": problem.fingerprint()}
        self.pages[f"{problem.name}/{curvature}"] = page
        self.path.write_text(json.dumps(self.pages, indent=1, sort_keys=True) + "\n")
        return norms
