"""One evaluation whose graph reaches back to what the network starts from: its inputs, or its embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessinit.curvature.evaluation import Evaluation
from hessinit.problem.batches import map_tensors
from hessinit.problem.determinism import check_no_reentrant_checkpoints


@dataclass(frozen=True)
class Start:
    """A tensor that the network starts from: a floating input, or what an embedding gives for its tokens."""

    tensor: Tensor
    looked_up: bool


@dataclass(frozen=True)
class Traced:
    """The output with its graph, and the starts in it; `reason` says why there are none."""

    output: Tensor
    starts: tuple[Start, ...]
    reason: str = ""


def trace_from_start(evaluation: Evaluation) -> Traced:
    """Evaluate once more with inputs that can be differentiated by; costs one forward."""
    leaves: list[Start] = []

    def open_(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_()
        leaves.append(Start(leaf, looked_up=False))
        return leaf

    batch = dataclasses.replace(evaluation.batch, inputs=map_tensors(open_, evaluation.batch.inputs))
    lookups = _Lookups()
    try:
        with lookups:
            output = evaluation.problem.output(batch)
    except Exception as failure:  # the same forward ran before: what it cannot take is the opened inputs
        reason = f"the forward fails on inputs that require gradients ({type(failure).__name__})"
        return Traced(evaluation.output, (), reason)
    check_no_reentrant_checkpoints(output)
    starts = (*leaves, *(Start(tensor, looked_up=True) for tensor in lookups.found))
    reason = "" if starts else "the network has neither floating inputs nor embeddings to start from"
    return Traced(output, starts, reason)


class _Lookups(TorchFunctionMode):
    """Keeps what every embedding gives, also one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return result
        self.found.append(result if result.requires_grad else result.detach().requires_grad_())
        return self.found[-1].clone()  # the forward may go on in place
