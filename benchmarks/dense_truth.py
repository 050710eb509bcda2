"""‖H‖ of a random problem by plain autograd in fp64: dense matrices, without hessinit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from random_networks import Parts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def true_norms(parts: Parts, layers: dict[str, list[str]], curvature: str) -> dict[str, float]:
    """‖H‖ of each group of parameters, by plain autograd in fp64, a row at a time; without hessinit.

    Batches whose loss sums (by its `reduction`, which the generator sets right) are added up, others averaged
    over examples. nan where a matrix is not finite, as that of a cosine similarity at 0.
    """
    parts = parts.double()
    parameters = dict(parts.model.named_parameters(remove_duplicate=False))
    weights = list({parameters[name]: None for group in layers.values() for name in group})
    sizes = [targets.numel() for _, targets in parts.batches]
    sums = getattr(parts.loss, "reduction", None) == "sum" and type(parts.loss).__name__ != "PerBatch"
    with sdpa_kernel(SDPBackend.MATH), mock.patch("torch._weight_norm", _weight_norm):
        total = sum(
            (1.0 if sums else size / sum(sizes)) * _matrix(parts, batch, weights, curvature)
            for size, batch in zip(sizes, parts.batches, strict=True)
        )
    spans = dict(zip(weights, _spans(weights), strict=True))
    found = {}
    for layer, group in layers.items():
        own = {parameters[name]: None for name in group}
        index = torch.cat([torch.arange(*spans[weight]) for weight in own])
        block = total[index][:, index]
        finite = bool(torch.isfinite(block).all())
        found[layer] = float(torch.linalg.eigvalsh((block + block.T) / 2).abs().max()) if finite else math.nan
    return found


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """In place of torch's own, whose second derivative is wrong (seen in torch 2.13)."""
    assert dim == 0
    return direction * (length / direction.flatten(1).norm(dim=1).view(length.shape))


def _matrix(parts: Parts, batch: Any, weights: list[Tensor], curvature: str) -> Tensor:
    inputs, targets = batch
    call = parts.forward or (lambda model, x: model(x))
    output = call(parts.model, inputs)
    if curvature == "hessian":
        return _rows(_flat(torch.autograd.grad(parts.loss(output, targets), weights, create_graph=True,
                                               allow_unused=True), weights), weights)  # fmt: skip
    cut = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(parts.loss(cut, targets), cut, create_graph=True)
    if output.numel() > 1000:
        return _by_columns(output, weights, slope, cut)
    jacobian = _rows(output.reshape(-1), weights)
    return jacobian.T @ _rows(slope.reshape(-1), [cut]) @ jacobian


def _by_columns(output: Tensor, weights: list[Tensor], slope: Tensor, cut: Tensor) -> Tensor:
    """Far more outputs than weights: `J` and `H_z J` a column at a time."""
    placeholder = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, weights, placeholder, create_graph=True)
    jacobian = _rows(torch.cat([one.reshape(-1) for one in pulled]), [placeholder])
    bent = [
        torch.autograd.grad(slope, cut, column.view_as(slope), retain_graph=True)[0].reshape(-1)
        for column in jacobian
    ]
    return jacobian @ torch.stack(bent).T


def _rows(values: Tensor, by: list[Tensor]) -> Tensor:
    if not values.requires_grad:
        return values.new_zeros(len(values), sum(one.numel() for one in by))
    rows = [
        _flat(torch.autograd.grad(value, by, retain_graph=True, allow_unused=True), by)
        for value in values
    ]  # fmt: skip
    return torch.stack(rows).detach()


def _flat(gradients: tuple[Tensor | None, ...], by: list[Tensor]) -> Tensor:
    pairs = zip(gradients, by, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def _spans(weights: list[Tensor]) -> Iterator[tuple[int, int]]:
    first = 0
    for weight in weights:
        yield first, first + weight.numel()
        first += weight.numel()
