"""Does the loss depend on the weights through the output, and only so? Read off the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    _check_every_way_is_seen(problem, output, loss)
    after = list(_nodes(loss.grad_fn, stop=output.grad_fn))
    if output.grad_fn not in after:
        raise ProblemError(
            "the loss is not a function of the model's output (it was detached, or the loss ignores it); "
            "compute it from its first argument."
        )
    name = _first_of(after, problem.leaves)
    if name is not None:
        raise ProblemError(
            f"the loss depends on {name} not only through the model's output: by a penalty on the weights, "
            "by an auxiliary loss that the forward keeps in an attribute, or by a layer that the loss uses, "
            "too. Measuring would miss that part. Leave a penalty out (c·‖w‖² adds 2c to every eigenvalue "
            "of the exact Hessian); return anything else as a further column of the output (forward=) and "
            "take it from there in the loss."
        )
    check_no_reentrant_checkpoints(output)


def _check_every_way_is_seen(problem: Problem, output: Tensor, loss: Tensor) -> None:
    """The graph must reach the leaves only, and none of the parameters that they replace."""
    own = {name: problem.model.get_parameter(name) for name in problem.leaves}
    for who, start in (("the forward", output), ("the loss", loss)):
        name = _first_of(_nodes(start.grad_fn), own)
        if name is not None:
            raise ProblemError(
                f"{who} reaches {name} by a way that cannot be followed (an attribute of a class, a "
                "variable of another module, a view that was made earlier), so a part of its derivative "
                "would be missing. Keep the weight in an attribute of the model, and make views of it inside "
                "the forward."
            )


def _first_of(nodes: Iterable[Any], tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that one of the nodes accumulates gradients for."""
    owners = {id(tensor): name for name, tensor in tensors.items()}
    found = (owners.get(id(getattr(node, "variable", None))) for node in nodes)
    return next((name for name in found if name is not None), None)


def check_no_reentrant_checkpoints(output: Tensor) -> None:
    """They recompute the forward inside `backward()`, and refuse `autograd.grad`."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in _nodes(output.grad_fn)):
        raise ProblemError(
            "the model recomputes activations by reentrant checkpoints, which have no second derivative. "
            "Turn them off while measuring, or pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
        )


def custom_functions(output: Tensor, stop: Tensor | None = None) -> list[str]:
    """The names of the user's own `torch.autograd.Function`s between `stop` and `output`."""
    nodes = _nodes(output.grad_fn, None if stop is None else stop.grad_fn)
    found = [getattr(node, "_forward_cls", None) for node in nodes]
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
