"""A custom function may have a backward that cannot be differentiated; torch takes it for constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hessinit.errors import ProblemError
from hessinit.problem.dependence import custom_functions

if TYPE_CHECKING:
    from hessinit.operators.evaluation import Evaluation


def check_second_derivative(evaluation: Evaluation) -> None:
    """Compare a product with `J`, which needs a second derivative, with one of `Jᵀ`, which does not.

    Where the backward of a custom function is a constant to torch, the former lacks what lies before it,
    silently. Without custom functions there is nothing to do.
    """
    functions = custom_functions(evaluation.output)
    if not functions:
        return
    output, leaves = evaluation.output, evaluation.problem.leaves
    generator = torch.Generator().manual_seed(0x4E55)

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)

    cotangent, tangents = draw(output), [draw(leaf) for leaf in leaves.values()]
    forward = evaluation.push_unchecked(list(leaves), tangents) * cotangent
    pulled = evaluation.pull(list(leaves), cotangent)
    backward = [part * tangent for part, tangent in zip(pulled, tangents, strict=True)]
    total = sum(float(part.sum()) for part in backward)
    size = float(forward.norm()) + sum(float(part.norm()) for part in backward)
    if not abs(float(forward.sum()) - total) <= 10 * torch.finfo(output.dtype).eps ** 0.5 * size:
        raise ProblemError(
            f"the backward of {', '.join(functions)} cannot be differentiated (once_differentiable, or "
            "numbers that leave torch), so second derivatives would be silently wrong. Write it with "
            "differentiable torch operations."
        )
