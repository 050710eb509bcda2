"""What the competitors share: how the network is run, and random numbers that depend on seed and purpose."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hessinit.problem.substitutes import twice_differentiable

Loss = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Any]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, BatchNorm by the batch's own statistics, kernels that can be differentiated again.

    Both papers' code runs the network so. Modes and buffers are put back on leaving.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, nn.modules.batchnorm._BatchNorm)
        with twice_differentiable(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.data.copy_(value)


def evaluate(model: nn.Module, loss: Loss, batch: Any, forward: Forward | None) -> Tensor:
    inputs, targets = batch
    return loss(model(inputs) if forward is None else forward(model, inputs), targets)


def differentiate(value: Tensor, weights: list[nn.Parameter], *, again: bool = False) -> list[Tensor]:
    """The gradient, zero where `value` does not depend on a weight; `again` keeps it differentiable."""
    if not value.requires_grad:
        return [torch.zeros_like(weight) for weight in weights]
    return list(torch.autograd.grad(value, weights, create_graph=again, materialize_grads=True))


def multiply_hessian(
    gradients: list[Tensor], vectors: list[Tensor], weights: list[nn.Parameter]
) -> list[Tensor]:
    """H·v, from gradients that are still differentiable; zero where they do not depend on a weight."""
    pairs = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g.requires_grad]
    if not pairs:
        return [torch.zeros_like(weight) for weight in weights]
    outputs, directions = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, weights, directions, materialize_grads=True))


def inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The sum of products over all tensors, in fp64: squares of a deep network's gradients leave fp32."""
    return torch.stack([(a.double() * b.double()).sum() for a, b in zip(left, right, strict=True)]).sum()


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def seeded_generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU whose numbers no other purpose and no `torch.manual_seed(seed)` gives."""
    words = np.random.SeedSequence([seed % 2**64, zlib.crc32(purpose.encode())]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) % 2**63)
