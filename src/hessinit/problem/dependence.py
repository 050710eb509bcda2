"""Does the loss depend on the weights through the output, and only so? Read off the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.problem.problem import Problem


def check_graph(problem: Problem, output: Tensor, loss: Tensor) -> None:
    """Weights → output → loss, with nothing around it and nothing that cannot be differentiated twice."""
    if not output.requires_grad:
        raise ProblemError(
            "the model's output does not depend on any measured weight: it was detached, computed under "
            "torch.no_grad(), or the weights are not used. Remove the detach, or measure other layers."
        )
    after = list(_nodes(loss.grad_fn, stop=output.grad_fn))
    if output.grad_fn not in after:
        raise ProblemError(
            "the loss is not a function of the model's output (it was detached, or the loss ignores it); "
            "compute it from its first argument."
        )
    weights = [*problem.model.named_parameters(), *problem.leaves.items()]
    owners = {id(parameter): name for name, parameter in weights}
    for node in after:
        name = owners.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ProblemError(
                f"the loss uses {name} itself (a penalty on the weights?), and not only through the model's "
                "output; measuring would miss that part. Leave it out of the loss: a penalty of c·‖w‖² adds "
                "2c to every eigenvalue of the exact Hessian."
            )
    check_no_reentrant_checkpoints(output)


def check_no_reentrant_checkpoints(output: Tensor) -> None:
    """They recompute the forward inside `backward()`, and refuse `autograd.grad`."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in _nodes(output.grad_fn)):
        raise ProblemError(
            "the model recomputes activations by reentrant checkpoints, which have no second derivative. "
            "Turn them off while measuring, or pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
        )


def custom_functions(output: Tensor) -> list[str]:
    """The user's own `torch.autograd.Function`s behind `output`: their backward may be anything."""
    found = [getattr(node, "_forward_cls", None) for node in _nodes(output.grad_fn)]
    own = [one for one in found if one is not None and not one.__module__.startswith("hessinit.")]
    return sorted({function.__name__ for function in own})


def _nodes(start: Any, stop: Any = None) -> Iterator[Any]:
    """Every node below `start`, which comes first; nothing below `stop`."""
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        if node is stop:
            continue
        for source, _ in node.next_functions:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
