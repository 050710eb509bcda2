"""BackPACK three ways, and ViViT, which stands on it: all layers from one backward pass where they can."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from problems import Problem
from settings import POWER_STEPS, TOLERANCE, Norms, Run
from torch import Tensor


def _extended(problem: Problem) -> tuple[Problem, torch.nn.Module]:
    """A copy of the problem with BackPACK's hooks, which would stay on the original for good."""
    from backpack import extend

    model = extend(copy.deepcopy(problem.model))
    loss = extend(copy.deepcopy(problem.loss))
    return Problem(problem.name, model, loss, problem.inputs, problem.targets), loss


def backpack_square_root(problem: Problem, curvature: str) -> Run:
    from backpack import backpack
    from backpack.extensions import SqrtGGNExact

    hooked, loss = _extended(problem)

    def run() -> Norms:
        with backpack(SqrtGGNExact()):
            loss(hooked.model(hooked.inputs), hooked.targets).backward()
        for layer, weight in hooked.weights.items():
            factor = weight.sqrt_ggn_exact.flatten(0, 1).flatten(1)
            gram = factor @ factor.T if factor.shape[0] <= factor.shape[1] else factor.T @ factor
            yield layer, torch.linalg.eigvalsh(gram)[-1].item()
            weight.grad = weight.sqrt_ggn_exact = None

    return run


def backpack_products(problem: Problem, curvature: str) -> Run:
    """One backward pass gives a matrix-vector product for every layer's block; then power iteration."""
    from backpack import backpack
    from backpack.extensions import GGNMP, HMP

    hooked, loss = _extended(problem)
    extension, product = (GGNMP, "ggnmp") if curvature == "gauss-newton" else (HMP, "hmp")

    def run() -> Norms:
        with backpack(extension()):
            loss(hooked.model(hooked.inputs), hooked.targets).backward(retain_graph=True)
        for layer, weight in hooked.weights.items():
            multiply = getattr(weight, product)
            yield layer, power_iteration(lambda vector, by=multiply: by(vector[None])[0].detach(), weight)
            weight.grad = None
            setattr(weight, product, None)

    return run


def backpack_hessianfree(problem: Problem, curvature: str) -> Run:
    from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
    from backpack.hessianfree.hvp import hessian_vector_product

    def run() -> Norms:
        output = problem.model(problem.inputs)
        loss = problem.loss(output, problem.targets)
        for layer, weight in problem.weights.items():
            if curvature == "gauss-newton":

                def multiply(vector: Tensor, weight: Tensor = weight) -> Tensor:
                    return ggn_vector_product_from_plist(loss, output, [weight], [vector])[0]
            else:
                gradient = torch.autograd.grad(loss, [weight], create_graph=True)

                def multiply(vector: Tensor, weight: Tensor = weight, gradient: tuple = gradient) -> Tensor:
                    return hessian_vector_product(loss, [weight], [vector], grad_params=gradient)[0]

            yield layer, power_iteration(multiply, weight)

    return run


def power_iteration(multiply: Callable[[Tensor], Tensor], weight: Tensor) -> float:
    """PyHessian's rule, made scale-free: stop when two Rayleigh quotients agree to the tolerance."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(weight.shape, generator=generator)
    vector /= vector.norm()
    before, value = None, 0.0
    for _ in range(POWER_STEPS):
        product = multiply(vector)
        value = (vector * product).sum().item()
        vector = product / product.norm()
        if before is not None and abs(value - before) <= TOLERANCE * abs(value):
            break
        before = value
    return abs(value)


def vivit(problem: Problem, curvature: str) -> Run:
    from backpack import backpack
    from vivit import EigvalshComputation

    def symeig(matrix: Tensor, eigenvectors: bool = False, upper: bool = True) -> tuple:
        return torch.linalg.eigh(matrix) if eigenvectors else (torch.linalg.eigvalsh(matrix), None)

    torch.Tensor.symeig = symeig  # torch 2.0 removed it; ViViT 1.0.0 still calls it.
    hooked, loss = _extended(problem)

    def run() -> Norms:
        computation = EigvalshComputation()
        groups = {layer: {"params": [weight]} for layer, weight in hooked.weights.items()}
        value = loss(hooked.model(hooked.inputs), hooked.targets)
        hook = computation.get_extension_hook(list(groups.values()))
        with backpack(computation.get_extension(), extension_hook=hook):
            value.backward()
        for layer, group in groups.items():
            yield layer, computation.get_result(group).abs().max().item()
            group["params"][0].grad = None

    return run
